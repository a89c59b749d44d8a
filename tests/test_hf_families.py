"""wavepe.hf.patch on each family: values against a float64 reference, and the way back."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import wavepe.hf
from encoding_cases import LEARNED
from hf_families import FAMILIES, VOCABULARY, Reference, build, stirred
from hf_model import EACH_ENTRY, close, gradients, logits, tokens
from transformers import AutoConfig, AutoModel
from wavepe.hf import families

SPECS = (*EACH_ENTRY, *LEARNED)
LENGTH = 20  # more than three windows
# float32 against float64: two layers of sums of at most 40 terms. 2e-6 is seen, of stock models
# too.
FLOAT32 = 1e-5


def patched(family, spec):
    return stirred(wavepe.hf.patch(build(family), spec))


def padding():
    """A row that begins with padding, and one without."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :7] = 0
    return mask


def sequences():
    """Numbers and positions of packed tokens, each row cut at another place."""
    numbers = torch.tensor([[0] * 9 + [1] * 11, [0] * 4 + [1] * 8 + [2] * 8])
    positions = [torch.arange(n) for row in numbers for n in row.bincount()]
    return numbers, torch.cat(positions).view(2, LENGTH)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_the_stock_model(family):
    model, ids = build(family), tokens(2, LENGTH)
    wanted, _ = Reference(family, model)(ids)
    assert close(logits(model, ids), wanted.detach(), FLOAT32)


