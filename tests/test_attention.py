"""wavepe.attention of NumPy arrays against the oracle: values, in every variant.

What inputs may be is in test_attention_inputs.py, what may not change a bit in
test_attention_bits.py, torch's operator in test_attention_torch.py.
"""

import functools
import math

import numpy as np
import oracle_attention as oracle
import pytest
import wavepe
from attention_shapes import BOUNDS, LARGE, SHAPES, Shape, rounding
from cases import assert_same_bits, assert_within, generator, ulp, unit

nan, inf = math.nan, math.inf

DECODING = [Shape(2, 4, 2, 1, n, d, dv) for n, d, dv in ((1, 1, 1), (33, 17, 9), (500, 64, 65))]


def table(rng, s, w=None, *, heads=1, **rest):
    return {"p": rng.normal(size=(heads, max(1, s.n // 2) if w is None else w, s.d)), **rest}


def both_sides(rng, s, **rest):
    """A table of every delta of a model that is not causal, without its outermost ones."""
    w = max(1, s.m + s.n - 3)
    return table(rng, s, w, first=s.n - s.m - (w // 2), causal=False, **rest)


def slopes(s, **rest):
    return {"slopes": wavepe.alibi_slopes(max(s.heads, 1))[: s.heads], **rest}


OPTIONS = {
    "plain": lambda rng, s: {},
    "every key": lambda rng, s: {"causal": False},
    "window": lambda rng, s: {"window": max(1, s.n // 3)},
    "window of nothing": lambda rng, s: {"window": 0},
    "window, future too": lambda rng, s: {"window": s.n // 4, "causal": False},
    "scale": lambda rng, s: {"scale": -0.7},
    "slopes": lambda rng, s: slopes(s),
    "slopes, both sides": lambda rng, s: slopes(s, causal=False),
    "table": lambda rng, s: table(rng, s),
    "table per head": lambda rng, s: table(rng, s, heads=s.heads),
    "table from 2": lambda rng, s: table(rng, s, first=2),
    "table from -3": lambda rng, s: table(rng, s, first=-3),
    "table longer": lambda rng, s: table(rng, s, 2 * (s.m + s.n)),
    "table in a window": lambda rng, s: table(rng, s, s.n, window=s.n // 3 + 1),
    "table of one row": lambda rng, s: table(rng, s, 1, beyond="edge"),
    "table, both sides": lambda rng, s: both_sides(rng, s),
    "table, both sides, edge": lambda rng, s: both_sides(rng, s, beyond="edge", heads=s.heads),
    "edge from 2, per head": lambda rng, s: table(rng, s, first=2, beyond="edge", heads=s.heads),
    "table out of reach": lambda rng, s: table(rng, s, first=10**6),
    "edge far above": lambda rng, s: table(rng, s, first=10**6, beyond="edge"),
    "edge far below": lambda rng, s: table(rng, s, first=-(10**6), beyond="edge"),
    "shaw": lambda rng, s: table(rng, s, 9, first=-4, beyond="edge", causal=False),
    "everything": lambda rng, s: (
        slopes(s, window=s.n // 2 + 2, scale=0.4)
        | table(rng, s, s.n // 2 + 1, heads=s.heads, first=-2, beyond="edge")
    ),
}


def draw(rng, shape, option="plain", dtype=np.float32):
    """Arguments by name."""
    s = Shape(*shape)
    q = rng.normal(size=(s.batch, s.heads, s.m, s.d))
    k = rng.normal(size=(s.batch, s.kv_heads, s.n, s.d))
    v = rng.normal(size=(s.batch, s.kv_heads, s.n, s.dv))
    given = {"q": q, "k": k, "v": v} | OPTIONS[option](rng, s)
    return given | {name: given[name].astype(dtype) for name in "qkvp" if name in given}


def judge(q, k, v, *, p=None, slopes=None, **options):
    """(out, lse) and the sizes of their terms; leading axes broadcast, the last is the heads."""

    def whole(x, lead):
        return None if x is None else np.broadcast_to(x, (*lead, *x.shape[-2:])).astype(float)

    slopes = None if slopes is None else np.asarray(slopes)[..., None, None]
    of_q = np.broadcast_shapes(*(x.shape[:-2] for x in (q, p, slopes) if x is not None)) or (1,)
    of_k = np.broadcast_shapes(k.shape[:-2], v.shape[:-2]) or (1,)
    batch = np.broadcast_shapes(of_q[:-1], of_k[:-1])
    heads = of_k[-1] if of_q[-1] == 1 else of_q[-1]
    q, p, slopes = (whole(x, (*batch, heads)) for x in (q, p, slopes))
    k, v = (whole(x, (*batch, of_k[-1])) for x in (k, v))
    out, of_out = np.zeros((2, *batch, heads, q.shape[-2], v.shape[-1]))
    lse, of_lse = np.zeros((2, *batch, heads, q.shape[-2]))
    for b in np.ndindex(batch):
        given = {} if p is None else {"p": p[b]}
        given |= {} if slopes is None else {"slopes": slopes[b][:, 0, 0]}
        done = oracle.forward(q[b][None], k[b][None], v[b][None], **given, **options)
        size = oracle.forward_sizes(done, v[b][None])
        out[b], lse[b] = done.out[0], done.lse[0]
        of_out[b], of_lse[b] = size["out"][0], size["lse"][0]
    terms = k.shape[-2]
    return (out, lse), (of_out, of_lse), (terms, terms)


def bound(exact, size, terms, dtype):
    low = np.dtype(dtype).itemsize == 2
    work = np.float32 if low else dtype
    wide = rounding(size, unit(work), work, terms)
    if not low:
        return wide
    half = ulp(exact, dtype) / 2 if dtype == np.float16 else np.ldexp(0.5, np.frexp(exact)[1] - 8)
    return BOUNDS["low"].units * half + wide


def compare(got, exact, dtype, what=""):
    wide = np.float64 if dtype == np.float64 else np.float32
    kinds = (dtype, wide)
    for name, x, value, size, terms, kind in zip(("out", "lse"), got, *exact, kinds, strict=True):
        assert x.dtype == kind, f"{what}: {name} is {x.dtype}"
        shape = x.shape or (1,)
        shape = x.shape if len(x.shape) == value.ndim else (1, *x.shape)
        x = x.astype(np.float64).reshape(shape)
        assert_within(x, value, bound(value, size, terms, kind), f"{what}: {name}")


def call(given):
    return wavepe.attention(**given, return_lse=True)


def check(given, what=""):
    """The results of a call, held against the oracle."""
    got = call(given)
    compare(got, judge(**given), given["q"].dtype, what)
    return got


@functools.cache
def problem(option, shape, dtype):
    """Arguments and what the oracle says: the same for every variant."""
    given = draw(generator("grid", option), shape, option, dtype)
    return given, judge(**given)


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
        given["p"][:, 5] = nan
        got = wavepe.attention(**given)
        assert_same_bits(got[:, :, :5], clean[:, :, :5])
        assert np.isnan(got[:, :, 5:]).all()
