"""Each family: patched, against a float64 reference, and back; attn_implementation="wavepe"."""

import functools
import itertools
import sys

import pytest
import torch
import transformers
import wavepe.hf
from encoding_cases import ASKED, HEAD, LEARNED
from hf_families import FAMILIES, LAYERS, UNROTATED, VOCABULARY, Reference, build, by_turns, stirred
from hf_model import EACH_ENTRY, close, gradients, logits, tiny, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache
from wavepe.hf import attention, families, masks
from wavepe.hf.families import decoder
from wavepe.hf.pairs import APPLY
from wavepe.positions import Rotated, Scores

SPECS = (*EACH_ENTRY, *LEARNED)
LENGTH = 20  # more than three windows
# float32 against float64: two layers of sums of at most 40 terms. 2e-6 is seen, of stock models
# too.
FLOAT32 = 1e-5
each_family = by_turns()


def patched(family, spec):
    return stirred(wavepe.hf.patch(build(family), spec))


def padding():
    """A row that begins with padding, and one without."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :7] = 0
    return mask


def of_padding(family):
    """The arguments for these rows: the mask, and positions where the stock model needs them."""
    mask = padding()
    places = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return {"attention_mask": mask} | (places if FAMILIES[family].scales_queries else {})


def sequences():
    """Numbers and positions of packed tokens, each row cut at another place."""
    numbers = torch.tensor([[0] * 9 + [1] * 11, [0] * 4 + [1] * 8 + [2] * 8])
    positions = [torch.arange(n) for row in numbers for n in row.bincount()]
    return numbers, torch.cat(positions).view(2, LENGTH)


@each_family
def test_the_reference_is_the_stock_model(family):
    model, ids = build(family), tokens(2, LENGTH)
    wanted, _ = Reference(family, model)(ids)
    assert close(logits(model, ids), wanted.detach(), FLOAT32)


def each_family_with_two(test):
    """Run a test with each family under each encoding; without --all, under two by turns.

    Families that scale their embeddings show whether vectors are added in the right place.
    """
    cases = []
    for spec in SPECS:
        for index, family in enumerate(FAMILIES):
            two = EACH_ENTRY[index % 6], list(LEARNED)[(index + index // 6) % 6]
            scaled = spec == "sinusoidal" and family in ("gemma2", "gemma3_text", "granite")
            marks = () if spec in two or scaled else pytest.mark.slow
            cases.append(pytest.param(spec, family, marks=marks))
    return pytest.mark.parametrize(("spec", "family"), cases)(test)


@each_family_with_two
def test_values(spec, family):
    model, ids = patched(family, spec), tokens(2, LENGTH)
    reference = Reference(family, model, spec)
    sinks = hasattr(families.attentions(decoder(model))[0], "sinks")
    with torch.no_grad():
        wanted, weights = reference(ids)
        assert close(logits(model, ids), wanted, FLOAT32)
        output = model(ids, output_attentions=True, use_cache=False)
        assert close(output.logits, wanted, FLOAT32)
        for got, layer in zip(output.attentions, weights, strict=True):
            if not sinks:  # they have a share, too
                assert (got.sum(-1) - 1).abs().max() < 1e-6  # rounding of 20 shares
            assert close(got, layer, FLOAT32)
        kept = padding().bool()
        wanted, _ = reference(ids, padding=padding())
        assert close(logits(model, ids, **of_padding(family))[kept], wanted[kept], FLOAT32)
        numbers, positions = sequences()
        wanted, _ = reference(ids, segments=numbers)
        output = logits(model, ids, position_ids=positions, use_cache=False)
        assert close(output, wanted, FLOAT32)


@each_family
def test_gradients(family):
    spec = "wavelet:scales=4"
    model, ids = patched(family, spec), tokens(2, LENGTH)
    reference = Reference(family, model, spec)
    found = gradients(model.train(), ids)
    scores, _ = reference(ids)
    scores = scores[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(scores, ids[:, 1:].flatten()).backward()
    wanted = [weight.grad for weight in reference.model.parameters()]
    # Relative to the largest: that of a bias of keys is 0 but for rounding.
    largest = max(gradient.abs().max() for gradient in wanted)
    for got, gradient in zip(found, wanted, strict=True):
        deeper = model.config.num_hidden_layers / LAYERS
        assert (got - gradient).abs().max() <= deeper * FLOAT32 * largest


@functools.partial(each_family, also=("gemma3_text", "smollm3", "phi3", "gpt_neox"))
def test_pairs_are_those_of_the_family(family):
    """A bare rope takes them, and so does one that names them. Others are refused."""
    ids, interleaved = tokens(2, LENGTH), FAMILIES[family].interleaved
    stock = logits(build(family), ids)
    for same in ("rope", f"rope:interleaved={str(interleaved).lower()}"):
        assert close(logits(wavepe.hf.patch(build(family), same), ids), stock, FLOAT32)
    other = f"interleaved={str(not interleaved).lower()}"
    with pytest.raises(ValueError, match=f"{other} is for models that rotate"):
        wavepe.hf.patch(build(family), f"rope:{other}")


@pytest.mark.skipif("gemma4_text" not in FAMILIES, reason="a newer transformers has it")
@pytest.mark.parametrize("spec", [None, "rope", "rope:theta=100", "wavelet:scales=4", "kerple"])
def test_heads_of_two_sizes(spec):
    """Gemma 4's layers without a window have larger heads, and a table of their own.

    Layers with heads of both sizes share learned biases.
    """
    sizes = {"global_head_dim": 12}
    model, ids = build("gemma4_text", **sizes), tokens(2, LENGTH)
    assert {x.head_dim for x in families.sizes(decoder(model))} == {8, 12}
    if spec is not None:
        stirred(wavepe.hf.patch(model, spec))
    wanted, _ = Reference("gemma4_text", model, None if spec == "rope" else spec, **sizes)(ids)
    assert close(logits(model, ids), wanted.detach(), FLOAT32)
    cache = DynamicCache(config=model.config)
    pieces = [logits(model, part, past_key_values=cache) for part in ids.split((7, 1, 12), 1)]
    assert close(torch.cat(pieces, 1), wanted.detach(), FLOAT32)


@pytest.mark.skipif("gemma4_text" not in FAMILIES, reason="a newer transformers has it")
def test_a_learned_table_needs_heads_of_one_size():
    model, ids = build("gemma4_text", global_head_dim=12), tokens(2, LENGTH)
    with pytest.raises(ValueError, match="heads of the sizes 8 and 12: name layers of one size"):
        wavepe.hf.patch(model, "wavelet:scales=4,learned=true")
    spec = "wavelet:scales=4,learned=true"
    wavepe.hf.patch(model, {"0": spec, "2": spec})
    assert logits(model, ids).isfinite().all()


@each_family
def test_there_and_back(family):
    """Each encoding has an effect of its own, and leaves nothing behind."""
    model, ids = build(family), tokens(2, LENGTH)
    stock, implementation = logits(model, ids), model.config._attn_implementation
    keys, buffers = list(model.state_dict()), list(dict(model.named_buffers()))
    seen = [stock]
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


@each_family
def test_bfloat16(family):
    model, ids = build(family), tokens(2, LENGTH)
    wavepe.hf.patch(model, "wavelet:scales=4")
    wanted = logits(model, ids, attention_mask=padding())
    output = logits(model.bfloat16(), ids, attention_mask=padding())
    assert output.dtype == torch.bfloat16
    assert output.isfinite().all()
    # 8 bits, a dozen roundings a layer, and a softmax that multiplies them.
    assert close(output.float()[padding().bool()], wanted[padding().bool()], 0.1)


@each_family
def test_a_mask_that_hides_nothing_is_none(family, monkeypatch):
    """On a device patched models get one where nothing is given, lest transformers looks."""
    model, ids = wavepe.hf.patch(build(family), "wavelet"), tokens(2, 12)
    wanted = logits(model, ids)
    monkeypatch.setattr(masks, "reading_waits", lambda device: True)
    made, real = [], masks.nothing_hidden
    monkeypatch.setattr(masks, "nothing_hidden", lambda device: made.append(1) or real(device))
    assert torch.equal(logits(model, ids), wanted)
    assert made == [1]


# ------------------------------------------------------------------ models that are not patched
@pytest.fixture
def registered():
    """A function that builds a stock model, and the same with attn_implementation="wavepe"."""

    def pair(family):
        model = build(family)
        model.set_attn_implementation("wavepe")
        return build(family), model

    return pair


IDS = tokens(2, LENGTH)
CUTS = ((12, 8), (12, 1, 7), (5, *[1] * 15))


def in_pieces(model, cuts, kind=DynamicCache, **room):
    cache = kind(config=model.config, **room)
    parts = IDS.split(list(cuts), 1)
    return torch.cat([logits(model, part, past_key_values=cache) for part in parts], 1)


@each_family
def test_every_cache(family, registered):
    stock, model = registered(family)
    wanted = logits(stock, IDS, use_cache=False)
    assert close(logits(model, IDS, use_cache=False), wanted, 1e-4)
    caches = ({"kind": DynamicCache}, {"kind": StaticCache, "max_cache_len": 32})
    for cuts, cache in itertools.product(CUTS, caches):
        # transformers' own attention is not right with some of them
        if close(in_pieces(stock, cuts, **cache), wanted, 1e-4):
            assert close(in_pieces(model, cuts, **cache), wanted, 1e-4), (cuts, cache)
        else:
            assert cache["kind"] is StaticCache, cuts


@each_family
def test_padding_packing_and_generation(family, registered):
    stock, model = registered(family)
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
        output = model.generate(IDS, **how, **cache)
        assert torch.equal(output, stock.generate(IDS, **how, **cache))


@pytest.mark.skipif("gpt_oss" not in FAMILIES, reason="a newer transformers has it")
def test_sinks_where_there_is_no_kernel(registered, monkeypatch):
    """PyTorch's attention has none, so the operator computes it."""
    stock, model = registered("gpt_oss")
    wanted = logits(stock, IDS)
    monkeypatch.setattr(families, "FUSED_ON", ())
    assert close(logits(model, IDS), wanted, 1e-4)


