"""wavepe.attention of NumPy arrays against the oracle: values, in every variant.

What inputs may be is in test_attention_inputs.py, what may not change a bit in
test_attention_bits.py, torch's operator in test_attention_torch.py.
"""

import math

import numpy as np
import pytest
import wavepe
from attention_arrays import DECODING, OPTIONS, call, check, compare, draw, problem
from attention_shapes import LARGE, SHAPES, Shape
from cases import assert_same_bits, generator

nan, inf = math.nan, math.inf

# ---- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_size(variant, option, dtype):
    for shape in (*SHAPES, *DECODING):
        given, exact = problem(option, shape, dtype)
        compare(call(given), exact, dtype, f"{option} {shape}")


@pytest.mark.parametrize("option", OPTIONS)
def test_many_blocks(variant, option):
    for shape in LARGE:
        given, exact = problem(option, shape, np.float32)
        compare(call(given), exact, np.float32, f"{option} {shape}")


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16"])
def test_low_precision(variant, dtype):
    if dtype == "bfloat16":
        dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    for option in ("plain", "table", "everything", "table, both sides, edge"):
        for shape in (*SHAPES, *DECODING, LARGE[0]):
            given, exact = problem(option, shape, dtype)
            compare(call(given), exact, dtype, f"{option} {shape}")


def test_written_out(variant):
    """Two queries, three keys: the second query stands on the last key."""
    q = np.array([[1.0], [2.0]])
    k, v = np.array([[1.0], [0.0], [-1.0]]), np.array([[1.0, 0], [0, 1], [4, 4]])
    p = np.array([[0.5], [0.25]])  # of delta 0 and 1
    out, lse = wavepe.attention(q, k, v, p=p, slopes=0.1, scale=3.0, return_lse=True)
    e = math.exp
    first = e(3 * (1 + 0.25) - 0.1), e(3 * 0.5)  # deltas 1, 0
    second = e(3 * 2 - 0.2), e(3 * 2 * 0.25 - 0.1), e(3 * 2 * (-1 + 0.5))  # deltas 2, 1, 0
    want = [
        [first[0] / sum(first), first[1] / sum(first)],
        [(second[0] + 4 * second[2]) / sum(second), (second[1] + 4 * second[2]) / sum(second)],
    ]
    np.testing.assert_allclose(out, want, rtol=1e-14)
    np.testing.assert_allclose(lse, np.log([sum(first), sum(second)]), rtol=1e-14)


def test_table_of_wavelets(variant):
    """The encoding itself; far from the diagonal it is no encoding."""
    scale, shift = wavepe.wavelet_grid(24, 3)
    p = wavepe.wavelet_table(400, scale, shift)
    given = draw(generator("wavelets"), Shape(2, 2, 1, 200, 300, 24, 24))
    got = check(given | {"p": p})
    assert_same_bits(call(given | {"p": p[:300]})[0], got[0])
    plain = wavepe.attention(**given)
    assert np.abs(got[0] - plain).max() > 0.1
    far = 6 * 4 + 7
    hidden = wavepe.attention(**given, p=p[far:], first=far)
    assert np.abs(hidden - plain).max() < 1e-5


def test_slopes_of_far_positions(variant):
    check(draw(generator("far"), Shape(1, 2, 1, 3, 5000, 8, 8), "slopes"))


def test_large_logits(variant):
    """Scores so far apart that one key has all the weight: its value, no overflow."""
    for n, size in ((7, 1e4), (300, 1e15)):
        given = draw(generator("logits"), Shape(1, 2, 1, n, n, 16, 8))
        k = np.zeros((n, 16), np.float32)
        k[:, 0] = np.linspace(-size, size, n)
        given |= {"q": np.full((2, n, 16), 4, np.float32), "k": k, "causal": False}
        out, lse = call(given)
        last = np.broadcast_to(given["v"][:, :, -1:], out.shape)
        np.testing.assert_allclose(out, last, rtol=1e-6)
        np.testing.assert_allclose(lse, size, rtol=1e-6)


def test_ends_of_float16(variant):
    for n in (1, 5, 130):
        q, v = np.full((n, 64), 6e4, np.float16), np.full((n, 8), 65504, np.float16)
        v[:, 4:] = 2.0**-24  # the smallest subnormal
        np.testing.assert_allclose(wavepe.attention(q, q, v), v, rtol=2**-8)


