"""wavepe.hf.use_fused_rope: the rotation of stock models by wavepe's kernel."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import wavepe.hf
from hf_families import FAMILIES, ROTARY, build
from hf_model import LENGTH, VOCABULARY, close, gradients, logits, pickled, recompute, tiny, tokens
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache
from wavepe import ops
from wavepe.hf import fused_rope, pairs
from wavepe.hf.fused_rope import use_fused_rope
from wavepe.hf.theta import set_theta

ONE_BY_ONE = ("gemma4_text",)  # they rotate queries and keys by two calls
QUICK = ("llama", "gemma3_text", "olmo2", "gpt_neox", *ROTARY)
EVERY = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in (*FAMILIES, *ROTARY)
    if name not in ONE_BY_ONE
]


@pytest.fixture
def calls(monkeypatch):
    """Record the arguments of `rope_qk`; without it, a model that is not fused would pass."""
    seen = []

    def rope_qk(q, k, cos, sin, **options):
        seen.append((q, cos, options))
        return real(q, k, cos, sin, **options)

    def trial(*arguments):  # the first time in a process, of a layout
        agrees = tried(*arguments)
        seen.clear()
        return agrees

    real, tried = ops.rope_qk, pairs.agrees
    monkeypatch.setattr(ops, "rope_qk", rope_qk)
    monkeypatch.setattr(pairs, "agrees", trial)
    return seen


@pytest.mark.parametrize("family", EVERY)
def test_forward_gradients_and_generation(family, calls):
    model, ids = build(family), tokens(2, LENGTH)
    stock, slopes = logits(model, ids), gradients(model, ids)
    written = model.generate(ids[:, :5], max_new_tokens=5, do_sample=False)
    assert use_fused_rope(model) is model
    calls.clear()
    assert close(logits(model, ids), stock, 1e-5)
    assert len(calls) == sum((FAMILIES | ROTARY)[family].positions)  # layers that rotate
    for got, wanted in zip(gradients(model, ids), slopes, strict=True):
        assert close(got, wanted, 1e-4) or wanted.abs().max() < 1e-6
    options = {"max_new_tokens": 5, "do_sample": False, "disable_compile": True}
    for cache in ("dynamic", "static"):
        found = model.generate(ids[:, :5], cache_implementation=cache, **options)
        assert torch.equal(found, written)
    use_fused_rope(model, enabled=False)
    calls.clear()
    assert torch.equal(logits(model, ids), stock)
    assert not calls
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "cohere", "glm", "gpt_neox"])
def test_angles_are_views_of_the_models_own(family, calls):
    """rope_qk reads one value for each pair by its strides, and makes no copy."""
    model = use_fused_rope(build(family))
    made = []
    rotary = model.base_model.rotary_emb
    rotary.register_forward_hook(lambda module, args, output: made.append(output[0]))
    logits(model, tokens(2, LENGTH))
    for q, cos, options in calls:
        assert cos.data_ptr() == made[0].data_ptr()
        assert 2 * cos.shape[-1] == made[0].shape[-1]
        assert not cos.is_contiguous()
        assert cos.dtype == torch.float32
        assert options == {"interleaved": family in ("cohere", "glm")}
        assert q.shape[-1] >= 2 * cos.shape[-1]


@pytest.mark.parametrize("family", ["llama", "cohere", "olmo2"])
def test_low_precision_and_autocast(family):
    """Keys in the cache keep the dtype that the stock model gives them."""
    model, ids, found = build(family), tokens(2, LENGTH), []
    for fused in (False, True):
        use_fused_rope(model, enabled=fused)
        cache = DynamicCache(config=model.config)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = logits(model, ids, past_key_values=cache)
        found.append((out, cache.layers[0].keys))
    (stock, keys), (got, fused_keys) = found
    assert fused_keys.dtype == keys.dtype
    assert close(fused_keys.float(), keys.float(), 1e-2)
    assert close(got.float(), stock.float(), 5e-2)
    use_fused_rope(model, enabled=False)
    exact = logits(model, ids)
    stock = logits(model.to(torch.bfloat16), ids)
    got = logits(use_fused_rope(model), ids)
    assert got.dtype == torch.bfloat16
    error = (got.double() - exact).norm() / (stock.double() - exact).norm()
    assert 0 < error < 1.5


def test_only_the_layers_of_this_model(calls):
    model, other, ids = build("llama"), build("llama"), tokens(1, LENGTH)
    apply = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    use_fused_rope(use_fused_rope(model))  # twice is once
    assert transformers.models.llama.modeling_llama.apply_rotary_pos_emb is apply
    logits(other, ids)
    assert not calls
    use_fused_rope(other, enabled=False)
    logits(model, ids)
    assert len(calls) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, calls):
    model, ids = use_fused_rope(build("llama").train()), tokens(2, LENGTH)
    wanted = gradients(model, ids)
    recompute(model, reentrant)
    calls.clear()
    for got, gradient in zip(gradients(model, ids), wanted, strict=True):
        assert close(got, gradient, 1e-5)
    assert len(calls) == 4  # two layers, twice


def test_copies_and_files(calls, tmp_path):
    model, ids = use_fused_rope(build("llama")), tokens(1, LENGTH)
    wanted = logits(model, ids)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    calls.clear()
    assert torch.equal(logits(copied, ids), wanted)  # by its own weights
    assert len(calls) == 2
    copied.save_pretrained(tmp_path)
    read_back = pickled(copied)
    calls.clear()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert close(logits(stock, ids), wanted, 1e-5)
    assert not calls
    assert torch.equal(logits(read_back, ids), wanted)
    assert len(calls) == 2
    stock = use_fused_rope(read_back, enabled=False)
    assert not any(isinstance(module, fused_rope.Fused) for module in stock.modules())
    assert type(stock.model.layers[0].self_attn) is type(build("llama").model.layers[0].self_attn)


def test_layers_of_another_default_dtype_and_replicas():
    """DataParallel copies a layer's attributes: a forward among them would be the original's."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        fused_rope._fused_class.cache_clear()
        layer = use_fused_rope(build("llama")).model.layers[0].self_attn
    finally:
        torch.set_default_dtype(torch.float32)
    assert isinstance(layer, fused_rope.Fused)
    replica = layer._replicate_for_data_parallel()
    assert replica.forward.__self__ is replica
    assert replica.forward.__func__ is layer.forward.__func__


