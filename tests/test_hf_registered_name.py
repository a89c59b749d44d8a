"""attn_implementation="wavepe" on stock models: right with every cache, or an error."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_families import FAMILIES, build
from hf_model import close, logits, tiny, tokens
from test_hf_families import SIZES
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from wavepe.hf import attention
from wavepe.hf.rope_config import TRANSFORMERS_5

IDS = tokens(2, 20)
CUTS = ((12, 8), (12, 1, 7), (5, *[1] * 15))


def cache_of(model, kind):
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=32)
    return DynamicCache(config=model.config)


def in_pieces(model, cuts, kind, **options):
    cache = cache_of(model, kind)
    parts = IDS.split(list(cuts), 1)
    return torch.cat([logits(model, part, past_key_values=cache, **options) for part in parts], 1)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cache(family, cuts, kind):
    stock, model = build(family), build(family)
    model.set_attn_implementation("wavepe")
    wanted = logits(stock, IDS, use_cache=False)
    assert close(logits(model, IDS, use_cache=False), wanted, 1e-4)
    if not close(in_pieces(stock, cuts, kind), wanted, 1e-4):
        pytest.skip("transformers' own attention is not right here either")
    assert close(in_pieces(model, cuts, kind), wanted, 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_packing_and_generation(family):
    stock, model = build(family), build(family)
    model.set_attn_implementation("wavepe")
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0
    kept = mask.bool()
    wanted = logits(stock, IDS, attention_mask=mask)[kept]
    assert close(logits(model, IDS, attention_mask=mask)[kept], wanted, 1e-4)
    positions = torch.cat([torch.arange(9), torch.arange(11)]).expand(2, -1)
    packed = {"position_ids": positions, "use_cache": False}
    assert close(logits(model, IDS, **packed), logits(stock, IDS, **packed), 1e-4)
    how = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, "disable_compile": True}
    for cache in ({}, {"cache_implementation": "static"}):
        found = model.generate(IDS, **how, **cache)
        assert torch.equal(found, stock.generate(IDS, **how, **cache))


# What transformers 4.57 makes masks of, as PyTorch traces it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled():
    torch._dynamo.reset()
    model = tiny()
    wanted = logits(model, IDS)
    model.set_attn_implementation("wavepe")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert close(logits(compiled, IDS, use_cache=False), wanted, 1e-5)
    if TRANSFORMERS_5:  # stock models before have no graph here
        cache = StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            parts = [compiled(part, past_key_values=cache).logits for part in IDS.split((12, 8), 1)]
        assert close(torch.cat(parts, 1), wanted, 1e-5)
    torch._dynamo.reset()


def test_sinks_are_refused():
    sizes = {**SIZES, "head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 2}
    config = transformers.GptOssConfig(**sizes, num_experts_per_tok=1, sliding_window=8)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="wavepe").eval()
    with pytest.raises(ValueError, match="does not support the argument 's_aux'"):
        model(IDS)


def test_chunks_are_those_of_the_family():
    sizes = {**SIZES, "intermediate_size_mlp": 32, "num_key_value_heads": 4, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "num_local_experts": 2, "attention_chunk_size": 4}
    config = transformers.Llama4TextConfig(**sizes, layer_types=["chunked_attention"] * 2)
    stock = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    wanted = logits(stock, IDS, use_cache=False)
    stock.set_attn_implementation("wavepe")
    assert close(logits(stock, IDS, use_cache=False), wanted, 1e-5)
    for cuts in CUTS:
        assert close(in_pieces(stock, cuts, "dynamic"), wanted, 1e-5)


def test_what_it_does_not_know():
    layer = tiny(attn_implementation="wavepe").model.layers[0].self_attn
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    for name in ("s_aux", "position_bias", "sinks", "head_mask"):
        with pytest.raises(ValueError, match=f"does not support the argument '{name}'"):
            attention.attention_forward(layer, q, k, k, None, **{name: torch.zeros(4)})
    two = torch.tensor([0, 2, 6])
    with pytest.raises(ValueError, match="position_ids that start again"):
        attention.attention_forward(layer, q, k, k, None, cu_seq_lens_q=two, cu_seq_lens_k=two)
    out, _ = attention.attention_forward(layer, q, k, k, None, position_ids=torch.arange(6)[None])
    causal = {"is_causal": True, "enable_gqa": True}
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k, **causal)
    assert close(out, wanted.transpose(1, 2), 1e-6)
