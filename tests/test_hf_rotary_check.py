"""Layers and rotary modules in memory that are not what the configuration gives: refused.

People change a configuration after the model was built, or scale frequencies in place.
"""

import copy

import pytest
import torch
import wavepe.hf
from hf_families import FAMILIES, build, by_turns
from hf_model import SCALINGS, close, logits, own_tiny, patched_tiny, pickled, tiny, tokens
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention
from wavepe.hf import rotary_check
from wavepe.hf.rope_config import bases, write_bases

IDS = tokens(1, 30)
DIFFER = "the rotary embedding of this model is not what its configuration gives"
CHANGED_ROPE = "rope parameters of a live model were changed from .* to .* in layer"
ANOTHER_LAYER = r"layer \d of this model is not what its configuration gives: .* in memory and "


def with_changed_base(model):
    write_bases(model.config, {key: 7 * value for key, value in bases(model.config).items()})


def with_changed_frequencies(model):
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(0.5)
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith("original_inv_freq"):
                value.mul_(0.5)


def with_changed_factor(model):
    model.base_model.rotary_emb.attention_scaling = 1.5


def with_interpolated_positions(model):
    rotary = model.base_model.rotary_emb
    rotary.inv_freq = rotary.inv_freq / 4


CHANGES = (
    with_interpolated_positions, with_changed_base, with_changed_frequencies, with_changed_factor,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_rotation_of_the_model_itself(change):
    model = tiny()
    change(model)
    stock = logits(model, IDS)
    for spec in ("rope", "rope:inference_theta=500", "rope+alibi", {"0": "none"}):
        with pytest.raises(ValueError, match=DIFFER):
            wavepe.hf.patch(model, spec)
    assert torch.equal(logits(model, IDS), stock)  # nothing has changed
    for spec in ("wavelet:scales=4", "rope:theta=100", {"0": "none", "1": "alibi"}):
        wavepe.hf.unpatch(wavepe.hf.patch(model, spec))
    assert torch.equal(logits(model, IDS), stock)


@pytest.mark.parametrize("change", CHANGES)
def test_set_theta_mends_a_base_alone(change):
    """It keeps the scaling, so it must know it."""
    model, wanted = tiny(), wavepe.hf.set_theta(tiny(), 300.0)
    change(model)
    if change is with_changed_base:
        wavepe.hf.set_theta(model, 300.0)
        assert torch.equal(logits(model, IDS), logits(wanted, IDS))
        wavepe.hf.patch(model, "rope")
    else:
        with pytest.raises(ValueError, match=DIFFER):
            wavepe.hf.set_theta(model, 300.0)


@pytest.mark.parametrize("base", [{}, {"rope_theta": None}])
def test_a_scaling_that_is_set_without_a_base(base):
    """Then `rope_parameters` has no rope_theta: setting `rope_scaling` writes None there."""
    model = tiny()
    model.config.rope_parameters = {"rope_type": "yarn", "factor": 4.0, **base}
    for spec in ("rope", "rope+alibi"):
        with pytest.raises(ValueError, match=rf"{DIFFER}: its slowest .* has no rope_theta"):
            wavepe.hf.patch(model, spec)
    wavepe.hf.unpatch(wavepe.hf.patch(model, "alibi"))
    wavepe.hf.patch(wavepe.hf.set_theta(model, 30.0), "rope")


@by_turns()
def test_models_that_agree(family):
    """Each family, also cast to a narrow dtype, which rounds the frequencies."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = build(family).to(dtype)
        model(IDS)
        wavepe.hf.patch(model, "rope")
        wavepe.hf.unpatch(model)


@pytest.mark.parametrize("kind", SCALINGS)
def test_scalings_are_no_difference(kind):
    """Nor are the frequencies that dynamic scaling leaves after a long sequence."""
    model = tiny(rope_parameters={"rope_type": kind, "rope_theta": 50.0, **SCALINGS[kind]})
    model(tokens(1, 70))
    wavepe.hf.patch(model, "rope")
    wavepe.hf.unpatch(model)
    wavepe.hf.set_theta(model, 90.0)
    wavepe.hf.patch(model, "rope")


def refused_by_pass_and_file(model, folder, error):
    for use in (lambda: model.save_pretrained(folder), lambda: model(IDS)):
        with pytest.raises(ValueError, match=error):
            use()
    assert not list(folder.glob("*"))


@pytest.mark.parametrize(
    "spec", ["rope", "rope+alibi", "rope:inference_theta=500", {"1": "none"}], ids=str
)
def test_a_patched_model_whose_configuration_changes(spec, tmp_path):
    """It would compute on as before, and save another base."""
    model = wavepe.hf.patch(tiny(), spec)
    before = logits(model, IDS)
    old = copy.deepcopy(model.config)
    with_changed_base(model)
    for each in (model, copy.deepcopy(model), pickled(model)):
        refused_by_pass_and_file(each, tmp_path, CHANGED_ROPE)
    with pytest.raises(ValueError, match=CHANGED_ROPE):
        copy.deepcopy(model).config.save_pretrained(tmp_path)  # no model is asked
    write_bases(model.config, bases(old))
    assert torch.equal(logits(model, IDS), before)
    other = wavepe.hf.patch(tiny(), "rope:theta=30")
    with_changed_base(other)
    other(IDS)  # its base is its own
    other.save_pretrained(tmp_path)


WINDOWED = [name for name, kind in FAMILIES.items() if any(kind.windows)]
LIVE_WINDOWS = {"mistral", "mixtral", "ministral3"}  # their layers read the configuration


def swapped(values):
    """A list or a dict in which two kinds have changed places."""
    if isinstance(values, dict):
        return dict(zip(values, reversed(values.values()), strict=True))
    first, second = sorted(set(values) - {0})
    return [{first: second, second: first}.get(x, x) for x in values]


@pytest.mark.parametrize(
    ("family", "spec", "key", "change"),
    [
        *[
            (x, "alibi", "sliding_window", lambda w: 2 * w)
            for x in WINDOWED
            if x not in LIVE_WINDOWS
        ],
        *[(x, "alibi", "layer_types", swapped) for x in WINDOWED if x not in LIVE_WINDOWS],
        ("smollm3", "alibi", "no_rope_layers", lambda _: [0, 1]),
        ("gemma2", "alibi", "attn_logit_softcapping", lambda _: 1.0),
        ("granite", "alibi", "attention_multiplier", lambda _: 1.0),
        ("gemma4_text", "alibi", "num_kv_shared_layers", lambda _: 0),
        ("qwen3", "alibi", "head_dim", lambda _: 16),
        ("granite_swa", "alibi", "layer_rope_theta", lambda bases: [0, *bases[1:]]),
        *[("granite_swa", x, "layer_rope_theta", swapped) for x in ("rope", {"1": "none"})],
        *[("gemma3_text", x, "rope_parameters", swapped) for x in ("rope", {"1": "none"})],
        ("llama", "rope", "rope_parameters", lambda _: None),
    ],
)
def test_what_the_layers_do_not_follow(family, spec, key, change, tmp_path):
    """Masks, caches and files would."""
    if family not in FAMILIES:
        pytest.skip("this transformers does not have the family")
    stock, model = build(family), wavepe.hf.patch(build(family), spec)
    model(IDS)
    for each in (stock, model):
        setattr(each.config, key, change(getattr(each.config, key)))
    rotates = key in ("rope_parameters", "layer_rope_theta")
    refused_by_pass_and_file(model, tmp_path, CHANGED_ROPE if rotates else ANOTHER_LAYER)
    if key in ("sliding_window", "layer_types"):
        with pytest.raises(ValueError, match=ANOTHER_LAYER):
            wavepe.hf.patch(stock, "rope")
        wanted = logits(stock, IDS)
        stock.set_attn_implementation("wavepe")
        assert close(logits(stock, IDS), wanted)


@pytest.mark.parametrize("family", sorted(set(WINDOWED) & LIVE_WINDOWS))
def test_windows_that_layers_read_from_the_configuration(family, tmp_path):
    stock, model = build(family), wavepe.hf.patch(build(family), "rope")
    model(IDS)
    stock.config.sliding_window = model.config.sliding_window = 12
    assert close(logits(model, IDS), logits(stock, IDS))
    model.save_pretrained(tmp_path)


def test_a_change_that_layers_need_not_follow(monkeypatch, tmp_path):
    """It is looked at once, and passes go on without a look. A file is looked at as it loads."""
    looks, check = [], rotary_check.check_layers
    model = wavepe.hf.patch(build("qwen3_mixed"), "alibi")
    monkeypatch.setattr(rotary_check, "check_layers", lambda *x: looks.append(1) or check(*x))
    for key, value, count in (("use_cache", False, 1), ("use_sliding_window", False, 2)):
        setattr(model.config, key, value)
        for _ in range(2):
            model(IDS)
        assert len(looks) == count
    with pytest.raises(ValueError, match="sliding_window is 6 in memory and None by the conf"):
        model.save_pretrained(tmp_path)


def test_models_that_share_a_configuration(tmp_path):
    """It is compared with the one that is saved, and it may hold tensors that a program changes."""
    first = own_tiny("alibi")
    second = type(first)(first.config)
    second.model.layers[0].self_attn.scaling = 1.0
    for first.config.class_weights in (torch.ones(2), torch.zeros(2)):
        first(IDS)
    del first.config.class_weights
    first.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=ANOTHER_LAYER):
        second.save_pretrained(tmp_path)


def test_layers_of_a_class_of_ones_own():
    class Attention(LlamaAttention):
        def __init__(self, number):
            super().__init__(LlamaConfig(), number)

    model = tiny()
    model.model.layers[0].self_attn.__class__ = Attention
    wavepe.hf.patch(model, "alibi")


@pytest.mark.parametrize("own", [False, True], ids=["patched", "of a wavepe type"])
def test_a_changed_encoding_is_not_saved(own, tmp_path):
    """The folder would be another model. A configuration alone may be changed and saved."""
    model = own_tiny("alibi") if own else patched_tiny("alibi")
    config = copy.deepcopy(model.config)
    model.config.position_encoding = "wavelet:scales=4"
    with pytest.raises(ValueError, match="live model was changed from 'alibi' to 'wavelet"):
        model.save_pretrained(tmp_path)
    model.config.position_encoding = "alibi"
    model.save_pretrained(tmp_path)
    config.position_encoding = "none"
    config.save_pretrained(tmp_path / "config")