@pytest.mark.parametrize("number", [2**40, 2**60, 2**63 - 1, -(2**63), 2**64, 2**70, -(2**70)])
def test_huge_numbers(variant, number):
    """delta - first must not wrap around into the table, delta - window not into the keys."""
    for shape in (Shape(1, 2, 2, 3, 5, 4, 4), Shape(1, 1, 1, 1, 40, 8, 8)):
        for causal in (True, False):
            given = draw(generator("huge"), shape) | {"causal": causal}
            p = generator("huge table").normal(size=(6, shape.d)).astype(np.float32)
            plain = wavepe.attention(**given)
            assert_same_bits(wavepe.attention(**given, p=p, first=number), plain)
            got = wavepe.attention(**given, p=p, first=number, beyond="edge")
            near = wavepe.attention(
                **given, p=p, first=(10**6 if number > 0 else -(10**6)), beyond="edge"
            )
            assert_same_bits(got, near)
            bias = p[:, 0]
            assert_same_bits(wavepe.attention(**given, bias=bias, bias_first=number), plain)
            got, near = (
                wavepe.attention(**given, bias=bias, bias_first=first, bias_beyond="edge")
                for first in (number, 10**6 if number > 0 else -(10**6))
            )
            assert_same_bits(got, near)
            if number > 0:
                assert_same_bits(wavepe.attention(**given, window=number), plain)


# ---- what is hidden, and NaN -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_row_that_sees_nothing(variant, dtype):
    """0 and lse -inf, also where k and v are NaN."""
    shape = Shape(2, 2, 1, 12, 5, 8, 8)  # seven queries stand before the first key
    for option in ("plain", "edge far above", "slopes", "table per head"):
        given = draw(generator("blind"), shape, option, dtype)
        out, lse = check(given)
        assert not out[:, :, :7].any()
        assert (lse[:, :, :7] == -inf).all()
        assert np.isfinite(lse[:, :, 7:]).all()
        given["k"], given["v"] = given["k"] * dtype(nan), given["v"] * dtype(inf)
        for hidden in (
            {"window": 0},
            {"q": given["q"][:, :, :3], "k": given["k"][:, :, :0], "v": given["v"][:, :, :0]},
        ):
            out, lse = call(given | hidden)
            assert not out.any()
            assert (lse == -inf).all()
        one = given | {"q": given["q"][:, :, :1], "window": 0}
        assert (call(one)[1] == -inf).all()


def test_hidden_nan_reaches_nothing(variant):
    for shape in (Shape(1, 2, 1, 40, 40, 16, 8), Shape(1, 2, 1, 300, 500, 8, 8)):
        given = draw(generator("hidden"), shape, "table")
        clean = wavepe.attention(**given, window=9)
        for name in "kv":
            for value in (nan, inf):
                spoilt = given[name].copy()
                spoilt[:, :, shape.n // 2 + 1] = value
                got = wavepe.attention(**given | {name: spoilt}, window=9)
                row = np.arange(shape.m) + shape.n - shape.m
                sees = (row >= shape.n // 2 + 1) & (row < shape.n // 2 + 1 + 9)
                assert_same_bits(got[:, :, ~sees], clean[:, :, ~sees], f"{name} {value}")
                if not (name == "k" and value == inf):
                    assert not np.isfinite(got[:, :, sees]).any()


def test_nan_stays_in_its_row(variant):
    for m, row in ((9, 4), (150, 77), (1, 0)):
        given = draw(generator("nan"), Shape(1, 2, 1, m, m + 5, 16, 8), "edge from 2, per head")
        clean = wavepe.attention(**given)
        given["q"][0, 1, row, 2] = nan
        got = wavepe.attention(**given)
        assert np.isnan(got[0, 1, row]).all()
        got[0, 1, row] = clean[0, 1, row]
        assert_same_bits(got, clean)


def test_nan_of_a_table_row_reaches_its_deltas(variant):
    for n in (12, 150):
        given = draw(generator("table row"), Shape(1, 2, 1, n, n, 8, 8), "table")
        clean = wavepe.attention(**given)
        given["p"][5] = nan
        got = wavepe.attention(**given)
        assert_same_bits(got[:, :, :5], clean[:, :, :5])
        assert np.isnan(got[:, :, 5:]).all()


def test_nan_of_a_bias_reaches_its_deltas(variant):
    for n in (12, 150):
        given = draw(generator("bias number"), Shape(1, 2, 1, n, n, 8, 8), "bias")
        clean = wavepe.attention(**given)
        given["bias"][0, 5] = nan
        got = wavepe.attention(**given)
        assert_same_bits(got[:, 1], clean[:, 1])
        assert_same_bits(got[:, :, :5], clean[:, :, :5])
        assert np.isnan(got[:, 0, 5:]).all()