# 4.57 warns of every attention but its own three, and hands over the weights all the same.
@pytest.mark.filterwarnings("ignore:`output_attentions=True` is not supported with")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", SPECS)
def test_values(spec, family):
    model, ids = patched(family, spec), tokens(2, LENGTH)
    reference = Reference(family, model, spec)
    with torch.no_grad():
        wanted, weights = reference(ids)
        assert close(logits(model, ids), wanted, FLOAT32)
        found = model(ids, output_attentions=True, use_cache=False)
        assert close(found.logits, wanted, FLOAT32)
        for got, layer in zip(found.attentions, weights, strict=True):
            assert (got.sum(-1) - 1).abs().max() < 1e-6  # rounding of 20 shares
            assert close(got, layer, FLOAT32)
        kept = padding().bool()
        wanted, _ = reference(ids, padding=padding())
        assert close(logits(model, ids, attention_mask=padding())[kept], wanted[kept], FLOAT32)
        numbers, positions = sequences()
        wanted, _ = reference(ids, segments=numbers)
        found = logits(model, ids, position_ids=positions, use_cache=False)
        assert close(found, wanted, FLOAT32)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family):
    spec = "wavelet:scales=4"
    model, ids = patched(family, spec), tokens(2, LENGTH)
    reference = Reference(family, model, spec)
    found = gradients(model.train(), ids)
    scores, _ = reference(ids)
    scores = scores[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(scores, ids[:, 1:].flatten()).backward()
    wanted = [weight.grad for weight in reference.model.parameters()]
    # Of the largest: that of a bias of keys is 0 but for rounding.
    largest = max(gradient.abs().max() for gradient in wanted)
    for got, gradient in zip(found, wanted, strict=True):
        assert (got - gradient).abs().max() <= FLOAT32 * largest


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bare_rope_is_that_of_the_family(family):
    model, ids = build(family), tokens(2, LENGTH)
    stock = logits(model, ids)
    wavepe.hf.patch(model, "rope")
    assert close(logits(model, ids), stock, FLOAT32)
    wavepe.hf.unpatch(model)
    wavepe.hf.patch(model, "none")
    assert not close(logits(model, ids), stock, 1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family):
    """Each encoding has an effect of its own, and leaves nothing behind."""
    model, ids = build(family), tokens(2, LENGTH)
    stock, implementation = logits(model, ids), model.config._attn_implementation
    keys, buffers = list(model.state_dict()), list(dict(model.named_buffers()))
    # The one pair of dims that GPT-NeoX rotates here turns by 1 a token, whatever the base.
    seen = [stock] if FAMILIES[family].rotated > 2 else []
    for spec in SPECS:
        with wavepe.hf.patched(model, spec):
            learned = [key for key in model.state_dict() if "position_encoding." in key]
            assert [key for key in model.state_dict() if key not in learned] == keys
            assert bool(learned) == (spec in LEARNED)
            seen.append(logits(stirred(model), ids))
        assert torch.equal(logits(model, ids), stock)
        assert list(model.state_dict()) == keys
        assert list(dict(model.named_buffers())) == buffers
        assert model.config._attn_implementation == implementation
        assert not any(module._forward_pre_hooks for module in model.modules())
    for i, one in enumerate(seen):
        assert not any(close(one, other, 1e-3) for other in seen[:i])


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family):
    model, ids = build(family), tokens(2, LENGTH)
    wavepe.hf.patch(model, "wavelet:scales=4")
    wanted = logits(model, ids, attention_mask=padding())
    found = logits(model.bfloat16(), ids, attention_mask=padding())
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    # 8 bits, a dozen roundings a layer, and a softmax that multiplies them.
    assert close(found.float()[padding().bool()], wanted[padding().bool()], 0.1)


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
UNSUPPORTED = {
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": VOCABULARY},
    "gptj": {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "vocab_size": VOCABULARY},
    "bert": SIZES,
    "t5": {"d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4},
    "mamba": {**SIZES, "state_size": 4},
    "deepseek_v3": {
        **SIZES,
        "moe_intermediate_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
    "llama4_text": {
        **SIZES,
        "intermediate_size_mlp": 32,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_local_experts": 2,
    },
    "cohere": SIZES,
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_refused(kind):
    model = AutoModel.from_config(AutoConfig.for_model(kind, **UNSUPPORTED[kind])).eval()
    name, before = type(model).__name__, list(model.state_dict())
    with pytest.raises((TypeError, ValueError), match=rf"{name}.*{kind}.*: ") as caught:
        wavepe.hf.patch(model, "wavelet:scales=4")
    assert "llama, mistral" in str(caught.value)
    assert list(model.state_dict()) == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises((TypeError, ValueError), match=name):
        wavepe.hf.unpatch(model)


def test_refused_in_both_directions():
    model = build("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(TypeError, match=r"Gemma3ForCausalLM.*both directions"):
        wavepe.hf.patch(model, "alibi")


def test_supported_families():
    found = wavepe.hf.supported_families()
    assert {kind.model_type for kind in FAMILIES.values()} == set(found)
    assert found["mistral"] == "the sliding window"
    found.clear()
    assert wavepe.hf.supported_families()


def test_the_encoding_of_a_model():
    model = build("mistral")
    assert wavepe.hf.encoding_of(model) is None
    wavepe.hf.patch(model, "wavelet", scales=4)
    wrapped = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ModuleList([model]))
    for one in (model, model.model, wrapped):
        assert wavepe.hf.encoding_of(one) == "wavelet:scales=4"
    wavepe.hf.patch(wavepe.hf.unpatch(model), {"1": "alibi"})
    assert wavepe.hf.encoding_of(model) == {"1": "alibi"}
    assert wavepe.hf.encoding_of(wavepe.hf.unpatch(model)) is None
    with pytest.raises(TypeError, match="needs a model, got str"):
        wavepe.hf.encoding_of("model")


def test_a_wrapped_model_is_named():
    model = build("llama")
    with pytest.raises(TypeError, match=r"OptimizedModule: pass .*, model\._orig_mod$"):
        wavepe.hf.patch(torch.compile(model, backend="eager"), "alibi")
    with pytest.raises(TypeError, match=r"DataParallel: pass .*, model\.module$"):
        wavepe.hf.patch(torch.nn.DataParallel(model), "alibi")
    with pytest.raises(TypeError, match="Linear: it contains no model of transformers"):
        wavepe.hf.patch(torch.nn.Linear(2, 2), "alibi")


def test_embeddings_that_scale_by_themselves():
    """Gemma 2 of transformers 5.1 scales in the embedding; versions before, in the model."""
    base = build("gemma2").model
    scale = families.embedding_scale(base)
    base.embed_tokens.embed_scale = torch.tensor(2.0)
    assert families.embedding_scale(base) == 1.0
    del base.embed_tokens.embed_scale
    assert families.embedding_scale(base) == 32**0.5
    assert scale in (1.0, 32**0.5)
