"""A change that would silently alter a patched model raises an error, in every family."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import wavepe.hf
from hf_families import build
from hf_model import close, logits, patched_tiny, pickled, tiny, tokens
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import ALL_ATTENTION_FUNCTIONS, LlamaAttention
from wavepe.hf.families import argument_names
from wavepe.hf.rope_config import TRANSFORMERS_5

WAVELET = "wavelet:scales=4"
IDS = tokens(2, 12)


def mistral():
    """One that is no Llama: it has no type that keeps an encoding."""
    return build("mistral", num_hidden_layers=2, sliding_window=5)


MODELS = pytest.mark.parametrize("make", [tiny, mistral])


@MODELS
@pytest.mark.parametrize("spec", [WAVELET, "none", "rope", {"0": "none"}])
def test_another_implementation(make, spec):
    model = wavepe.hf.patch(make(), spec)
    wanted = logits(model, IDS)
    for other in ("sdpa", "eager"):
        model.set_attn_implementation(other)
        with pytest.raises(ValueError, match=f"needs attn_implementation='wavepe', got '{other}'"):
            model(IDS)
    model.set_attn_implementation("wavepe")
    assert torch.equal(logits(model, IDS), wanted)


@MODELS
def test_a_configuration_that_others_are_built_from(make):
    """from_config writes the implementation into the configuration that it is given."""
    model = make()
    config = model.config
    wavepe.hf.patch(model, WAVELET)
    wanted = logits(model, IDS)
    AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert torch.equal(logits(model, IDS), wanted)


@MODELS
@pytest.mark.parametrize("spec", [WAVELET, "none", "rope:theta=100"])
def test_the_rotation_put_back(make, spec):
    model = wavepe.hf.patch(make(), spec)
    ours, stock = model.model.rotary_emb, model.model.rotary_emb.stock
    model.model.rotary_emb = stock
    with pytest.raises(ValueError, match="its angles come from a module that is not wavepe's"):
        model(IDS)
    model.model.rotary_emb = ours
    logits(model, IDS)


@MODELS
def test_continuous_batching(make):
    model = wavepe.hf.patch(make(), WAVELET)
    rows = [row.tolist() for row in IDS]
    settings = transformers.GenerationConfig(max_new_tokens=2, eos_token_id=-1, do_sample=False)
    if TRANSFORMERS_5:  # before, it needs a GPU
        with pytest.raises(ValueError, match=r"continuous batching|paged\|wavepe"):
            model.generate_batch(rows, generation_config=settings, progress_bar=False)
    refused = pytest.raises(ValueError, match="continuous batching uses a paged cache")
    with refused:
        model.model.layers[0].self_attn(torch.zeros(2, 12, model.config.hidden_size), cache="paged")
    if "cache" not in argument_names(model.model):  # since 5.24 a model itself reads it first
        with refused:
            model(IDS, cache="paged")
    # Where flash attention is installed, transformers switches to it by itself.
    model.config._attn_implementation = "paged|flash_attention_2"
    with pytest.raises(ValueError, match="needs attn_implementation='wavepe'"):
        model(IDS)


@MODELS
def test_offloaded_models(make):
    """A model on the meta device, and hooks that wrap a layer's forward after the patch."""
    with torch.device("meta"):
        empty = make()
    with pytest.raises(ValueError, match="is on the meta device, and patch needs real parameters"):
        wavepe.hf.patch(empty, WAVELET)
    model = make()
    stock = logits(model, IDS)
    wavepe.hf.patch(model, WAVELET)
    layer = model.model.layers[1].self_attn
    wrapped = layer.forward
    layer._old_forward, layer.forward = wrapped, lambda *a, **k: wrapped(*a, **k)
    logits(model, IDS)
    assert torch.equal(logits(wavepe.hf.unpatch(model), IDS), stock)  # dispatched as it is


@MODELS
def test_layers_with_a_forward_of_their_own(make):
    plain, model = wavepe.hf.patch(make(), WAVELET), make()
    wanted = logits(plain, IDS)
    assert "forward" not in vars(plain.model.layers[0].self_attn)
    layer = model.model.layers[0].self_attn
    stock, calls = layer.forward, []

    def forward(*args, **kwargs):
        calls.append(1)
        return stock(*args, **kwargs)

    layer.forward = forward
    wavepe.hf.patch(model, WAVELET)
    assert close(logits(model, IDS), wanted, 1e-6)
    wavepe.hf.unpatch(model)
    assert layer.forward is forward
    assert len(calls) == 1


@MODELS
@pytest.mark.parametrize("spec", [WAVELET, "rope", {"1": "alibi"}])
def test_copies(make, spec):
    model = make()
    stock = logits(model, IDS)
    wavepe.hf.patch(model, spec)
    wanted = logits(model, IDS)
    for copied in (copy.deepcopy(model), pickled(model)):
        assert close(logits(copied, IDS), wanted, 1e-6)
        assert torch.equal(logits(wavepe.hf.unpatch(copied), IDS), stock)
    assert torch.equal(logits(model, IDS), wanted)


def test_the_window_holds():
    """Only the last tokens that two layers of window 5 reach move the logits."""
    model = wavepe.hf.patch(mistral(), WAVELET)
    other = IDS.clone()
    other[:, 3] = other[:, 3] % 49 + 1
    assert not torch.equal(logits(model, other)[:, 11], logits(model, IDS)[:, 11])
    other = IDS.clone()
    other[:, 2] = other[:, 2] % 49 + 1
    assert torch.equal(logits(model, other)[:, 11], logits(model, IDS)[:, 11])


def test_masks_of_heads_are_refused():
    layer = patched_tiny(WAVELET).model.layers[0].self_attn
    query = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match="head_mask"):
        wavepe.hf.attention.attention_forward(
            layer, query, query, query, None, head_mask=torch.ones(4)
        )
    mask = torch.ones(1, 1, 3, 3, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"bool or floating point, got torch\.int32"):
        wavepe.hf.attention.attention_forward(layer, query, query, query, mask)


class Elsewhere(LlamaAttention):
    """A user's own attention layer, whose forward does not name the function that rotates."""

    def forward(self, *args, **kwargs):
        assert ALL_ATTENTION_FUNCTIONS
        return super().forward(*args, **kwargs)


def test_a_layer_that_rotates_out_of_sight():
    wanted, model = logits(patched_tiny(WAVELET), IDS), tiny()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Elsewhere
    stock = logits(model, IDS)
    assert close(logits(wavepe.hf.patch(model, WAVELET), IDS), wanted, 1e-5)
    assert torch.equal(logits(wavepe.hf.unpatch(model), IDS), stock)


# ------------------------------------------------------------------ caches of another encoding


@pytest.mark.parametrize("spec", ["alibi", "wavelet:scales=4", "sinusoidal", "rope", "none"])
def test_a_cache_that_the_stock_model_filled_is_refused(spec):
    model = tiny()
    cache = DynamicCache(config=model.config)
    logits(model, IDS[:, :5], past_key_values=cache)
    empty = DynamicCache(config=model.config)
    wavepe.hf.patch(model, spec)
    with pytest.raises(ValueError, match=r"5 cached keys .*the stock model's own .*empty cache"):
        logits(model, IDS[:, 5:], past_key_values=cache)
    logits(model, IDS[:, :5], past_key_values=empty)
    step = logits(model, IDS[:, 5:], past_key_values=empty)
    assert close(step, logits(model, IDS, use_cache=False)[:, 5:], 1e-5)


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
