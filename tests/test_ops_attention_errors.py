"""Errors of ops.attention: a RuntimeError names the wrong argument and what is needed.

It is the same on every device, and for fake tensors.
"""

import itertools
import math
import re

import numpy as np
import pytest
from attention_cases import OPTIONS, Shape, attention, draw, ops, torch
from cases import every, generator

B, H, HK, M, N, D, DV = SHAPE = Shape(2, 4, 2, 5, 7, 8, 6)
ones = torch.ones
Q, K, V = ones(B, H, M, D), ones(B, HK, N, D), ones(B, HK, N, DV)
P = ones(9, D)
F8 = torch.float8_e4m3fn
SQUARE = {"q": ones(B, H, N, D), "k": K, "v": V}


def both(a, b):
    """Return a pattern of a message with both texts, in either order."""
    return rf"(?s){a}.*{b}|{b}.*{a}"


SHAPES = [  # part of the message, arguments besides q, k, v
    (both(8, 9), {"k": ones(B, HK, N, 9)}),
    (both(7, 6), {"v": ones(B, HK, 6, DV)}),
    (both(4, 3), {"k": ones(B, 3, N, D), "v": ones(B, 3, N, DV)}),
    (both("2, 2", "2, 4"), {"v": ones(B, 4, N, DV)}),
    (both("2, 4", "3, 2"), {"k": ones(3, HK, N, D), "v": ones(3, HK, N, DV)}),
    (both("2, 4", "1, 2"), {"k": ones(1, HK, N, D), "v": ones(1, HK, N, DV)}),
    (
        r"(?s)(Hk \| H needed|multiple of the 0 heads).*2, 0, 7, 8",
        {"k": ones(B, 0, N, D), "v": ones(B, 0, N, DV)},
    ),
    (r"q.*5, 8", {"q": ones(M, D)}),
    (r"k.*2, 7, 8", {"k": ones(HK, N, D)}),
    (r"v.*6", {"v": ones(1, B, HK, N, DV)}),
    (r"q", {"q": torch.tensor(1.0)}),
    (both(8, 3), {"p": ones(9, 3)}),
    (r"p of size 3 with q of head size 8 needs q_rel of size 3", {"p": ones(9, 3)}),
    (r"p of size 9 with q of head size 8 needs q_rel of size 9", {"p": ones(H, 9, 9)}),
    (both(4, 3), {"p": ones(3, 9, D)}),
    (both(4, 2), {"p": ones(2, 9, D)}),
    (r"p.*9", {"p": ones(9)}),
    (r"p", {"p": ones(1, H, 9, D)}),
    (r"edge", {"p": ones(0, D), "beyond": "edge"}),
    (both(5, 6), {"p": P, "q_rel": ones(B, H, 6, D)}),
    (r"q_rel", {"p": P, "q_rel": ones(B, HK, M, D)}),
    (r"q_rel.*p", {"q_rel": Q}),
    (r"q_rel (must be|and p must have the same size).*3.*8", {"p": ones(9, 3), "q_rel": Q}),
    (r"sinks must be .*4.*3", {"sinks": ones(3)}),
    (r"sinks must be .*4.*1, 4", {"sinks": ones(1, H)}),
    (both(4, 3), {"bias": ones(3, 9)}),
    (r"bias", {"bias": ones(1, H, 9)}),
    (r"bias", {"bias": torch.tensor(0.5)}),
    (r"bias_beyond='edge' needs a bias", {"bias": ones(0), "bias_beyond": "edge"}),
    (both(4, 3), {"slopes": ones(3)}),
    (r"slopes", {"slopes": ones(1, H)}),
    (r"slopes", {"slopes": torch.tensor(0.5)}),
    (both(2, 3), {"offset": torch.tensor([1, 2, 3])}),
    (r"offset", {"offset": torch.tensor([[1], [2]])}),
    (both(7, 5), {"key_mask": ones(B, M, dtype=torch.bool)}),
    (r"key_mask", {"key_mask": ones(N, dtype=torch.bool)}),
    (r"key_mask", {"key_mask": ones(3, N, dtype=torch.bool)}),
    (both(7, 6), {**SQUARE, "segments": ones(B, 6, dtype=torch.int64)}),
    (r"segments", {**SQUARE, "segments": ones(N, dtype=torch.int64)}),
    (both(5, 7), {"segments": ones(B, N, dtype=torch.int64)}),  # m is not n
    (both(7, 5), {"mask": ones(B, H, N, M, dtype=torch.bool)}),
    (both("3", "2"), {"mask": ones(3, H, M, N, dtype=torch.bool)}),
    (r"mask", {"mask": ones(B, HK, M, N, dtype=torch.bool)}),
    (r"5, 7\).*mask\[None, None\]", {"mask": ones(M, N, dtype=torch.bool)}),
    (r"mask\[:, None\] of \(B, m, n\)", {"mask": ones(B, M, N, dtype=torch.bool)}),
    (r"mask must .*keys alone is key_mask \(2, 7\)", {"mask": ones(B, 1, 1, N).bool()}),
]
DTYPES = [
    (r"[Ll]ong|int64", {"q": Q.long(), "k": K.long(), "v": V.long()}),
    (r"[Cc]omplex", {n: x.to(torch.complex64) for n, x in zip("qkv", (Q, K, V), strict=True)}),
    (r"got float8_e4m3fn", {n: x.to(F8) for n, x in zip("qkv", (Q, K, V), strict=True)}),
    *((rf"{n} must .*float8_e4m3fn", {n: ones(H).to(F8)}) for n in ("slopes", "bias", "sinks")),
    (r"[Dd]ouble|float64", {"k": K.double()}),
    (r"[Bb][Ff]loat16", {"v": V.bfloat16()}),
    (r"[Hh]alf|float16", {"p": P.half()}),
    (r"[Dd]ouble|float64", {"p": P, "q_rel": Q.double()}),
    (r"bias must be .*float32.*float64", {"bias": ones(9).double()}),
    (r"bias must be .*float32.*float16", {"bias": ones(9).half()}),
    (r"sinks must be .*float32.*(L|l|int64)", {"sinks": ones(H, dtype=torch.int64)}),
    (r"slopes", {"slopes": ones(H, dtype=torch.int64)}),
    (r"offset", {"offset": torch.tensor(1.0)}),
    (r"offset", {"offset": torch.tensor([True, False])}),
    (r"key_mask must be bool.* pass key_mask == 0 for .*float32", {"key_mask": ones(B, N)}),
    (r"pass key_mask != 0; .*uint8", {"key_mask": ones(B, N, dtype=torch.uint8)}),
    (r"segments", {**SQUARE, "segments": ones(B, N)}),
    (r"segments", {**SQUARE, "segments": ones(B, N, dtype=torch.bool)}),
    (r"mask.*True for visible.*mask == 0.*float32", {"mask": ones(B, H, M, N)}),
    (r"mask.*True for visible.*mask != 0.*int64", {"mask": ones(B, H, M, N, dtype=torch.int64)}),
]
VALUES = [
    (r"beyond.*'?wrap'?.*edge", {"p": P, "beyond": "wrap"}),
    (r"bias_beyond.*'?wrap'?.*edge", {"bias": ones(9), "bias_beyond": "wrap"}),
    (r"window.*-1", {"window": -1}),
    (r"softcap.*nan", {"softcap": math.nan}),
    (r"softcap.*inf", {"softcap": math.inf}),
    (r"dropout_p.*1\.5", {"dropout_p": 1.5}),
    (r"dropout_p.*-0\.1", {"dropout_p": -0.1}),
    (r"dropout_p.*nan", {"dropout_p": math.nan}),
    (r"scale must be finite, got nan", {"scale": math.nan}),
    (r"scale must be finite, got -inf", {"scale": -math.inf}),
    (r"slopes.*differentiable|slopes.*detach", {"slopes": ones(H, requires_grad=True)}),
]


