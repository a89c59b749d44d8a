"""Hybrids: encodings by ranges of layers; those that are refused are in test_hf_patch.py."""

import copy
import json

import numpy as np
import pytest
import torch
import wavepe.hf
from cases import forget_registrations
from encoding_cases import ASKED
from hf_families import stirred
from hf_model import begun_pass, close, gradients, llamas, logits, pickled, reference, tiny, tokens
from transformers import AutoModelForCausalLM, DynamicCache
from wavepe.encodings import Bias, Encoding, Kerple
from wavepe.hf.layers import LayerEncodings

BASE_100 = {"rope_type": "default", "rope_theta": 100.0}
IDS = tokens(2, 14)
WAVELET = "wavelet:scales=4"
HYBRIDS = [
    ({"0": WAVELET, "1": "alibi", "2": "none", "3": "rope"}, [WAVELET, "alibi", "none", "rope"]),
    ({"1-2": "none"}, ["rope", "none", "none", "rope"]),
    ({"0-2": "rope:theta=100", 3: WAVELET}, ["rope:theta=100"] * 3 + [WAVELET]),
    ({"0-3": "alibi"}, ["alibi"] * 4),
    ({"0": "rope+alibi", "2-3": WAVELET}, ["rope+alibi", "rope", WAVELET, WAVELET]),
    (f"rope@::2+{WAVELET}@1::2", ["rope", WAVELET] * 2),
    (f"rope+{WAVELET}@-1:", ["rope"] * 3 + [f"rope+{WAVELET}"]),
    ("rope:theta=100@0.3+rope@1", ["rope:theta=100", "rope", "none", "rope:theta=100"]),
    ("sinusoidal+alibi@0.2", ["sinusoidal+alibi", "none", "alibi", "none"]),
]


@pytest.mark.parametrize(("spec", "specs"), HYBRIDS)
def test_each_layer_has_its_own(spec, specs):
    model = tiny(num_hidden_layers=4)
    stock = logits(model, IDS)
    wavepe.hf.patch(model, spec)
    got = logits(model, IDS)
    for row in range(2):
        assert close(got[row], reference(model, IDS[row], specs)[0])
    cache, pieces = DynamicCache(config=model.config), []
    for piece in IDS.split((5, 1, 8), dim=1):
        pieces.append(logits(model, piece, past_key_values=cache))
    assert close(torch.cat(pieces, 1), got, 1e-5)
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    padded = logits(model, IDS, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert close(padded[0, 4:], reference(model, IDS[0, 4:], specs)[0])
    wavepe.hf.unpatch(model)
    assert torch.equal(logits(model, IDS), stock)


def test_layers_that_are_not_named_keep_their_own():
    """They take the base and the scaling of the model."""
    scaling = {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}
    model = tiny(num_hidden_layers=2, rope_parameters=scaling)
    stock, found = logits(model, IDS), {}
    named = {"0": "rope:type=linear,theta=50,factor=4", "1": "alibi"}
    for name, spec in {"one": {"1": "alibi"}, "named": named, "both": "alibi"}.items():
        with wavepe.hf.patched(model, spec):
            found[name] = logits(model, IDS)
    assert close(found["one"], found["named"], 1e-6)
    assert not close(found["one"], stock, 1e-3)
    assert not close(found["both"], found["one"], 1e-3)


def test_saved_loaded_and_converted(tmp_path):
    spec = {"0-1": WAVELET, "3": "shaw:clip=3"}
    model = stirred(wavepe.hf.patch(tiny(num_hidden_layers=4), spec))
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["position_encoding"] == spec
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))
    other = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", position_encoding={"0-1": WAVELET}
    )
    tiny(num_hidden_layers=4).save_pretrained(tmp_path / "stock")
    done = wavepe.hf.convert(tmp_path / "stock", tmp_path / "converted", {"0-1": WAVELET})
    assert done.encoding == {"0-1": WAVELET}
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert torch.equal(logits(converted, IDS), logits(other, IDS))


