"""wavepe.ops.attention and its composition in torch, against the oracle: outputs and every gradient
over a grid of shapes, options and dtypes."""

import itertools
import math

import numpy as np
import oracle_attention as oracle
import pytest
from attention_cases import (
    F32,
    F64,
    FEW,
    LOW,
    SQUARE,
    attention,
    check,
    compare,
    composed,
    draw,
    grid,
    incoming,
    judge,
    ops,
    run,
    torch,
)
from attention_options import COMBINED, LARGE, OPTIONS, SHAPES, Shape
from cases import by_turns, generator, soon

each_option = pytest.mark.parametrize("option", OPTIONS)
each_dtype = pytest.mark.parametrize("dtype", [F32, F64, *LOW])


def defined(
    q, k, v, p, first, beyond, causal, window, softcap, scale, offset, key_mask, slope, bias
):
    """One head, in loops: what docs and METHODS print."""
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -math.inf)
    for i in range(len(q)):
        scores = {}
        for j in range(len(k)):
            delta = i + offset - j
            if (causal and delta < 0) or delta >= window or not key_mask[j]:
                continue
            row, number = delta - first, delta - 1
            if beyond == "edge":
                row = min(max(row, 0), len(p) - 1)
            else:
                number = min(max(number, 0), len(bias) - 1)
            relative = q[i] @ p[row] if 0 <= row < len(p) else 0.0
            score = (q[i] @ k[j] + relative) * scale - slope * abs(delta)
            score += bias[number] if 0 <= number < len(bias) else 0.0
            scores[j] = softcap * math.tanh(score / softcap)
        if scores:
            lse[i] = math.log(sum(math.exp(s) for s in scores.values()))
            out[i] = sum(math.exp(s - lse[i]) * v[j] for j, s in scores.items())
    return out, lse