@pytest.mark.parametrize("way", ["cpu", "meta", "torch.func"])
@pytest.mark.parametrize(("match", "options"), SHAPES + DTYPES + VALUES)
def test_refused(match, options, way):
    """torch.func runs the composition: the same arguments are refused."""
    args = {"q": Q, "k": K, "v": V} | options
    if way == "torch.func":
        q = args.pop("q")
        if q.is_floating_point() and "differentiable" not in match:
            with pytest.raises(RuntimeError, match=match):
                torch.func.vjp(lambda q: attention(q, **args), q)
        return
    args = {
        name: x.detach().to(way).requires_grad_(x.requires_grad) if torch.is_tensor(x) else x
        for name, x in args.items()
    }
    with pytest.raises(RuntimeError, match=match):
        attention(**args)
    for name in "qkv":  # where autograd records, too
        if args[name].is_floating_point():
            args[name] = args[name].detach().requires_grad_()
    with pytest.raises(RuntimeError, match=match):
        attention(**args)


NAMES = ("k", "v", "p", "q_rel", "slopes", "offset", "key_mask", "mask", "bias", "sinks")


@pytest.mark.parametrize("name", NAMES)
def test_devices_must_agree(name):
    args = draw(generator("device"), SHAPE, OPTIONS["everything"])
    with pytest.raises(RuntimeError, match="meta"):
        attention(**args | {name: args[name].to("meta")})