def test_parameters_of_a_layers_own(tmp_path):
    """They are saved, loaded and copied with their layer, and go with unpatch."""
    spec = f"rope@::2+{ASKED}@1::2+shaw:clip=3@0.1"
    model = stirred(wavepe.hf.patch(tiny(num_hidden_layers=4), spec))
    names = [name for name, _ in model.named_parameters() if "position_encoding." in name]
    own = ("u", "v", "projection")
    assert names == [
        *(f"model.layers.{i}.self_attn.position_encoding.wavelet.{x}" for i in (1, 3) for x in own),
        "model.position_encoding.shaw.table",
    ]
    wanted = logits(model, IDS)
    parts = [str(wavepe.encoding(spec).at(i, 4)) for i in range(4)]
    assert parts == ["rope+shaw:clip=3", f"{ASKED}+shaw:clip=3", "rope", ASKED]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, IDS), wanted)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.model.layers[1].self_attn.position_encoding.wavelet.u.dtype == torch.float32
    copied = copy.deepcopy(model)
    for same in (copied, pickled(model)):
        assert torch.equal(logits(same, IDS), wanted)
        with torch.no_grad():
            same.model.layers[3].self_attn.position_encoding.wavelet.u.add_(1)
            same.model.position_encoding.shaw.table.add_(1)
        assert not torch.equal(logits(same, IDS), wanted)
    assert torch.equal(logits(model, IDS), wanted)
    decayed, plain = wavepe.hf.parameter_groups(model, 0.1)
    assert len(plain["params"]) >= len(names)
    assert {id(x) for x in decayed["params"]}.isdisjoint(
        id(x) for name, x in model.named_parameters() if name in names
    )
    wavepe.hf.unpatch(model)
    assert not [name for name, _ in model.named_modules() if "position_encoding" in name]
    other = AutoModelForCausalLM.from_pretrained(tmp_path, position_encoding="rope")
    assert torch.equal(logits(other, IDS), logits(wavepe.hf.patch(model, "rope"), IDS))
    initial = logits(wavepe.hf.patch(wavepe.hf.unpatch(model), spec), IDS)
    other.save_pretrained(tmp_path / "rope")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "rope", position_encoding=spec)
    wavepe.hf.convert(tmp_path / "rope", tmp_path / "converted", spec)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    for same in (loaded, converted):
        assert torch.equal(logits(same, IDS), initial)


def test_a_bias_of_some_parameters_of_a_layers_own(monkeypatch):
    """Its layers compute it from their own gains and from the rates that they share."""
    forget_registrations(monkeypatch)

    @wavepe.register_encoding
    class Own(Encoding):
        name = "own"
        learned = True
        per_layer = ("gain",)

        def parameters(self, head_dim, heads):
            return {"gain": np.ones(heads), "rate": np.linspace(0.1, 1, heads)}

        def learned_bias(self, length, parameters, *, causal=True):
            distance = torch.arange(length)
            kernel = (parameters["rate"][:, None] * distance).tanh()
            return Bias(-parameters["gain"][:, None] * kernel, 0)

    for spec in ("own", f"t5+own+{ASKED}", "rope@0+own@1"):
        model = wavepe.hf.patch(tiny(), spec)
        names = [name for name, _ in model.named_parameters() if "position_encoding." in name]
        assert sum(name.endswith("rate") for name in names) == 1
        layers = [layer.self_attn for layer in model.model.layers]
        got, biases = {}, []
        for attention in layers:
            state = attention.wavepe
            if state.score is not None:
                got = state.learned(attention, 5, begun_pass())
                biases.append(got["own"].bias.b)
        kernel = np.tanh(np.linspace(0.1, 1, 4)[:, None] * np.arange(5))
        for bias in biases:
            assert np.abs(bias.detach().numpy() + kernel).max() < 1e-6
        assert set(got) == {part.name for part in state.score.encoding.parts if part.learns}
        gradients(model, IDS)
        stirred(model)
        assert not torch.equal(logits(model, IDS), logits(wavepe.hf.patch(tiny(), spec), IDS))


def test_set_theta_of_a_part():
    for spec, changed in (
        ("rope:theta=100+alibi", "rope:theta=500+alibi"),
        ("alibi@0+rope:theta=100@1", "alibi@0+rope:theta=500@1"),
        # alike once the model's base is filled in
        ("rope@0+rope:theta=100@1", "rope:theta=500@0+rope:theta=500@1"),
    ):
        model = wavepe.hf.patch(tiny(rope_parameters=BASE_100), spec)
        cache = DynamicCache(config=model.config)
        logits(model, IDS, past_key_values=cache)
        wavepe.hf.set_theta(model, 500.0)
        assert wavepe.hf.encoding_of(model) == changed
        assert torch.equal(logits(model, IDS), logits(wavepe.hf.patch(tiny(), changed), IDS))
        with pytest.raises(ValueError, match=r"14 cached keys were computed with.*theta=100"):
            logits(model, IDS, past_key_values=cache)


@pytest.mark.parametrize(
    ("filled", "read"),
    [
        ("rope:theta=100", "rope:theta=100@0"),
        ("rope@0+alibi@1", "rope@1+alibi@0"),
        ("rope+alibi", "rope"),
        (f"rope+{WAVELET}", "rope+wavelet:scales=2"),
    ],
)
def test_a_cache_of_other_parts_or_layers_is_refused(filled, read):
    model = wavepe.hf.patch(tiny(), filled)
    cache = DynamicCache(config=model.config)
    logits(model, IDS, past_key_values=cache)
    wavepe.hf.patch(wavepe.hf.unpatch(model), read)
    with pytest.raises(ValueError, match="14 cached keys were computed with"):
        logits(model, IDS, past_key_values=cache)


@pytest.mark.parametrize("spec", ["rope+alibi", f"rope@0+{ASKED}@1"])
def test_llamas_that_are_made_meanwhile(spec):
    with llamas(spec):
        model = tiny()
    assert wavepe.hf.encoding_of(model) == spec
    other = wavepe.hf.patch(tiny(), spec)
    other.load_state_dict(model.state_dict())  # the same names
    assert torch.equal(logits(model, IDS), logits(other, IDS))