@pytest.mark.parametrize("beyond", ["zero", "edge"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("offset", [-3, 0, 2])
def test_the_oracle_is_the_definition(beyond, causal, offset):
    rng = generator("definition")
    q, k, v, p, bias = (rng.normal(size=s) for s in ((5, 3), (6, 3), (6, 4), (4, 3), 2))
    key_mask = np.array([True, True, False, True, True, True])
    options = {"first": -1, "beyond": beyond, "causal": causal, "window": 5, "softcap": 2.0}
    options |= {"scale": 0.6, "offset": offset}
    want = defined(q, k, v, p, key_mask=key_mask, slope=0.25, bias=bias, **options)
    options |= {"bias": bias, "bias_first": 1, "bias_beyond": {"edge": "zero"}.get(beyond, "edge")}
    heads = (x[None, None] for x in (q, k, v))
    got = oracle.forward(*heads, p=p, key_mask=key_mask[None], slopes=np.array([0.25]), **options)
    np.testing.assert_allclose(got.out[0, 0], want[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(got.lse[0, 0], want[1], rtol=1e-12, atol=1e-14)


def test_query_heads_and_segments_of_the_oracle():
    """Head h reads key head h // (H / Hk); packed sequences are attended to one by one."""
    rng = generator("heads")
    q, k, v = (rng.normal(size=s) for s in ((1, 4, 7, 3), (1, 2, 7, 3), (1, 2, 7, 2)))
    whole = oracle.forward(q, k, v, segments=np.array([[5, 5, 5, 1, 1, 9, 9]]))
    for h in range(4):
        for piece in (slice(0, 3), slice(3, 5), slice(5, 7)):
            one = (q[:, h : h + 1, piece], k[:, h // 2, None, piece], v[:, h // 2, None, piece])
            np.testing.assert_allclose(
                whole.out[:, h : h + 1, piece], oracle.forward(*one).out, rtol=1e-12
            )


@each_option
def test_composed(option):
    """It has no blocks, so small shapes show all; and float32 takes the way of float64."""
    grid(composed, option, FEW, F64)
    for dtype in LOW:
        grid(composed, option, FEW[2:4], dtype)


@pytest.mark.parametrize(
    ("option", "dtype"),
    [*((option, dtype) for option in OPTIONS for dtype in (F32, F64)), *by_turns(OPTIONS, LOW)],
)
def test_every_option(variant, option, dtype):
    grid(attention, option, FEW + SQUARE[3:5] if dtype == F32 else FEW, dtype)


@pytest.mark.parametrize("option", COMBINED)
@each_dtype
def test_every_size(variant, option, dtype):
    grid(attention, option, (SHAPES[::2] if dtype in LOW else SHAPES) + SQUARE, dtype)


LARGE_OPTIONS = (
    *("plain", "every key", "window", "slopes", "table", "table, both sides, edge"),
    *("bias", "bias, both sides, edge", "bias, offset of rows", "bias, table"),
    *("table per head", "offset of rows, table", "segments", "dropout, table"),
    *("window, future too", "edge far above"),
    *("narrow table", "narrow table, both sides, edge", "sinks, segments, dropout"),
)
SLOW = ("mask of rows", "everything")


@pytest.mark.parametrize(
    ("option", "shape"), [*by_turns(LARGE_OPTIONS, LARGE, 2), *by_turns(SLOW, LARGE[:4], 2)]
)
def test_more_than_one_block(variant, option, shape):
    grid(attention, option, [shape])


# Backward of few long heads: chunks of queries with sums of their own, of the keys that they see.
# Chunks of 4, of 2 (and two key heads with several query heads), of 4 with rows that see nothing.
CHUNKS = [Shape(1, 1, 1, 1700, 1700, 8, 8), Shape(2, 4, 2, 900, 1000, 8, 4)]
CHUNKS += [Shape(1, 2, 1, 1600, 700, 4, 8)]
OF_CHUNKS = ["window", "table, q_rel, per head", "everything"]  # the oracle takes a second for each
MORE = ["plain", "every key", "table", "edge", "key_mask", "offset"]
MORE += ["bias", "bias of all heads", "bias, both sides, edge"]


@pytest.mark.parametrize(
    ("option", "shape"),
    soon(itertools.product(OF_CHUNKS + MORE, CHUNKS), *zip(OF_CHUNKS, CHUNKS, strict=True)),
)
def test_chunks_of_queries(option, shape):
    check(attention, generator("chunks", option), shape, OPTIONS[option])


@pytest.mark.slow
@pytest.mark.parametrize("option", ["segments", "packed training"])
@pytest.mark.parametrize("width", [1, 97, 700])
def test_segments_end_where_chunks_do(option, width):
    """Consecutive segments; some chunks see few keys."""
    rng = generator("chunks", option)
    arguments = draw(rng, CHUNKS[0], OPTIONS[option])
    arguments["segments"] = torch.arange(1, 1 + CHUNKS[0].n)[None] // width
    grads = incoming(rng, arguments)
    compare(run(attention, arguments, *grads), judge(arguments, *grads), F32, option)


def test_a_sink_is_a_key_whose_value_is_0(variant):
    """Such a key for all queries, in front of the others, with a score that a bias gives."""
    arguments = draw(generator("sink"), Shape(2, 4, 2, 30, 50, 16, 8), OPTIONS["sinks"])
    sinks = arguments.pop("sinks").double()
    arguments = {name: x.double() for name, x in arguments.items()}
    out, lse = attention(**arguments, sinks=sinks, return_lse=True)
    with_key = {n: torch.nn.functional.pad(arguments[n], (0, 0, 1, 0)) for n in "kv"}
    first = [i + 21 for i in range(30)]  # the distance of query i to the new key
    bias = torch.zeros(4, 51, dtype=torch.float64)
    bias[:, first] = sinks[:, None]
    others = []
    for i, delta in enumerate(first):  # a query at a time: for others the number is another key's
        only = torch.where(torch.arange(51) == delta, bias, 0.0)
        q = arguments["q"][:, :, i : i + 1]
        keys = {n: x[:, :, : delta + 1] for n, x in with_key.items()}
        others.append(attention(q, **keys, bias=only, return_lse=True))
    torch.testing.assert_close(out, torch.cat([o for o, _ in others], 2))
    torch.testing.assert_close(lse, torch.cat([x for _, x in others], 2))


def test_parts_with_a_sink_are_merged(variant):
    """One part of the keys counts the sink."""
    arguments = draw(generator("sink"), Shape(1, 4, 2, 30, 50, 16, 8), {"causal": False})
    q, k, v, sinks = *(arguments[n] for n in "qkv"), torch.randn(4)
    parts = [
        attention(
            q, k[:, :, i : i + 25], v[:, :, i : i + 25], causal=False, return_lse=True, **last
        )
        for i, last in ((0, {}), (25, {"sinks": sinks}))
    ]
    want = attention(q, k, v, causal=False, sinks=sinks, return_lse=True)
    for found, exact in zip(ops.merge_attention(*zip(*parts, strict=True)), want, strict=True):
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
def test_sinks_of_any_dtype(dtype):
    arguments = draw(generator("sink"), Shape(1, 4, 2, 9, 9, 8, 8), {})
    sinks = torch.tensor([1.0, -0.5, -math.inf, 2.0], dtype=dtype, requires_grad=True)
    wide = sinks.detach().float().requires_grad_()
    out, want = (attention(**arguments, sinks=x) for x in (sinks, wide))
    assert torch.equal(out, want)
    for x in (out, want):
        x.square().sum().backward()
    assert sinks.grad.dtype == dtype
    assert sinks.grad[2] == 0
    assert torch.equal(sinks.grad, wide.grad.to(dtype))


def test_zones_of_a_narrow_table(variant):
    """A constant table of another size than the head, with its low-rank form."""
    rng = generator("narrow zones")
    arguments = draw(rng, Shape(1, 2, 1, 300, 300, 48, 8), {})
    delta = np.arange(300)[:, None]
    p = np.exp(-(((delta - np.arange(24)) / 60) ** 2))
    table = ops.relative_table(p)
    assert table.tensors(F32, "cpu")[2]
    arguments["q_rel"] = torch.from_numpy(rng.normal(size=(1, 2, 300, 24))).float()
    out = attention(**arguments, p=table)
    want = attention(**arguments, p=torch.from_numpy(p).float())
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_scaled_dot_product_attention_is_a_case(variant):
    rng = generator("sdpa")
    for causal, heads in ((True, 3), (False, 3), (False, 6)):
        q, k, v = (draw(rng, Shape(2, heads, 3, 40, 40, 24, 24), {})[name] for name in "qkv")
        want = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=heads != 3
        )
        got = attention(q, k, v, causal=causal)
        assert isinstance(got, torch.Tensor)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