OF_NUMBERS = ("first", "bias_first", "offset", "window", "softcap", "scale", "dropout_p")
NO_TENSORS = [
    *({name: None} for name in "qkv"),
    *({name: "x"} for name in ("q", "k", "v", "p", "q_rel", "slopes", "key_mask", "segments")),
    *({name: [1.0]} for name in ("q", "p", "mask", "bias", "sinks")),
]


@pytest.mark.parametrize("options", NO_TENSORS)
def test_what_is_no_tensor(options):
    (name,) = options
    with pytest.raises(RuntimeError, match=f"wavepe: {name} must be a torch.Tensor"):
        attention(**{"q": Q, "k": K, "v": V, "p": P} | options)
    with pytest.raises(RuntimeError, match=r"got tuple; pass Table\(\*p\)"):
        attention(Q, K, V, p=(P, 0, "zero"))


SCALAR = torch.tensor(0.5)
NONSENSE = [
    *((rf"{name} must be an? (integer|number), got 'x'", {name: "x"}) for name in OF_NUMBERS),
    *((rf"{name} must be an integer, got True", {name: True}) for name in ("first", "offset")),
    *((rf"{name} must be an integer, got 1.5", {name: 1.5}) for name in ("first", "offset")),
    (r"offset must be an integer, got \[1.0\]", {"offset": [1.0]}),
    (r"unknown beyond 3; known: zero, edge", {"beyond": 3}),
    (r"unknown beyond None", {"beyond": None}),
    (r"unknown bias_beyond 'both'; known: zero, edge", {"bias_beyond": "both"}),
    (r"bias_first must be an integer, got 1.5", {"bias_first": 1.5}),
    (r"window must be an integer, got 2.5", {"window": 2.5}),
    (r"scale must be finite", {"scale": 10**400}),
    (r"dropout_p must be a number, got None", {"dropout_p": None}),
    (r"dropout_p must be a number, got True", {"dropout_p": True}),
    (r"causal must be True or False, got 'no'", {"causal": "no"}),
    (r"causal must be True or False, got None", {"causal": None}),
    (r"causal must be True or False, got 2", {"causal": 2}),
    (r"scale .* a plain number, got a tensor; .* multiply q", {"scale": SCALAR}),
    (r"softcap must be a plain number, got a tensor", {"softcap": SCALAR}),
]


@pytest.mark.parametrize(("match", "options"), NONSENSE)
def test_what_is_no_number(match, options):
    with pytest.raises(RuntimeError, match=f"wavepe: {match}"):
        attention(**{"q": Q, "k": K, "v": V, "p": P} | options)