def test_layers_that_do_not_fit():
    for spec, words in (
        ("rope@5", r"@5 names layer 5, but the model has the layers 0\.\.1"),
        ("rope@::2+rope:theta=5@0", "at most one part can rotate"),
        ({"0": "rope@0"}, "takes specs without @, got 'rope@0'"),
    ):
        with pytest.raises(ValueError, match=words):
            wavepe.hf.patch(tiny(), spec)
    model = tiny()
    assert wavepe.hf.encoding_of(model) is None


def test_options_beside_a_dict_are_refused():
    with pytest.raises(ValueError, match=r"options \(scales\) do not go with a dict"):
        wavepe.hf.patch(tiny(), {"0": "wavelet"}, scales=4)
    with pytest.raises(ValueError, match="one encoding for all layers"):
        wavepe.hf.patch_llama({"0": "none"})
    model = wavepe.hf.patch(tiny(), {"0": "none"})
    with pytest.raises(
        ValueError, match="encoding '0: none', and set_theta needs one rope for all"
    ):
        wavepe.hf.set_theta(model, 500.0)


def test_how_it_is_written():
    choice = LayerEncodings({"4": "none", "0-3": {"name": "rope", "theta": 100}, 5: "alibi"})
    assert choice.stored() == {"4": "none", "0-3": "rope:theta=100", "5": "alibi"}
    assert str(choice) == "4: none; 0-3: rope:theta=100; 5: alibi"
    assert LayerEncodings(choice.stored()).stored() == choice.stored()
    by_layer = [str(one) for one in choice.by_layer([True] * 7)]
    assert by_layer == [*["rope:theta=100"] * 4, "none", "alibi", "None"]
    config = wavepe.hf.WavePELlamaConfig(position_encoding={0: "wavelet:scales=8"})
    assert config.position_encoding == {"0": "wavelet"}


@pytest.mark.parametrize("spec", ["alibi@-1", {"0-1": "alibi"}])
def test_a_spec_of_layers_is_not_saved_for_others(spec, tmp_path):
    """`alibi@-1` would be another layer in the file than in the model."""
    model = wavepe.hf.patch(tiny(num_hidden_layers=4), spec)
    model.save_pretrained(tmp_path / "whole")
    model.model.layers = model.model.layers[1:3]
    model.config.num_hidden_layers = 2
    with pytest.raises(ValueError, match="names layers of 4, and num_hidden_layers is 2 now"):
        model.save_pretrained(tmp_path / "part")
    model = wavepe.hf.patch(tiny(num_hidden_layers=4), "alibi")
    model.model.layers = model.model.layers[1:3]
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = 2
    model.save_pretrained(tmp_path / "part")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "part").eval()
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))


class PackedLinear(torch.nn.Linear):
    """A layer whose weight is not floating point, as a quantised one has it."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.real = [layer.weight.detach()]
        self.weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        return x @ self.real[0].T


def test_layers_of_a_quantised_model_have_their_own_parameters():
    spec, model = "wavelet:scales=4,biases=true", tiny()
    wanted = logits(wavepe.hf.patch(tiny(), spec), IDS)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, PackedLinear(getattr(layer.self_attn, name)))
    wavepe.hf.patch(model, spec)
    assert torch.equal(logits(model, IDS), wanted)
    assert model.model.layers[0].self_attn.position_encoding.u.dtype == torch.float32


@pytest.mark.parametrize("spec", ["kerple", f"{ASKED}+kerple", "kerple@0+alibi@1"])
def test_a_generation_computes_its_learned_terms_once(spec, monkeypatch):
    model, calls = stirred(wavepe.hf.patch(tiny(), spec)), []
    original = Kerple.learned_bias
    counted = lambda *args, **kwargs: calls.append(args[1]) or original(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(Kerple, "learned_bias", counted)
    rate = next(x for name, x in model.named_parameters() if name.endswith("log_r2"))
    cache, steps = DynamicCache(config=model.config), IDS.split(1, dim=1)
    pieces = [logits(model, step, past_key_values=cache) for step in steps]
    assert calls == [128]
    assert close(torch.cat(pieces, 1), logits(model, IDS), 1e-5)
    rate.data.mul_(2)  # no version tells of it, so no later generation may use the terms
    wanted, calls[:] = logits(model, IDS[:, :5]), []
    later = DynamicCache(config=model.config)
    assert close(logits(model, IDS[:, :5], past_key_values=later), wanted, 1e-5)
    before = logits(model, steps[5], past_key_values=copy.deepcopy(later))
    with torch.no_grad():
        rate.mul_(2)
    assert not close(logits(model, steps[5], past_key_values=later), before, 1e-5)
    assert calls == [128, 128, 128]
    model(IDS, past_key_values=DynamicCache(config=model.config)).logits.sum().backward()
    assert rate.grad.abs().max() > 0