# What transformers 4.57 makes masks of, as PyTorch traces it.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_and_exported():
    torch._dynamo.reset()
    one = {"num_hidden_layers": 1}
    model, ids = build("llama", **one), tokens(2, LENGTH)
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(model.model, backend=backend, fullgraph=True)
    for enabled in (False, True, False):
        use_fused_rope(model, enabled=enabled)
        with torch.no_grad():
            wanted = model.model(ids, use_cache=False).last_hidden_state
            assert torch.equal(compiled(ids, use_cache=False).last_hidden_state, wanted)
    assert ["rope_qk" in graph for graph in graphs] == [False, True]
    use_fused_rope(model)
    exported = torch.export.export(model.model, (ids,), {"use_cache": False}, strict=False)
    assert "wavepe.rope_qk" in exported.graph_module.code
    got = exported.module()(ids, use_cache=False).last_hidden_state
    assert close(got.detach(), wanted, 1e-5)
    torch._dynamo.reset()


def test_output_recorders_and_static_caches(calls):
    model, ids = build("llama"), tokens(2, LENGTH)
    model.set_attn_implementation("eager")
    stock = model(ids, output_attentions=True).attentions
    use_fused_rope(model)
    fused = model(ids, output_attentions=True).attentions
    assert len(fused) == len(stock) == 2
    assert all(close(a.detach(), b.detach(), 1e-5) for a, b in zip(fused, stock, strict=True))
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    parts = [logits(model, part, past_key_values=cache) for part in ids.split((9, 1, 6), dim=1)]
    assert close(torch.cat(parts, 1), logits(model, ids), 1e-5)