def test_numbers_of_numpy():
    plain = {"first": 1, "window": 4, "softcap": 2.0, "scale": 0.5, "offset": 3, "causal": True}
    kinds = (np.int64, np.int16, np.float32, np.float64, np.int32, np.bool_)
    numpys = {name: kind(plain[name]) for name, kind in zip(plain, kinds, strict=True)}
    want = attention(Q, K, V, p=P, **plain)
    assert torch.equal(attention(Q, K, V, p=P, **numpys), want)
    assert torch.equal(attention(Q, K, V, p=P, **plain | {"causal": 1}), want)
    assert not attention(Q, K, V, dropout_p=1).any()


def test_compiled_calls_refuse_the_same():
    torch._dynamo.reset()
    for options in ({"causal": None}, {"scale": SCALAR}, {"softcap": SCALAR}, {"offset": True}):
        (name,) = options
        with pytest.raises(RuntimeError, match=rf"wavepe: {name} must be"):
            torch.compile(attention, backend="eager")(Q, K, V, **options)
    torch._dynamo.reset()


def test_arguments_are_keywords():
    with pytest.raises(TypeError, match="positional arguments"):
        attention(Q, K, V, P)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'"):
        attention(Q, K, V, dropout=0.1)


def test_relative_table_brings_its_own_range():
    table = ops.relative_table(P, first=-2, beyond="edge")
    for options in ({"first": 1}, {"beyond": "edge"}, {"first": -2}):
        with pytest.raises(RuntimeError, match=r"first|beyond"):
            attention(Q, K, V, p=table, **options)
    with pytest.raises(RuntimeError, match=both(8, 3)):
        attention(Q, K, V, p=ops.relative_table(ones(9, 3)))
    with pytest.raises(RuntimeError, match=both(4, 3)):
        attention(Q, K, V, p=ops.relative_table(ones(3, 9, D)))


