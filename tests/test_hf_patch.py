"""Patching stock Llamas and removing the patch; models that patch refuses."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import wavepe.hf
from hf_model import (
    EACH_ENTRY,
    HEAD,
    SPECS,
    close,
    logits,
    patched_tiny,
    tiny,
    tiny_config,
    tokens,
)
from processes import output, python
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
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


@pytest.mark.parametrize("spec", SPECS)
def test_unpatch_restores_everything(spec):
    model = tiny()
    before, wanted = state(model), logits(model, IDS)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert wavepe.hf.patch(model, spec) is model
    other = logits(model, IDS)
    assert list(model.state_dict()) == before["weights"]
    assert spec == "rope" or not close(other, wanted, 1e-3)
    assert wavepe.hf.unpatch(model) is model
    assert state(model) == before
    assert torch.equal(logits(model, IDS), wanted)
    assert all(torch.equal(weights[name], now) for name, now in model.state_dict().items())


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


@pytest.mark.parametrize("spec", EACH_ENTRY)
@pytest.mark.parametrize(
    "cls",
    [
        LlamaModel,
        LlamaForSequenceClassification,
        LlamaForTokenClassification,
        LlamaForQuestionAnswering,
    ],
)
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


def test_changes_of_the_configuration_outlive_the_patch():
    model = patched_tiny(WAVELET)
    model.resize_token_embeddings(64)
    model.config.use_cache = False
    wavepe.hf.unpatch(model)
    assert (model.config.vocab_size, model.config.use_cache) == (64, False)
    assert not hasattr(model.config, "position_encoding")


def test_another_dtype_after_the_patch():
    model = tiny()
    wanted = logits(copy.deepcopy(model).double(), IDS)
    wavepe.hf.patch(model, WAVELET).double()
    assert torch.equal(logits(wavepe.hf.unpatch(model), IDS), wanted)


# --------------------------------------------------------------- all Llamas


@pytest.mark.parametrize("spec", SPECS)
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


def test_llamas_loaded_in_between(all_llamas, tmp_path):
    tiny().save_pretrained(tmp_path)
    all_llamas(WAVELET)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, IDS), logits(patched_own(), IDS))
    loaded.save_pretrained(tmp_path / "again")
    again = wavepe.hf.WavePELlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.position_encoding == WAVELET
    assert torch.equal(logits(again, IDS), logits(loaded, IDS))


def patched_own():
    """A model whose encoding does not come from patch_llama."""
    config = tiny_config(wavepe.hf.WavePELlamaConfig, position_encoding=WAVELET)
    return tiny(wavepe.hf.WavePELlamaForCausalLM, config)


def test_own_types_are_not_concerned_by_patch_llama(all_llamas):
    wanted = logits(patched_own(), IDS)
    all_llamas("none")
    assert torch.equal(logits(patched_own(), IDS), wanted)


def test_other_heads_made_in_between(all_llamas):
    all_llamas(WAVELET)
    model = tiny(LlamaForSequenceClassification)
    assert model.config is model.model.config
    assert model.config.position_encoding == WAVELET
    wavepe.hf.unpatch(model)
    assert type(model.config) is LlamaConfig


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
        given = {"attention_mask": None}  # transformers < 5 asks for it
        assert torch.equal(layer(hidden, position_embeddings=angles, **given)[0], wanted)
        assert torch.equal(layer(hidden, angles, None)[0], wanted)
        assert torch.equal(layer(hidden, None, None)[0], wanted)
        assert close(layer(hidden, None, None, position_ids=positions + 5)[0], wanted, 1e-5)
    assert config._attn_implementation is None  # the layer has a configuration of its own


def test_patch_llama_needs_its_own_configuration_class(all_llamas):
    all_llamas(WAVELET)
    config = tiny_config(type("Mine", (LlamaConfig,), {}))
    for make in (LlamaForCausalLM, lambda config: LlamaAttention(config, 0)):
        with pytest.raises(TypeError, match="got Mine"):
            make(config)


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


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nosuch", "unknown encoding 'nosuch'"),
        ("wavelet:scales=3", f"head size {HEAD} is not divisible by 3 scales"),
        ("rope:interleaved=true", "interleaved"),
        ({"0-9": "rope"}, "layers 0-9, but this model has the layers 0-1"),
    ],
    ids=str,
)
def test_encodings_that_do_not_fit_leave_the_model_alone(spec, message):
    model = tiny()
    before, wanted = state(model), logits(model, IDS)
    with pytest.raises(ValueError, match=message):
        wavepe.hf.patch(model, spec)
    assert state(model) == before
    assert torch.equal(logits(model, IDS), wanted)


def test_an_odd_embedding_has_no_sinusoid():
    model = tiny(hidden_size=21, num_attention_heads=3, num_key_value_heads=1)
    with pytest.raises(ValueError, match="21"):
        wavepe.hf.patch(model, "sinusoidal")
    wavepe.hf.patch(model, "alibi")


def test_other_models_are_refused():
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=5))
    for model in (other, torch.nn.Linear(2, 2), tiny().model.layers[0]):
        with pytest.raises(TypeError, match=f"families llama.*got a?.*{type(model).__name__}"):
            wavepe.hf.patch(model, WAVELET)
        with pytest.raises(TypeError, match=f"got a?.*{type(model).__name__}"):
            wavepe.hf.unpatch(model)
    with pytest.raises(TypeError, match="spec"):
        wavepe.hf.patch(tiny(), 3)


def test_parameters_on_the_meta_device_are_refused():
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_config())
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is on the meta device"):
        wavepe.hf.patch(model, WAVELET)


@pytest.mark.parametrize("spec", EACH_ENTRY)
@pytest.mark.parametrize("other", ["sdpa", "eager"])
def test_another_attention_raises(spec, other):
    model = patched_tiny(spec)
    wanted = logits(model, IDS)
    model.set_attn_implementation(other)
    with pytest.raises(ValueError, match=f"'wavepe', got '{other}'"):
        model(IDS)
    model.set_attn_implementation("wavepe")
    assert torch.equal(logits(model, IDS), wanted)
    model.set_attn_implementation(other)
    wavepe.hf.unpatch(model)
    assert model.config._attn_implementation == "sdpa"
    model(IDS)


def test_a_spec_changed_on_a_live_model_raises():
    model = patched_tiny(WAVELET)
    model.config.position_encoding = "alibi"
    with pytest.raises(ValueError, match="no effect"):
        model(IDS)


def test_a_stock_model_made_from_a_patched_configuration_raises():
    config = patched_tiny(WAVELET).config
    with pytest.raises(ValueError, match=WAVELET):
        LlamaForCausalLM(config)(IDS)


def test_without_an_encoding_the_attention_is_plain():
    config = tiny_config()
    config._attn_implementation = "wavepe"
    ids = torch.cat([torch.zeros(2, 3, dtype=torch.long), IDS], dim=1)
    mask = (ids > 0).long()
    stock = tiny()
    for options in ({}, {"attention_mask": mask}):
        wanted = logits(stock, ids, **options)
        assert close(logits(tiny(config=config), ids, **options), wanted, 1e-5)


def test_patch_llama_does_not_nest(all_llamas):
    with pytest.raises(ValueError, match="not in force"):
        wavepe.hf.unpatch_llama()
    with pytest.raises(ValueError, match="unknown encoding"):
        wavepe.hf.patch_llama("nosuch")
    all_llamas(WAVELET)
    with pytest.raises(ValueError, match="in force already"):
        wavepe.hf.patch_llama("alibi")


def test_what_is_missing_is_named():
    script = "import sys; sys.modules['transformers'] = None; import wavepe.hf"
    run = python("-c", script)
    assert run.returncode != 0
    assert 'pip install ".[hf]"' in run.stderr


def test_import_of_wavepe_alone_brings_neither_torch_nor_transformers():
    script = "import sys, wavepe; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    output("-c", script)


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
