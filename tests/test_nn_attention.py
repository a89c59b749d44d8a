"""wavepe.nn.Attention, SelfAttention and AbsoluteEncoding: what they compute, for each encoding."""

import copy
import dataclasses
import functools
import pickle

import numpy as np
import oracle_rope
import pytest
import torch
import wavepe
from cases import by_turns
from encoding_cases import ABSOLUTE, ASKED, LEARNED, YARN
from nn_cases import RELATIVE, ROTARY, SPECS, assert_exact, exact, made, tokens
from wavepe import ops
from wavepe.arrays.wavelet_registered import note_registration
from wavepe.encodings import Encoding, RoPE
from wavepe.nn import AbsoluteEncoding, Attention, KVCache, SelfAttention
from wavepe.positions import Scores


def parts(module, x):
    """The attention of a SelfAttention by itself, and its queries, keys and values."""
    q, k, v = (
        projection(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    attention = Attention(
        str(module.encoding), module.head_dim, module.heads, module.kv_heads, causal=module.causal,
        dim=module.dim,
    ).eval()  # fmt: skip
    attention.position_encoding = module.position_encoding
    if module.encoding.reads_input:
        attention.forward = functools.partial(attention.forward, x=x)
    return attention, q, k, v


def projected(module, out):
    return module.o_proj(out.transpose(1, 2).flatten(2))


# --------------------------------------------------------------- the formula, in every situation

LEFT, RIGHT = torch.ones(2, 2, 11, dtype=torch.bool)
LEFT[0, :3] = RIGHT[0, 7:] = False
SEGMENTS = torch.tensor([[3] * 4 + [1] * 5 + [2] * 2, [0] * 11])
AGAIN = torch.tensor([[*range(4), *range(5), *range(2)], [*range(11)]])


def counted(mask):
    """Positions of the visible tokens, as Hugging Face counts."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


SITUATIONS = {  # name: options of the module, number of tokens, options of the call
    "one token": ({"kv_heads": 1}, 1, {}),
    "two tokens": ({"kv_heads": 4}, 2, {}),
    "many tokens": ({}, 11, {}),
    "one key head": ({"kv_heads": 1}, 11, {}),
    "window and biases": ({"window": 4, "bias": True}, 11, {}),
    "padded on the left": ({}, 11, {"key_mask": LEFT}),
    "padded on the right": ({}, 11, {"key_mask": RIGHT}),
    "a mask for all rows": ({}, 11, {"key_mask": LEFT[:1]}),
    "padded on the left, positions": ({}, 11, {"key_mask": LEFT, "positions": counted(LEFT)}),
    "padded on the right, positions": ({}, 11, {"key_mask": RIGHT, "positions": counted(RIGHT)}),
    "shifted positions": ({}, 11, {"positions": torch.arange(11) + 50}),
    "uint8 positions": ({}, 11, {"positions": torch.arange(50, 61, dtype=torch.uint8)}),
    "int32 positions by row": ({}, 11, {"positions": torch.arange(22).view(2, 11).int()}),
    "packed": ({}, 11, {"segments": SEGMENTS}),
    "all rows packed alike": ({}, 11, {"segments": SEGMENTS[0]}),
    "packed, positions": ({}, 11, {"segments": SEGMENTS, "positions": AGAIN}),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("spec", "situation"), by_turns(SPECS, SITUATIONS, 4))
def test_the_formula(spec, situation, causal):
    """Check SelfAttention; Attention is the same without projections, to the bit."""
    if spec == "fox" and not causal:
        pytest.skip("fox is causal")
    options, length, call = SITUATIONS[situation]
    module, x = made(spec, causal=causal, **options), tokens(length)
    got, window = module(x, **call), {"window": options.get("window")}
    shown = call.get("key_mask") if "positions" in call else None  # hidden ones may be anywhere
    where = None if shown is None else shown.expand(2, -1)
    assert_exact(got, module, x, where=where, **call, **window)
    attention, *qkv = parts(module, x)
    assert torch.equal(projected(module, attention(*qkv, **call, **window)), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", SPECS)
def test_every_dtype(spec, dtype):
    module, x = made(spec, dtype), tokens(dtype=dtype)
    assert_exact(module(x), module, x)


def test_the_formula_of_the_tests_can_fail():
    module, x = made("wavelet:scales=4"), tokens()
    other = made("wavelet:kind=haar,scales=2")
    assert np.abs(exact(module, x) - exact(other, x)).max() > 1e-2
    with pytest.raises(AssertionError):
        assert_exact(other(x), module, x)


@pytest.mark.parametrize("spec", [*RELATIVE, "sink:from_input=true"])
def test_the_last_queries_alone_and_a_cache(spec):
    x = tokens()
    attention, q, k, v = parts(made(spec), x)
    whole, cache = attention(q, k, v), KVCache()
    for count in (0, 1, 4):
        last = attention(q[:, :, 11 - count :], k, v)
        assert last.shape == (2, 4, count, 8)
        assert (last - whole[:, :, 11 - count :]).abs().max().item() < 1e-12 if count else True
    shifted = attention(q[:, :, 7:], k, v, positions=torch.arange(11) + 5)
    assert (shifted - whole[:, :, 7:]).abs().max() < 1e-6
    with torch.inference_mode():
        for place in (slice(0, 6), slice(6, 7), slice(7, 11)):
            of_input = {"x": x[:, place]} if attention.encoding.reads_input else {}
            out = attention(q[:, :, place], k[:, :, place], v[:, :, place], cache=cache, **of_input)
            assert (out - whole[:, :, place]).abs().max() < 1e-6
    assert cache.length == 11


@pytest.mark.parametrize("spec", ["wavelet:scales=4", "alibi", "rope"])
def test_window_softcap_and_value_size(spec):
    attention, q, k, _ = parts(made(spec), tokens())
    v = torch.randn(2, 2, 11, 5, dtype=q.dtype)
    got, plain = attention(q, k, v, window=4, softcap=2.0), attention(q, k, v)
    q, k, rotated = attention.position_encoding.rotate(q, k, None, None)
    arguments = Scores(attention.encoding, 8, 4, causal=True).arguments(q, k, {}, rotated)
    wanted = ops.attention(**arguments, v=v, window=4, softcap=2.0)
    assert got.shape == (2, 4, 11, 5)
    assert torch.equal(got, wanted)
    assert not torch.allclose(got, plain)


@pytest.mark.parametrize("spec", ["wavelet:scales=4", "alibi+sandwich"])
def test_constant_terms_are_kept(spec, monkeypatch):
    """For a range of lengths, a device and a dtype; not in copies, and not for another meaning."""
    scores = Scores(wavepe.encoding(spec), 8, 2, causal=True)

    def terms(length, dtype=torch.float32):
        return scores._terms(torch.randn(1, 2, 1, 8, dtype=dtype), length, {}, None, False)

    kept = terms(100)
    assert terms(1) is terms(128) is kept
    assert terms(129) is not kept
    assert terms(100, torch.float64) is not terms(100, torch.float32)
    for copied in (copy.deepcopy(scores), pickle.loads(pickle.dumps(scores))):
        assert not copied._kept
    again = terms(100)
    note_registration()
    assert terms(100) is not again
    computed = scores._computed
    meanwhile = lambda *arguments: (computed(*arguments), note_registration())[0]  # noqa: E731
    monkeypatch.setattr(scores, "_computed", meanwhile)  # another thread registers then
    assert terms(300) is not terms(300)


@pytest.mark.parametrize("spec", ["wavelet:scales=4", "alibi", YARN])
def test_a_head_size_of_its_own(spec):
    module, x = SelfAttention(20, 4, 2, spec, head_dim=8, dtype=torch.float64), tokens(dim=20)
    assert module.o_proj.weight.shape == (20, 32)
    assert_exact(module(x), module, x)


@pytest.mark.parametrize(
    "spec", ["wavelet:scales=4", "wavelet:scales=4,learned=true", "alibi", "none"]
)
def test_a_table_longer_than_the_first(spec):
    """Lengths on both sides of a capacity; a later token changes nothing before it."""
    module, both, x = made(spec), made(spec, causal=False), tokens(140, batch=1)
    whole = module(x)
    for length in (127, 128, 129):
        assert (module(x[:, :length]) - whole[:, :length]).abs().max() < 1e-6
    assert_exact(both(x[:, :129]), both, x[:, :129])


def test_nothing_to_attend_to():
    module = made("wavelet:scales=4", bias=True)
    assert module(tokens(0)).shape == (2, 0, 32)
    assert module(tokens(3, batch=0)).shape == (0, 3, 32)
    for rows in (0, 1):
        positions, mask = torch.arange(3).expand(rows, 3), torch.ones(1, 3, dtype=torch.bool)
        for key_mask in (None, mask):
            got = module(tokens(3, batch=0), positions=positions, key_mask=key_mask)
            assert got.shape == (0, 3, 32)
    biases = module.o_proj.bias.expand(2, 3, 32)
    x, hidden = tokens(3), torch.zeros(2, 3, dtype=torch.bool)
    assert torch.equal(module(x, key_mask=hidden), biases)
    assert torch.equal(made("wavelet:scales=4", bias=True, window=0)(x), biases)


# --------------------------------------------------------------- positions
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "none"])
def test_positions_that_are_refused(spec):
    module, x, here = made(spec), tokens(), torch.arange(11)
    with pytest.raises(RuntimeError, match=r"positions .*pass segments="):
        module(x, positions=AGAIN)
    words = "must rise" if spec in ROTARY else "must go up by 1"
    for wrong in ([0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 7, 8, 9, 10, 11, 12, 13]):
        if spec in ROTARY and wrong[5] == 8:  # a gap is the distance that it says
            continue
        for positions in (torch.tensor(wrong), torch.stack([here, torch.tensor(wrong)])):
            with pytest.raises(RuntimeError, match=words):
                module(x, positions=positions)


@pytest.mark.parametrize("spec", ROTARY)
def test_rotary_takes_gaps(spec):
    module, x = made(spec), tokens()
    positions = torch.tensor([0, 1, 2, 3, 7, 8, 9, 100, 101, 102, 5000])
    for rows in (positions, torch.stack([positions, torch.arange(11)])):
        assert_exact(module(x, positions=rows), module, x, positions=rows)


@pytest.mark.parametrize("spec", RELATIVE)
def test_the_order_of_hidden_tokens_is_no_matter(spec):
    module, x = made(spec), tokens(6)
    mask = torch.tensor([[0, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    wanted = module(x, key_mask=mask)
    for first in ([9, 9, 2, 2, 4, 5], [-1, 7, 7, 7, 9, 10]):
        positions = torch.tensor([first, [*range(6)]])
        got = module(x, key_mask=mask, positions=positions)
        assert (got - wanted)[mask].abs().max() < 1e-6
    bad = torch.tensor([[0, 0, 2, 3, 2, 5], [*range(6)]])
    if spec != "none":
        with pytest.raises(RuntimeError, match="positions of a row"):
            module(x, key_mask=mask, positions=bad)
    # A hole that positions leave out: the distance in tokens is another one.
    holes = torch.tensor([[0, 0, 0, 0, 1, 2], [*range(6)]])
    if spec in ROTARY:
        got = module(x, key_mask=mask, positions=holes)
        assert_exact(got, module, x, where=mask, key_mask=mask, positions=holes)
    elif spec != "none":
        with pytest.raises(RuntimeError, match="must go up by 1"):
            module(x, key_mask=mask, positions=holes)


# --------------------------------------------------------------- rotary types that move
def test_a_base_for_evaluation():
    module, x = made("rope:theta=50,inference_theta=10000"), tokens()
    plain = made("rope")
    assert torch.equal(module(x), plain(x))
    trained = made("rope:theta=50")
    assert torch.equal(module.train()(x), trained(x))
    assert not torch.equal(module(x), plain(x))


FOLLOWING = {  # spec -> the oracle's frequencies of a length, trained with 16 tokens
    "rope:type=dynamic,factor=4": lambda length: oracle_rope.dynamic(8, 1e4, 4, length, 16),
    "rope:theta=128,inference_theta=scaled": lambda length: oracle_rope.default(
        8, 128 * max(1, length / 16)
    ),
}


@pytest.mark.parametrize("spec", FOLLOWING)
def test_types_that_follow_the_length(spec):
    module = made(spec, trained_length=16)
    for length in (11, 40):
        x, rotation = tokens(length), (*FOLLOWING[spec](length), False)
        parts = {"rotation": rotation}
        for positions in (None, torch.arange(length)):
            assert_exact(module(x, positions=positions), module, x, parts=parts)
    with pytest.raises(ValueError, match=r"needs .*trained_length"):
        SelfAttention(32, 4, encoding=spec)


# --------------------------------------------------------------- dropout and gradients
def test_dropout_in_training_only():
    module, x = made("wavelet:scales=4", dropout=0.5), tokens()
    plain = made("wavelet:scales=4")(x)
    assert torch.equal(module(x), plain)
    module.train()
    torch.manual_seed(3)
    first, second = module(x), module(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(module(x), first)
    with torch.no_grad():
        mean = sum(module(x) for _ in range(400)) / 400
    assert (mean - plain).abs().mean() < 0.1 * plain.abs().mean()
    assert not made("none", dropout=1.0).train()(x).any()


@pytest.mark.parametrize("spec", [*LEARNED, ASKED])
def test_what_is_learned_gets_a_gradient(spec):
    """From its first value on."""
    module = SelfAttention(32, 4, encoding=spec, dtype=torch.float64)
    module(tokens()).sum().backward()
    for name, value in module.position_encoding.named_parameters():
        assert value.grad.abs().max() > 0, name


# --------------------------------------------------------------- encodings of one's own
def test_every_method_of_ones_own(own):
    @wavepe.register_encoding
    class Near(Encoding):
        name = "near"
        reach: int = 100

        def table(self, length, head_dim, *, causal=True):
            if length > self.reach:
                raise ValueError(f"near ends at {self.reach}, got {length}")
            return np.full((1, head_dim), 3.0, np.float32), 0, "zero"

    @wavepe.register_encoding
    class Steep(Encoding):
        name = "steep"
        slope: float = 1.5

        def slopes(self, heads):
            return [self.slope] * heads  # not an array

    @wavepe.register_encoding
    @dataclasses.dataclass(frozen=True, repr=False)
    class Slow(RoPE):
        name = "slow"

        def frequencies(self, head_dim, **lengths):
            return np.full(2, 0.25), 1.0

    near, none, x = made("near"), made("none"), tokens(5)
    _, q, k, v = parts(none, x)

    def wanted(**options):
        return projected(none, ops.attention(**({"q": q, "k": k, "v": v} | options)))

    p = torch.full((1, 8), 3.0, dtype=torch.float64)
    assert (near(x) - wanted(p=p)).abs().max() < 1e-12
    slopes = torch.full((4,), 1.5, dtype=torch.float64)
    assert (made("steep")(x) - wanted(slopes=slopes)).abs().max() < 1e-12
    angle = 0.25 * torch.arange(5.0, dtype=torch.float64)[:, None].expand(5, 2)
    cos, sin = angle.cos(), angle.sin()
    turned = {"q": ops.rope(q, cos, sin), "k": ops.rope(k, cos, sin)}
    assert (made("slow")(x) - wanted(**turned)).abs().max() < 1e-12
    with pytest.raises(ValueError, match="near ends at 100, got 101"):
        near(tokens(101))
    with pytest.raises(ValueError, match="rotates 4 dims, more than head_dim=2"):
        SelfAttention(4, 2, encoding="slow")


def test_an_encodings_own_layers_keep_their_digits_under_autocast(own):
    """Without care, a matrix product in `learned_bias` would be bfloat16."""

    @wavepe.register_encoding
    class Layers(Encoding):
        name, learned = "layers", True

        def bias(self, length, heads, *, causal=True):
            return np.zeros((heads, length)), 0, "zero"

        def parameters(self, head_dim, heads):
            return {"w": np.linspace(-1.1, 1.3, 3 * heads).reshape(heads, 3)}

        def learned_bias(self, length, parameters, *, causal=True):
            delta = torch.arange(length, dtype=torch.float32)
            return parameters["w"] @ torch.stack([delta, delta.sqrt(), 1 / (1 + delta)]), 0, "zero"

    encoding = Attention("layers", head_dim=8, heads=2).position_encoding
    exact = encoding(20)["layers"].bias.b
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(encoding(20)["layers"].bias.b, exact)


# --------------------------------------------------------------- AbsoluteEncoding
@pytest.mark.parametrize("spec", ABSOLUTE)
def test_absolute_vectors_are_added(spec):
    module, x = AbsoluteEncoding(spec, 8), tokens(dim=8)
    places = torch.tensor([[*range(3, 14)], [5] * 11])
    for positions, rows in ((None, [range(11)] * 2), (places, places.tolist())):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            got = module(x.to(dtype), positions)
            assert got.dtype == dtype
            for b, row in enumerate(rows):
                vectors = wavepe.encoding(spec).absolute(np.array(row), 8, length=max(row) + 1)
                wanted = x[b].to(dtype) + torch.from_numpy(vectors).float().to(dtype)
                assert torch.equal(got[b], wanted)
    for dtype in (torch.uint8, torch.int8, torch.int32):
        assert torch.equal(module(x, places.to(dtype)), module(x, places))
    assert module(x[:, :0]).shape == (2, 0, 8)
    assert not module.state_dict()
    assert spec in str(module)


def test_absolute_vectors_compile():
    module, x = AbsoluteEncoding("sinusoidal", 32), tokens()
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x), module(x))


def test_a_shared_encoding_fits():
    """Layers may share one module; one of another kind would compute something else."""
    first = Attention("wavelet:scales=4", 8, 2)
    Attention("shaw", 8, 2).position_encoding = first.position_encoding
    for other in (
        Attention("wavelet:scales=4", 8, 2, causal=False),
        Attention("wavelet:scales=4", 8, 4),
        Attention("wavelet:scales=4", 12, 2),
    ):
        with pytest.raises(ValueError, match=r"shared by layers of one head_dim, heads and causal"):
            other.position_encoding = first.position_encoding


@pytest.mark.parametrize("spec", ["fox", "xpos:scale_base=8"])
def test_float16_ends_early(spec):
    """Sums of a decay, and products with factors, are beyond 65504."""
    torch.manual_seed(1)
    module = Attention(spec, 8, 2, dim=8).half()
    q, k, v = torch.randn(3, 1, 2, 50, 8).half()
    k, x = 25 * k, -200 * torch.ones(1, 50, 8).half()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1)
    wanted = module.double()(*(y.double() for y in (q, k, v)), x=x.double())
    got = module.half()(q, k, v, x=x)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-2)


@pytest.mark.parametrize("bias", [0.0, *(pytest.param(x, marks=pytest.mark.slow) for x in (7, -4))])
def test_long_decays_are_exact(bias):
    """Sums reach 10^5, small differences count, later gates do not; 0 is the initial gate."""
    torch.manual_seed(0)
    module, x = Attention("fox", 16, 2, kv_heads=1, dim=4), torch.randn(1, 4096, 4)
    with torch.no_grad():
        module.position_encoding.f_bias.fill_(bias)
        module.position_encoding.f_proj.normal_()
    q, k, v = (torch.randn(1, heads, 4096, 16) for heads in (2, 1, 1))
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [y.detach().to(dtype).requires_grad_() for y in (q, k, v, x)]
        out = module.to(dtype)(*leaves[:3], x=leaves[3])
        alone = module(*(y[:, :, :99] for y in leaves[:3]), x=leaves[3][:, :99])
        assert torch.equal(out[:, :, :99], alone)
        out.backward(v.expand_as(out).to(dtype))
        results.append([out, *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results, strict=True):
        assert (got - want).abs().max() <= 5e-6 * want.abs().max()


def test_positions_before_the_first_token_stand_for_padding():
    """Such as mask.cumsum(-1) - 1 gives: they reach no gradient."""
    for kind in ("llama4", "ministral3", "inkling"):
        module = Attention(f"rope+temperature:kind={kind},floor=1", 8, 2)
        q, k, v = torch.randn(3, 1, 2, 6, 8)
        mask = torch.arange(6)[None] >= 2
        positions = mask.cumsum(-1) - 1
        out = module(q.requires_grad_(), k, v, key_mask=mask, positions=positions)
        out[:, :, 2:].sum().backward()
        assert q.grad.isfinite().all()
        torch.testing.assert_close(out[:, :, 2:], module(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:]))


def test_an_input_of_integers_is_refused():
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    module = Attention("relative:extent=4,rank=2", 8, 2, dim=8)
    with pytest.raises(ValueError, match=r"floating point; got \(1, 6, 8\) of torch\.int64"):
        module(q, k, v, x=torch.ones(1, 6, 8, dtype=torch.int64))