def test_chunks_are_those_of_the_family():
    sizes = UNSUPPORTED["llama4_text"] | {"num_hidden_layers": 2, "num_local_experts": 2}
    layers = {"attention_chunk_size": 4, "layer_types": ["chunked_attention"] * 2}
    config = transformers.Llama4TextConfig(**sizes, **layers)
    stock = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    wanted = logits(stock, IDS, use_cache=False)
    stock.set_attn_implementation("wavepe")
    assert close(logits(stock, IDS, use_cache=False), wanted, 1e-5)
    for cuts in CUTS:
        assert close(in_pieces(stock, cuts), wanted, 1e-5), cuts


@by_turns(2, always=("llama", "mistral", "gemma2", "stablelm"))
def test_models_that_look_both_ways(family):
    """As the stock model's eager attention: windows, caps and sinks stay."""
    models = stock, registered, patched = [build(family) for _ in range(3)]
    stock.set_attn_implementation("eager")
    registered.set_attn_implementation("wavepe")
    wavepe.hf.patch(patched, "rope")
    causal = logits(stock, IDS)
    for model in models:
        model.config.is_causal = False
    if torch.equal(logits(stock, IDS), causal):
        pytest.skip("this transformers does not read config.is_causal")
    kept = padding().bool()
    for options in ({}, {"attention_mask": padding()}, {"output_attentions": True}):
        seen = kept if "attention_mask" in options else kept | True
        wanted, *got = (logits(model, IDS, **options)[seen] for model in models)
        assert all(close(each, wanted, FLOAT32) for each in got)
    wanted, *got = (in_pieces(model, CUTS[0]) for model in models)
    assert all(close(each, wanted, FLOAT32) for each in got)
    with pytest.raises(ValueError, match="packed sequences need causal attention"):
        logits(patched, IDS, position_ids=sequences()[1], use_cache=False)
    alibi = wavepe.hf.patch(build(family), "alibi")
    alibi.config.is_causal = False
    with pytest.raises(ValueError, match=r"alibi needs causal attention, got config\.is_causal"):
        logits(alibi, IDS)
    del patched.config.is_causal
    for layer in families.attentions(decoder(patched)):
        layer.is_causal = False
    if any(FAMILIES[family].windows):
        with pytest.raises(ValueError, match="windows or chunks of a prompt: set config"):
            logits(patched, IDS)
    else:
        assert close(logits(patched, IDS), logits(stock, IDS), FLOAT32)