@pytest.mark.parametrize("family", ["llama", "stablelm"])
def test_goes_with_set_theta(family, calls):
    ids = tokens(1, LENGTH)
    wanted = logits(build(family, 7.0), ids)
    for model in (set_theta(use_fused_rope(build(family)), 7.0),
                  use_fused_rope(set_theta(build(family), 7.0))):  # fmt: skip
        calls.clear()
        assert close(logits(model, ids), wanted, 1e-5)
        assert len(calls) == 2
        cache = DynamicCache(config=model.config)
        logits(model, ids[:, :5], past_key_values=cache)
        set_theta(model, 20.0)
        with pytest.raises(ValueError, match="empty cache"):
            logits(model, ids[:, 5:], past_key_values=cache)


def test_patched_models(calls):
    ids = tokens(1, LENGTH)
    model = wavepe.hf.patch(tiny(), "rope:theta=30")
    wanted = logits(model, ids)
    assert close(logits(use_fused_rope(model), ids), wanted, 1e-5)
    assert len(calls) == 2
    for spec in ("wavelet:scales=4", "alibi", "none", "sinusoidal"):
        model = wavepe.hf.patch(tiny(), spec)
        with pytest.raises(ValueError, match="not rotary: there is nothing to rotate"):
            use_fused_rope(model)
        wanted = logits(model, ids)
        later = wavepe.hf.patch(use_fused_rope(tiny()), spec)  # a rotation by nothing
        assert close(logits(later, ids), wanted, 1e-5)


def test_hybrids_of_which_some_layers_rotate(calls):
    """The layers rotate in their own way, or in Gemma 3 by one of two bases."""
    for family, spec in (("llama", {"0": "none"}), ("gemma3_text", {"1": "rope"})):
        model = wavepe.hf.patch(build(family), spec)
        ids = tokens(1, 12)
        wanted = logits(model, ids)
        calls.clear()
        assert close(logits(use_fused_rope(model), ids), wanted, 1e-5)
        assert calls


def refused(family, message, **options):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
    with pytest.raises(ValueError, match=message):
        use_fused_rope(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_other_forms_of_rotation_are_refused():
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4}
    refused("gptj", r"gptj.* has no fused form: it does not rotate pairs", **sizes, rotary_dim=4)
    refused("gpt2", "no layer of this GPT2LMHeadModel calls", **sizes)
    parts = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"), 8)
    parts |= dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "moe_intermediate_size"), 8)
    refused("deepseek_v3", "apply_rotary_pos_emb_interleave as well as", vocab_size=VOCABULARY,
            hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=4, first_k_dense_replace=1, **parts)  # fmt: skip


@pytest.mark.parametrize("family", [name for name in ONE_BY_ONE if name in FAMILIES])
def test_a_family_that_rotates_one_by_one_is_refused(family):
    with pytest.raises(ValueError, match=r"no fused form.* given \(q, k, cos, sin\)"):
        use_fused_rope(build(family))


def test_functions_that_only_look_alike_are_refused():
    stock = transformers.models.llama.modeling_llama.apply_rotary_pos_emb

    def backwards(q, k, cos, sin):
        return stock(q, k, cos, -sin)

    def queries_only(q, k, cos, sin):
        return stock(q, k, cos, sin)[0], k

    for function in (backwards, queries_only, lambda q, k, cos, sin: None):
        with pytest.raises(ValueError, match="no fused form"):
            fused_rope._fused_apply(function)
    q, k, angles = pairs.sample()
    fused = fused_rope._fused_apply(stock)
    table = torch.cat((angles, angles), -1).cos()
    other = (q.transpose(1, 2), k.transpose(1, 2), table, table)
    for options in ({"unsqueeze_dim": 2}, {}):
        given = other if options else (q, k, table, table)
        for got, wanted in zip(fused(*given, **options), stock(*given, **options), strict=True):
            assert torch.allclose(got, wanted, atol=1e-6)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="got str"):
        use_fused_rope("model")
    with pytest.raises(TypeError, match="enabled must be True or False"):
        use_fused_rope(tiny(), "no")
    model = tiny()
    layer = model.model.layers[1].self_attn
    layer.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match="has its own forward"):
        use_fused_rope(model)
    assert "forward" not in vars(model.model.layers[0].self_attn)
    use_fused_rope(model, enabled=False)  # nothing of ours there
    assert "forward" in vars(layer)
