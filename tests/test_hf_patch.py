"""Patching stock models and removing the patch.

What patch refuses, and changes of a patched model that would alter it in silence: they raise an
error.
"""

import copy
import warnings

import pytest
import torch
import wavepe.hf
from encoding_cases import LEARNED
from hf_families import build, stirred
from hf_model import (
    EACH_ENTRY,
    HEAD,
    close,
    logits,
    patched_tiny,
    pickled,
    tiny,
    tiny_config,
    tokens,
)
from processes import forked
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

WAVELET = "wavelet:scales=4"
IDS = tokens(2, 12)
EACH = (*EACH_ENTRY, *LEARNED)


def mistral():
    """One that is no Llama, with windows."""
    return build("mistral", sliding_window=5)


MODELS = pytest.mark.parametrize("make", [tiny, mistral])


@pytest.fixture
def all_llamas():
    """patch_llama with a spec, ended with the test."""
    done = []

    def start(spec):
        wavepe.hf.patch_llama(spec)
        done.append(spec)

    yield start
    if done:
        wavepe.hf.unpatch_llama()


def state(model):
    """All that a patch could leave behind."""
    return {
        "config": model.config.to_dict(),
        "config class": type(model.config),
        "shared": all(m.config is model.config for m in model.modules() if hasattr(m, "config")),
        "implementation": model.config._attn_implementation,
        "weights": list(model.state_dict()),
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "hooks": sum(
            len(module._forward_pre_hooks)
            + len(module._forward_hooks)
            + len(module._forward_pre_hooks_with_kwargs)
            for module in model.modules()
        ),
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


# --------------------------------------------------------------- patch and unpatch
@pytest.mark.parametrize("spec", EACH)
def test_unpatch_restores_everything(spec):
    model = tiny()
    before, wanted = state(model), logits(model, IDS)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert wavepe.hf.patch(model, spec) is model
    added = [name for name in model.state_dict() if name not in weights]
    learned = LEARNED[spec][1] if spec in LEARNED else ()
    assert added == [f"model.position_encoding.{name}" for name in learned]
    changed = logits(stirred(model), IDS)
    assert not close(changed, wanted, 1e-2)
    copied = copy.deepcopy(model)
    assert wavepe.hf.unpatch(model) is model
    assert state(model) == before
    assert torch.equal(logits(model, IDS), wanted)
    assert all(torch.equal(weights[name], now) for name, now in model.state_dict().items())
    assert torch.equal(logits(copied, IDS), changed)


COPIED = [(tiny, spec) for spec in (*EACH_ENTRY, "rope", {"1": "alibi"})]
COPIED += [(mistral, spec) for spec in (WAVELET, "rope", {"1": "alibi"})]


@pytest.mark.parametrize(("make", "spec"), COPIED)
def test_copies_and_pickles(make, spec):
    model = make()
    stock = logits(model, IDS)
    wanted = logits(wavepe.hf.patch(model, spec), IDS)
    for other in (copy.deepcopy(model), pickled(model)):
        assert torch.equal(logits(other, IDS), wanted)
        assert torch.equal(logits(wavepe.hf.unpatch(other), IDS), stock)
        assert not any(module._forward_pre_hooks for module in other.modules())
    assert torch.equal(logits(model, IDS), wanted)


@pytest.mark.parametrize("after", [False, True])
def test_a_model_made_deeper_by_copied_layers(after, tmp_path):
    model = patched_tiny("rope") if after else tiny()
    model.model.layers.insert(1, copy.deepcopy(model.model.layers[0]))
    model.config.num_hidden_layers = 3
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    wanted = logits(model, IDS)
    if not after:
        wavepe.hf.patch(model, "rope")
    assert close(logits(model, IDS), wanted)
    model.save_pretrained(tmp_path)
    assert close(logits(AutoModelForCausalLM.from_pretrained(tmp_path), IDS), wanted)
    assert close(logits(wavepe.hf.unpatch(model), IDS), wanted)


def test_patched_ends_with_its_block():
    model = tiny()
    before, wanted = state(model), logits(model, IDS)
    with wavepe.hf.patched(model, "wavelet", scales=4) as inside:
        assert inside is model
        assert not close(logits(model, IDS), wanted, 1e-2)
    assert torch.equal(logits(model, IDS), wanted)
    with pytest.raises(KeyError), wavepe.hf.patched(model, WAVELET):
        raise KeyError
    assert state(model) == before
    with pytest.raises(KeyError), wavepe.hf.patched(model, WAVELET):
        raise KeyError
    with wavepe.hf.patched(model, WAVELET):
        wavepe.hf.unpatch(model)
    assert torch.equal(logits(model, IDS), wanted)


def test_encodings_in_every_form():
    wanted = logits(patched_tiny(WAVELET), IDS)
    for spec in ({"name": "wavelet", "scales": 4}, wavepe.encoding("wavelet", scales=4)):
        assert torch.equal(logits(patched_tiny(spec), IDS), wanted)
    model = tiny()
    assert torch.equal(logits(wavepe.hf.patch(model, "wavelet", scales=[1, 2, 4, 8]), IDS), wanted)


@pytest.mark.parametrize("spec", [WAVELET, "sinusoidal"])
@pytest.mark.parametrize(
    "cls",
    [
        LlamaModel, LlamaForSequenceClassification, LlamaForTokenClassification,
        LlamaForQuestionAnswering,
    ],
)  # fmt: skip
def test_other_heads(cls, spec):
    whole = tiny()
    model = tiny(cls)
    base = model if cls is LlamaModel else model.base_model
    base.load_state_dict(whole.model.state_dict())
    before, wanted = state(model), model(IDS)[0]
    wavepe.hf.patch(model, spec)
    wavepe.hf.patch(whole, spec)
    hidden = base(IDS).last_hidden_state
    assert torch.equal(hidden, whole.model(IDS).last_hidden_state)
    assert not close(model(IDS)[0].detach(), wanted.detach(), 1e-3)
    wavepe.hf.unpatch(model)
    assert torch.equal(model(IDS)[0], wanted)
    assert state(model) == before


def test_a_patched_subclass_of_the_users_own(tmp_path):
    class Mine(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = wavepe.hf.patch(tiny(Mine), WAVELET)
    assert torch.equal(logits(model, IDS), logits(patched_tiny(WAVELET), IDS))
    with pytest.raises(ValueError, match="Mine cannot be saved"):
        model.save_pretrained(tmp_path)
    wavepe.hf.unpatch(model).save_pretrained(tmp_path)


def test_models_that_share_a_configuration():
    config = tiny_config()
    first, second = tiny(config=config), tiny(config=config)
    stock = logits(second, IDS)
    wavepe.hf.patch(first, WAVELET)
    wanted = logits(first, IDS)
    assert torch.equal(logits(second, IDS), stock)
    wavepe.hf.patch(second, "alibi")
    wavepe.hf.unpatch(first)
    assert not close(logits(second, IDS), stock, 1e-2)
    wavepe.hf.unpatch(second)
    assert torch.equal(logits(second, IDS), stock)
    assert torch.equal(logits(first, IDS), stock)
    assert torch.equal(logits(wavepe.hf.patch(first, WAVELET), IDS), wanted)
    assert first.config is not second.config is config


def test_changes_outlive_the_patch():
    """Follow the configuration, and take another dtype."""
    model = patched_tiny(WAVELET)
    model.resize_token_embeddings(64)
    model.config.use_cache = False
    wavepe.hf.unpatch(model)
    assert (model.config.vocab_size, model.config.use_cache) == (64, False)
    assert not hasattr(model.config, "position_encoding")
    wanted = logits(tiny().double(), IDS)
    assert torch.equal(logits(wavepe.hf.unpatch(patched_tiny(WAVELET).double()), IDS), wanted)


# --------------------------------------------------------------- all Llamas
@pytest.mark.parametrize("spec", EACH_ENTRY)
def test_llamas_made_in_between_keep_the_encoding(spec, all_llamas):
    before = tiny()
    stock, wanted = logits(before, IDS), logits(patched_tiny(spec), IDS)
    all_llamas(spec)
    between = tiny()
    assert torch.equal(logits(before, IDS), stock)
    wavepe.hf.unpatch_llama()
    wavepe.hf.patch_llama("none")  # ended by the fixture
    assert torch.equal(logits(between, IDS), wanted)
    assert torch.equal(logits(wavepe.hf.unpatch(between), IDS), stock)


def test_stock_llamas_again_after_unpatch_llama():
    names = (LlamaAttention.__init__, LlamaForCausalLM.post_init, LlamaModel.post_init)
    wavepe.hf.patch_llama(WAVELET)
    between = tiny()
    wavepe.hf.unpatch_llama()
    assert names == (LlamaAttention.__init__, LlamaForCausalLM.post_init, LlamaModel.post_init)
    assert "post_init" not in vars(LlamaForCausalLM.__mro__[1])
    after, copied = tiny(), copy.deepcopy(between)
    wavepe.hf.unpatch(copied)
    assert state(after) == state(copied)
    assert torch.equal(logits(after, IDS), logits(copied, IDS))


def test_what_else_is_made_in_between(all_llamas, tmp_path):
    """Loaded models, other heads, the types wavepe_llama, configurations of the user's own."""
    own = tiny_config(wavepe.hf.WavePELlamaConfig, position_encoding="alibi")
    alibi, wavelets = logits(patched_tiny("alibi"), IDS), logits(patched_tiny(WAVELET), IDS)
    tiny().save_pretrained(tmp_path)
    all_llamas(WAVELET)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "again")
    again = wavepe.hf.WavePELlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.position_encoding == WAVELET
    classifier = tiny(LlamaForSequenceClassification)
    assert classifier.config is classifier.model.config
    assert classifier.config.position_encoding == WAVELET
    wavepe.hf.unpatch(classifier)
    assert type(classifier.config) is LlamaConfig
    config = tiny_config(type("Mine", (LlamaConfig,), {}))
    for make in (LlamaForCausalLM, lambda config: LlamaAttention(config, 0)):
        with pytest.raises(TypeError, match="got Mine"):
            make(config)
    with pytest.raises(ValueError, match="in force already"):
        wavepe.hf.patch_llama("alibi")
    model = tiny(wavepe.hf.WavePELlamaForCausalLM, own)
    assert torch.equal(logits(model, IDS), alibi)
    assert torch.equal(logits(loaded, IDS), wavelets)
    assert torch.equal(logits(again, IDS), wavelets)


def test_patch_llama_that_is_not_in_force():
    with pytest.raises(ValueError, match="not in force"):
        wavepe.hf.unpatch_llama()
    with pytest.raises(ValueError, match="unknown encoding"):
        wavepe.hf.patch_llama("nosuch")


@pytest.mark.parametrize("spec", [WAVELET, "alibi", "none", "rope:theta=100"])
def test_an_attention_layer_alone(spec, all_llamas):
    whole, config = patched_tiny(spec), tiny_config()
    inside = whole.model.layers[0].self_attn
    all_llamas(spec)
    layer = LlamaAttention(config, 0).eval()
    layer.load_state_dict(inside.state_dict())
    hidden, positions = torch.randn(2, 7, config.hidden_size), torch.arange(7)[None]
    angles = LlamaRotaryEmbedding(config)(hidden, positions)
    own = whole.model.rotary_emb(hidden, positions)
    with torch.no_grad():
        wanted = inside(hidden, own, None, position_ids=positions)[0]
        assert torch.equal(layer(hidden, position_embeddings=angles)[0], wanted)
        assert torch.equal(layer(hidden, angles, None)[0], wanted)
        assert torch.equal(layer(hidden, None, None)[0], wanted)
        assert close(layer(hidden, None, None, position_ids=positions + 5)[0], wanted, 1e-5)
    assert config._attn_implementation is None  # the layer has a configuration of its own


def test_a_layer_that_stands_alone_follows_its_mode(all_llamas):
    """In evaluation mode the base is the one for inference."""
    all_llamas("rope:theta=20,inference_theta=300")
    alone = LlamaAttention(tiny_config(), 0)
    wavepe.hf.unpatch_llama()
    wavepe.hf.patch_llama("rope:theta=300")
    other = LlamaAttention(tiny_config(), 0)
    other.load_state_dict(alone.state_dict())
    hidden = torch.randn(1, 12, tiny_config().hidden_size)

    def output(layer):
        return layer(hidden, position_embeddings=None, attention_mask=None)[0].detach()

    for _ in range(2):
        assert torch.equal(output(alone.eval()), output(other.eval()))
        assert not close(output(alone.train()), output(other), 1e-2)


# --------------------------------------------------------------- refusals
def test_a_patched_model_is_not_patched_again():
    model = patched_tiny(WAVELET)
    wanted = logits(model, IDS)
    for part in (model, model.model):
        with pytest.raises(ValueError, match=f"patched with '{WAVELET}' already"):
            wavepe.hf.patch(part, "alibi")
    with pytest.raises(ValueError, match="part of a LlamaForCausalLM"):
        wavepe.hf.unpatch(model.model)
    assert torch.equal(logits(model, IDS), wanted)
    wavepe.hf.unpatch(model)
    with pytest.raises(ValueError, match="not patched"):
        wavepe.hf.unpatch(model)


REFUSED = [
    ("nosuch", "unknown encoding 'nosuch'"),
    ("wavelet:scales=3", f"head size {HEAD} is not divisible by 3 scales"),
    ("rope:interleaved=true", "interleaved"),
    ({}, "at least one layer"),
    ({"first": "rope"}, "'4' or '0-3'.*got 'first'"),
    ({"2-1": "rope"}, "the first one first; got '2-1'"),
    ({-1: "rope"}, "got -1"),
    ({True: "rope"}, "got True"),
    ({"0": "none", 0: "rope"}, "layers 0 are named twice, got 0"),
    ({"0-1": "rope", "1": "none"}, "layers 1 are named twice"),
    ({"0-2": "rope"}, "layers 0-2, but this model has the layers 0-1"),
    ({"0": "sinusoidal"}, "sinusoidal is an absolute.*cannot differ by layer"),
    ({"0": "shaw:clip=2", "1": "shaw:clip=3"}, "one learned encoding.*clip=2 and shaw:clip=3"),
    ({"0": "wavelt"}, "unknown encoding 'wavelt'"),
    ({"0": "wavelet:scales=3"}, "not divisible"),
]


@pytest.mark.parametrize(("spec", "message"), REFUSED)
def test_encodings_that_do_not_fit_leave_the_model_alone(spec, message):
    model = tiny()
    before, wanted = state(model), logits(model, IDS)
    with pytest.raises(ValueError, match=message):
        wavepe.hf.patch(model, spec)
    assert state(model) == before
    assert torch.equal(logits(model, IDS), wanted)


def test_other_refusals():
    """Models of other families are in test_hf_families.py."""
    model = tiny(hidden_size=21, num_attention_heads=3, num_key_value_heads=1)
    with pytest.raises(ValueError, match="21"):  # an odd embedding has no sinusoid
        wavepe.hf.patch(model, "sinusoidal")
    wavepe.hf.patch(model, "alibi")
    for other in (torch.nn.Linear(2, 2), tiny().model.layers[0]):
        with pytest.raises(TypeError, match=f"model of transformers, got {type(other).__name__}"):
            wavepe.hf.patch(other, WAVELET)
        with pytest.raises(TypeError, match=f"got {type(other).__name__}"):
            wavepe.hf.unpatch(other)
    with pytest.raises(TypeError, match="spec"):
        wavepe.hf.patch(tiny(), 3)
    model.config.position_encoding = WAVELET  # on a live model
    with pytest.raises(ValueError, match="no effect"):
        model(IDS)
    with pytest.raises(ValueError, match=WAVELET):  # a stock model of a patched configuration
        LlamaForCausalLM(patched_tiny(WAVELET).config)(IDS)


def test_what_is_missing_is_named():
    run = forked("-c", "import sys; sys.modules['transformers'] = None; import wavepe.hf")
    assert run.returncode != 0
    assert 'pip install ".[hf]"' in run.stderr


# --------------------------------------------------------------- a patched model is changed
@MODELS
@pytest.mark.parametrize("spec", [WAVELET, "none", "rope:theta=100", "sinusoidal", {"0": "none"}])
def test_another_implementation_or_rotation(make, spec):
    model = wavepe.hf.patch(make(), spec)
    wanted = logits(model, IDS)
    for other in ("sdpa", "eager"):
        model.set_attn_implementation(other)
        with pytest.raises(ValueError, match=f"needs attn_implementation='wavepe', got '{other}'"):
            model(IDS)
    model.set_attn_implementation("wavepe")
    assert torch.equal(logits(model, IDS), wanted)
    ours, stock = model.model.rotary_emb, model.model.rotary_emb.stock
    model.model.rotary_emb = stock
    with pytest.raises(ValueError, match="its angles come from a module that is not wavepe's"):
        model(IDS)
    model.model.rotary_emb = ours
    assert torch.equal(logits(model, IDS), wanted)
    model.set_attn_implementation("eager")
    config = wavepe.hf.unpatch(model).config
    assert config._attn_implementation == "sdpa"
    model(IDS)
    # from_config writes the implementation into the configuration that it is given
    wavepe.hf.patch(model, spec)
    AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert torch.equal(logits(model, IDS), wanted)


def test_an_attention_that_transformers_chooses():
    """Where flash attention is installed, continuous batching switches stock models to it."""
    model = wavepe.hf.patch(tiny(), WAVELET)
    model.config._attn_implementation = "paged|flash_attention_2"
    with pytest.raises(ValueError, match="needs attn_implementation='wavepe'"):
        model(IDS)


@MODELS
def test_models_on_the_meta_device(make):
    with torch.device("meta"):
        empty = make()
    needs = r"embed_tokens\.weight is on the meta device, and patch needs real parameters"
    with pytest.raises(ValueError, match=needs):
        wavepe.hf.patch(empty, WAVELET)


@pytest.mark.parametrize("spec", EACH)
def test_a_default_device_of_the_caller(spec):
    model = tiny()
    wanted = wavepe.hf.patch(tiny(), spec)
    with torch.device("meta"):
        wavepe.hf.patch(model, spec)
        assert torch.equal(model(IDS).logits, wanted(IDS).logits)
    assert [x.device.type for x in model.parameters()] == ["cpu"] * len([*wanted.parameters()])
    assert torch.equal(logits(model, IDS), logits(wanted, IDS))


# ------------------------------------------------------------------ caches of another encoding
def test_a_cache_of_another_patch_is_refused():
    model = wavepe.hf.patch(tiny(), "wavelet:scales=4")
    cache = DynamicCache(config=model.config)
    logits(model, IDS[:, :5], past_key_values=cache)
    wavepe.hf.patch(wavepe.hf.unpatch(model), "alibi")
    with pytest.raises(ValueError, match=r"computed with wavelet:scales=4.*uses alibi"):
        logits(model, IDS[:, 5:], past_key_values=cache)
    other = wavepe.hf.patch(tiny(), {"1": "alibi"})
    with pytest.raises(ValueError, match="uses 1: alibi"):
        logits(other, IDS[:, 5:], past_key_values=copy.deepcopy(cache))


def test_advice_about_arguments_and_configurations():
    model = patched_tiny("alibi")
    with pytest.raises(ValueError, match=r"argument 'weights'.*a column of your data, take it out"):
        model(tokens(1, 5), weights=torch.ones(1))
    with pytest.raises(ValueError, match=r"layer has none: .*or patch a stock model"):
        LlamaForCausalLM(model.config)(tokens(1, 5))


def test_wide_wavelets_get_a_hint(tmp_path):
    """A scale may be a quarter of the trained length of the model."""
    hint = r"^rope\+wavelet:scales=4: the largest scale is 8, which is above 7.75, a quarter of"
    with pytest.warns(UserWarning, match=hint):
        wavepe.hf.patch(tiny(max_position_embeddings=31), "rope+wavelet:scales=4")
    tiny(max_position_embeddings=31).save_pretrained(tmp_path / "stock")
    with pytest.warns(UserWarning, match=hint):
        wavepe.hf.convert(tmp_path / "stock", tmp_path / "new", {"1": "rope+wavelet:scales=4"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wavepe.hf.patch(tiny(max_position_embeddings=32), "wavelet:scales=4")
