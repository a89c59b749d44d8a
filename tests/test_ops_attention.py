"""wavepe.ops.attention and its composition in torch, against the oracle: outputs and every gradient
over a grid of shapes, options and dtypes."""

import math

import numpy as np
import oracle_attention as oracle
import pytest
from attention_cases import (
    F64,
    FEW,
    OPTIONS,
    SQUARE,
    Shape,
    attention,
    composed,
    draw,
    grid,
    incoming,
    judge,
    run,
    torch,
)
from attention_options import COMBINED
from attention_shapes import LARGE, SHAPES
from cases import generator

each_option = pytest.mark.parametrize("option", OPTIONS)


# ---- the judges ---------------------------------------------------------------------------------


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
    grid(composed, option, FEW + SQUARE[:3])
    grid(composed, option, FEW, F64)


# ---- the operator -------------------------------------------------------------------------------


@pytest.mark.parametrize("option", COMBINED)
def test_every_size(variant, option):
    grid(attention, option, SHAPES + SQUARE)


@each_option
def test_every_option(variant, option):
    grid(attention, option, FEW + SQUARE[3:5])


LARGE_OPTIONS = (
    *("plain", "every key", "window", "slopes", "table", "table, both sides, edge"),
    *("bias", "bias, both sides, edge", "bias, offset of rows", "bias, table"),
    *("table per head", "offset of rows, table", "segments", "mask of rows", "dropout, table"),
    *("everything", "window, future too", "edge far above"),
)


@pytest.mark.parametrize("option", LARGE_OPTIONS)
def test_more_than_one_block(variant, option):
    grid(attention, option, LARGE[:4] if option in ("everything", "mask of rows") else LARGE)


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


def test_an_int_for_offset_is_a_tensor_for_every_row(variant):
    rng = generator("offsets")
    arguments = draw(rng, Shape(3, 2, 1, 9, 12, 8, 8), OPTIONS["edge"])
    grads = incoming(rng, arguments)
    for offset in (-4, 0, 3, 7):
        given = (offset, torch.tensor(offset), torch.tensor([offset]), torch.full((3,), offset))
        results = [run(attention, arguments | {"offset": o}, *grads) for o in given]
        for other in results[1:]:
            assert all(torch.equal(results[0][name], other[name]) for name in other)
    for kind in (torch.uint8, torch.int16, torch.int32, torch.uint64):
        got = run(attention, arguments | {"offset": torch.tensor([0, 3, 1]).to(kind)}, *grads)
        want = run(attention, arguments | {"offset": torch.tensor([0, 3, 1])}, *grads)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_segments_of_any_integer_type(variant):
    rng = generator("segments")
    arguments = draw(rng, Shape(2, 2, 1, 12, 12, 8, 8), {})
    ids = torch.tensor([[3, 3, 3, 0, 0, 200, 200, 200, 200, 7, 7, 7], [1] * 12])
    exact = judge(arguments | {"segments": ids}).values
    want = attention(**arguments, segments=ids)
    np.testing.assert_allclose(want.numpy(), exact["out"], rtol=1e-4, atol=1e-5)
    for kind in (torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64):
        assert torch.equal(attention(**arguments, segments=ids.to(kind)), want)
    far = torch.tensor([2**40, 0])[ids % 2]  # equal in their low 32 bits
    assert torch.equal(
        attention(**arguments, segments=far), attention(**arguments, segments=ids % 2)
    )