# ---- sizes that do not fit ----------------------------------------------------------------------
@pytest.mark.parametrize("first", [2**62, -(2**62), 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("offset", [None, 2**53, -(2**53)])
@pytest.mark.parametrize("beyond", ["zero", "edge"])
def test_far_numbers(variant, first, offset, beyond):
    """No sum may wrap: no delta reaches the table."""
    p = torch.arange(3.0)[:, None].expand(3, D)
    args = {"q": Q, "k": K, "v": V, "p": p, "first": first, "beyond": beyond}
    out, lse = attention(**args, offset=offset, causal=False, return_lse=True)
    row = 0 if beyond == "zero" else float(p[0 if first > 0 else 2, 0])
    want = D * (1 + row) * D**-0.5 + math.log(N)
    torch.testing.assert_close(lse, torch.full_like(lse, want))
    torch.testing.assert_close(out, torch.ones_like(out))
    bias = torch.arange(3.0).requires_grad_()
    args = {"q": Q, "k": K, "v": V, "bias": bias, "bias_first": first, "bias_beyond": beyond}
    _, lse = attention(**args, offset=offset, causal=False, return_lse=True)
    number = 0 if first > 0 else 2
    want = D**0.5 + (0 if beyond == "zero" else number) + math.log(N)
    torch.testing.assert_close(lse, torch.full_like(lse, want))
    lse.sum().backward()
    want = torch.zeros(3)
    if beyond == "edge":
        want[number] = lse.numel()
    torch.testing.assert_close(bias.grad, want)


@pytest.mark.parametrize("offset", [2**53 + 1, -(2**53) - 1, 2**62, 2**63 - 1, -(2**63)])
def test_offsets_of_more_bits_than_a_float64_has(offset):
    for given in (offset, torch.tensor([offset, 0])):
        with pytest.raises(RuntimeError, match=r"offset must lie within \+-2\^53, got"):
            attention(Q, K, V, p=P, offset=given)


@pytest.mark.parametrize("window", [2**62, 2**63 - 1])
def test_a_window_beyond_everything(variant, window):
    want = attention(Q, K, V)
    assert torch.equal(attention(Q, K, V, window=window), want)


@pytest.mark.parametrize("sizes", [(2**31, 2**31, 2, 2), (1, 2**40, 2**40, 1), (2**62, 1, 1, 1)])
def test_sizes_larger_than_memory_can_be(sizes):
    """Expanded tensors have such sizes; the bytes to allocate must not wrap around."""
    x = torch.zeros(1)
    words = "q, k or v is too large|out of memory: a tensor of shape|multiplication overflow"
    with pytest.raises(RuntimeError, match=words):
        attention(x.expand(sizes), x.expand(sizes), x.expand(sizes))


@pytest.mark.parametrize("beyond", ["zero", "edge"])
def test_table_larger_than_memory_can_be(beyond):
    """Only rows that some delta reads matter."""
    p = torch.ones(1).expand(2**59, D)
    got = attention(Q, K, V, p=p, beyond=beyond)
    assert torch.equal(got, attention(Q, K, V, p=p[:N], beyond=beyond))
    bias = torch.ones(1).expand(2**59)
    got = attention(Q, K, V, bias=bias, bias_beyond=beyond)
    assert torch.equal(got, attention(Q, K, V, bias=bias[:N], bias_beyond=beyond))


# ---- softcap and scale, with the same messages on every way -------------------------------------

LIMITS = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 1e30, torch.float64: 1e300}
RAW = torch.ops.wavepe.attention_forward


def of_ones(dtype, device="cpu"):
    return [ones(1, 2, 3, 4, dtype=dtype, device=device) for _ in range(3)]


def functional(dtype, **options):
    q, k, v = of_ones(dtype)
    torch.func.vjp(lambda q: attention(q, k, v, **options), q)


def compiled(dtype, **options):
    torch._dynamo.reset()
    torch.compile(lambda *x: attention(*x, **options), backend="eager")(*of_ones(dtype))
    torch._dynamo.reset()


def recorded(dtype, **options):
    attention(*(x.requires_grad_() for x in of_ones(dtype)), **options)


WAYS = {
    "kernel": lambda dtype, **options: attention(*of_ones(dtype), **options),
    "operator": lambda dtype, **options: RAW(*of_ones(dtype), **options),
    "meta": lambda dtype, **options: attention(*of_ones(dtype, "meta"), **options),
    "operator on meta": lambda dtype, **options: RAW(*of_ones(dtype, "meta"), **options),
    "autograd": recorded,
    "torch.func": functional,
    "compile": compiled,
}


@pytest.mark.parametrize(
    ("way", "dtype"),
    [*itertools.product([*WAYS][:-1], LIMITS), *every(4, [("compile", x) for x in LIMITS])],
    ids=str,
)
def test_softcap(way, dtype):
    most = LIMITS[dtype]
    wrong = [most * 1.001, math.nextafter(1 / most, 0), 0.0, -1.0]
    for softcap in wrong[:1] if way == "compile" else wrong:
        message = f"wavepe: softcap must lie in {1 / most:g}..{most:g}, got {softcap:g}"
        with pytest.raises(RuntimeError, match=re.escape(message)):
            WAYS[way](dtype, softcap=softcap)
    for softcap in (most, 1 / most):
        WAYS[way](dtype, softcap=softcap)


@pytest.mark.filterwarnings("ignore")  # of a prototype
def test_nested_tensors():
    from wavepe import nn

    x = torch.randn(2, 2, 4, 8)
    nested = torch.nested.nested_tensor(list(x))
    with pytest.raises(RuntimeError, match="q must be dense, got a nested tensor"):
        nn.Attention("alibi", 8, 2)(nested, x, x)
    with pytest.raises(RuntimeError, match="'NestedTensorCPU' backend"):
        ops.attention(x, nested, x)
    jagged = torch.nested.nested_tensor(list(x), layout=torch.jagged)
    with pytest.raises(RuntimeError, match="k must be dense, got a nested tensor: pad it"):
        ops.attention(x, jagged, x)