def test_what_the_attention_does_not_know():
    layer = tiny(attn_implementation="wavepe").model.layers[0].self_attn
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    for name in ("position_bias", "sinks", "head_mask"):
        with pytest.raises(ValueError, match=f"got the argument '{name}', which it does not know"):
            attention.attention_forward(layer, q, k, k, None, **{name: torch.zeros(4)})
    with pytest.raises(TypeError, match=r"bool or floating point, got torch\.int32"):
        attention.attention_forward(layer, q, k, k, torch.ones(1, 1, 6, 6, dtype=torch.int32))
    two = torch.tensor([0, 2, 6])
    with pytest.raises(ValueError, match="position_ids that start again"):
        attention.attention_forward(layer, q, k, k, None, cu_seq_lens_q=two, cu_seq_lens_k=two)
    out, _ = attention.attention_forward(layer, q, k, k, None, position_ids=torch.arange(6)[None])
    causal = {"is_causal": True, "enable_gqa": True}
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k, **causal)
    assert close(out, wanted.transpose(1, 2), 1e-6)


# ------------------------------------------------------------------ models that patch refuses


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "pad_token_id": 0,
}  # fmt: skip
UNSUPPORTED = {
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": VOCABULARY},
    "bert": SIZES,
    "llama4_text": {
        **SIZES, "intermediate_size_mlp": 32, "num_key_value_heads": 4, "head_dim": 8,
        "num_local_experts": 2},
    "cohere": SIZES,
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_refused(kind):
    model = AutoModel.from_config(AutoConfig.for_model(kind, **UNSUPPORTED[kind])).eval()
    name, before = type(model).__name__, list(model.state_dict())
    with pytest.raises(
        TypeError, match=rf"^got a {name}.*{kind}.* not supported: .*llama, mistral"
    ):
        wavepe.hf.patch(model, "wavelet:scales=4")
    assert list(model.state_dict()) == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(TypeError, match=name):
        wavepe.hf.unpatch(model)


def test_refused_in_both_directions():
    model = build("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(TypeError, match=r"Gemma3ForCausalLM.*both directions"):
        wavepe.hf.patch(model, "alibi")


NO_WINDOWS = {"sliding_window": None, "layer_types": 2 * ["full_attention"]}


@pytest.mark.parametrize(
    ("family", "options"), [*((family, {}) for family in FAMILIES), ("exaone4", NO_WINDOWS)]
)
def test_the_layers_of_a_stock_model_rotate_as_the_record_says(family, options, monkeypatch):
    base = build(family, **options).base_model
    layers, rotated = families.attentions(base), []
    module = sys.modules[type(layers[0]).__module__]
    rotate = getattr(module, APPLY)
    monkeypatch.setattr(module, APPLY, lambda *args, **kw: rotated.append(1) or rotate(*args, **kw))
    for layer in layers:
        layer.register_forward_hook(lambda *_: rotated.append(0))
    base(tokens(1, 5))
    calls = "".join(map(str, rotated)).split("0")[:-1]
    slots = [families.slot(base.config, layer, i) for i, layer in enumerate(layers)]
    assert [bool(ones) for ones in calls] == [slot is not None for slot in slots]


def test_each_supported_family_has_a_row_here():
    """So none passes unchecked: the test above asks each row which of its layers rotate."""
    supported = wavepe.hf.supported_families()
    kinds = {kind.model_type for kind in (FAMILIES | UNROTATED).values()}
    assert kinds == set(supported) - set(families.T5_TYPES)  # of which test_hf_t5.py tests each
    assert supported["mistral"] == "the sliding window"
    supported.clear()
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


def test_the_name_of_a_model_is_no_model():
    for call in (
        wavepe.hf.encoding_of,
        wavepe.hf.unpatch,
        lambda name: wavepe.hf.fix_length(name, 9),
        lambda name: wavepe.hf.set_theta(name, 1e4),
        lambda name: wavepe.hf.patch(name, "alibi"),
        lambda name: wavepe.hf.parameter_groups(name, 0.1),
    ):
        with pytest.raises(TypeError, match=r"needs a model, got str: .*from_pretrained\('my'\)$"):
            call("my")


def test_a_wrapped_model_is_named():
    model = build("llama")
    wrappers = torch.compile(model, backend="eager"), torch.nn.DataParallel(model)
    for given in (*wrappers, torch.nn.Linear(2, 2)):
        words = f"got {type(given).__name__}: if it is a wrapper, give the model inside it"
        with pytest.raises(TypeError, match=words):
            wavepe.hf.patch(given, "alibi")


@pytest.mark.parametrize("family", ["gemma", "gemma2"])
def test_embeddings_that_scale_by_themselves(family):
    """Gemma of transformers 5.1 scales in the embedding; versions before, in the model."""
    base = build(family).model
    scale = families.embedding_scale(base)
    base.embed_tokens.embed_scale = torch.tensor(2.0)
    assert families.embedding_scale(base) == 1.0
    del base.embed_tokens.embed_scale
    assert families.embedding_scale(base) == 32**0.5
    assert scale in (1.0, 32**0.5)


@each_family
def test_terms_beside_a_rotation_read_the_queries_before_it(family, monkeypatch):
    before, undone, undo = [], [], Rotated.unrotate

    def kept(self, q):
        undone.append(undo(self, q))
        return undone[-1]

    monkeypatch.setattr(Rotated, "unrotate", kept)
    model = patched(family, f"rope:theta=50+{ASKED}")
    stock = sys.modules[type(families.attentions(decoder(model))[0]).__module__]
    rotate = stock.apply_rotary_pos_emb

    @functools.wraps(rotate)
    def watched(q, *rest, **options):
        single = options.get("unsqueeze_dim") == 2  # Gemma 4 rotates queries, then keys
        q_by_head = q.transpose(1, 2) if single else q
        if q_by_head.shape[1] == model.config.num_attention_heads:
            before.append(q_by_head)
        return rotate(q, *rest, **options)

    monkeypatch.setattr(stock, "apply_rotary_pos_emb", watched)
    ids = tokens(2, LENGTH)
    whole = logits(model, ids, use_cache=False)
    assert len(before) == len(undone) > 0
    for q, found in zip(before, undone, strict=True):
        found = found[..., : q.shape[-1]]  # some families rotate a part alone
        scale = found.norm(dim=-1, keepdim=True) / q.norm(dim=-1, keepdim=True)
        assert close(found, q * scale, FLOAT32)
        assert (scale > 1.1).any() == FAMILIES[family].scales_queries
    cache = DynamicCache(config=model.config)
    pieces = [logits(model, part, past_key_values=cache) for part in ids.split((7, 1, 12), 1)]
    assert close(torch.cat(pieces, 1), whole, FLOAT32)


@each_family
def test_several_tables_are_scaled_as_one(family):
    """Beside a table of zeros a query of its own takes another way, to the same scores."""
    ids, found = tokens(2, LENGTH), []
    for spec in (ASKED, f"{ASKED}+shaw:clip=3"):
        model = wavepe.hf.patch(build(family), spec)
        with torch.no_grad():
            for name, x in model.named_parameters():
                if "position_encoding." in name:
                    waves = torch.arange(x.numel()).view_as(x).sin()
                    x.copy_(torch.zeros_like(x) if "shaw" in name else x + waves)
        found.append(logits(model, ids))
    assert close(*found, FLOAT32)


@pytest.mark.parametrize("family", sorted({"gpt_neox", "phi3", "stablelm", "glm4"} & {*FAMILIES}))
def test_xpos_scales_the_dims_that_rotate(family):
    """Else the factors would differ within a rotated pair, and the scores depend on positions."""
    model = wavepe.hf.patch(build(family), "xpos:scale_base=6")
    ids, score = tokens(2, LENGTH), families.attentions(model.base_model)[0].wavepe.score
    moved = torch.arange(9, 9 + LENGTH)[None]
    assert close(logits(model, ids, position_ids=moved), logits(model, ids), FLOAT32)
    q, k = torch.randn(2, 1, 4, LENGTH, HEAD, generator=torch.Generator().manual_seed(0))
    half, made = HEAD // 2, score.arguments(q, k, {})
    part = Scores(score.encoding, half, 4, True).arguments(q[..., :half], k[..., :half], {})
    assert torch.equal(made["q"], torch.cat([part["q"], q[..., half:]], -1))
    assert torch.equal(made["k"], torch.cat([part["k"], k[..., half:]], -1))
