"""relative_bias: q . p[delta - first] [W] of NumPy arrays against the oracle, in every variant."""

import itertools

import numpy as np
import pytest
import wavepe
from cases import LAYOUTS, SIZES, assert_same_bits, generator, lay_out
from checks import check_relative_bias as check

each_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])
each_beyond = pytest.mark.parametrize("beyond", ["zero", "edge"])


def pair(rng, m, w, d, dtype=np.float32):
    return rng.normal(size=(m, d)).astype(dtype), rng.normal(size=(w, d)).astype(dtype)


@each_dtype
def test_every_head_size(variant, dtype):
    rng = generator("d")
    for d in SIZES:
        for m, keys in ((1, 9), (6, 6), (5, 19)):
            q, p = pair(rng, m, keys, d, dtype)
            check(wavepe.relative_bias(q, p, keys), q, p, keys)


@each_dtype
@each_beyond
def test_every_length(variant, dtype, beyond):
    """m queries, keys and table rows around every block size, the table smaller and larger than
    needed."""
    rng = generator("m")
    for m in SIZES:
        sizes = [(m, m), (m, 5), (m + 13, m + 13), (m + 3, m + 40), (max(m - 4, 0), m), (1, 1)]
        for keys, w in sizes:
            q, p = pair(rng, m, w, 6, dtype)
            check(wavepe.relative_bias(q, p, keys, beyond=beyond), q, p, keys, 0, beyond)


FIRST = (-97, -17, -16, -3, -1, 0, 1, 2, 7, 16, 60, 10**6, -(10**6))
EXTREME = (2**63 - 1, -(2**63), 2**62, -(2**62), 2**70)  # delta - first must not wrap around


@each_beyond
@pytest.mark.parametrize("first", FIRST + EXTREME)
def test_first(variant, beyond, first):
    """Tables that begin before, at or after delta 0, or lie wholly outside."""
    rng = generator("first")
    for m, keys in ((1, 1), (1, 33), (17, 17), (9, 40), (40, 9)):
        for w in (1, 5, 16, 33, 130) if first in FIRST else (5,):
            q, p = pair(rng, m, w, 9)
            got = wavepe.relative_bias(q, p, keys, first=first, beyond=beyond)
            check(got, q, p, keys, first, beyond)


@each_beyond
@each_dtype
def test_every_layout(variant, beyond, dtype):
    rng, options = generator("layouts"), {"first": -2, "beyond": beyond}
    q0 = rng.normal(size=(2, 3, 7, 19)).astype(dtype)
    p0 = rng.normal(size=(3, 11, 19)).astype(dtype)
    for of_q, of_p in itertools.product(LAYOUTS, repeat=2):
        q, p = lay_out(q0, of_q), lay_out(p0, of_p)
        got = wavepe.relative_bias(q, p, 9, **options)
        check(got, q, p, 9, -2, beyond, f"q {of_q}, p {of_p}")
        dense = (np.array(x, order="C") for x in (q, p))
        assert_same_bits(got, wavepe.relative_bias(*dense, 9, **options), f"q {of_q}, p {of_p}")
    heads_major = np.ascontiguousarray(q0.swapaxes(1, 2)).swapaxes(1, 2)
    assert_same_bits(wavepe.relative_bias(heads_major, p0, 9), wavepe.relative_bias(q0, p0, 9))


LEADING = [
    *(((), of_p) for of_p in ((), (3,))),
    *(((2, 3), of_p) for of_p in ((), (3,), (1,), (2, 1), (2, 3))),
    *(((1, 3), (2, 1)), ((2, 1), (3,)), ((1,), (4, 2)), ((0, 3), (3,))),
]


@pytest.mark.parametrize(("of_q", "of_p"), LEADING)
def test_leading_dims_broadcast(variant, of_q, of_p):
    rng = generator("lead", of_q, of_p)
    q, p = (rng.normal(size=s).astype(np.float32) for s in ((*of_q, 5, 4), (*of_p, 6, 4)))
    got = wavepe.relative_bias(q, p, 7)
    assert got.shape == (*np.broadcast_shapes(of_q, of_p), 5, 7)
    check(got, q, p, 7)


@pytest.mark.parametrize(
    ("m", "keys", "w", "d"),
    [(0, 5, 3, 4), (5, 0, 3, 4), (0, 0, 0, 4), (3, 4, 5, 0), (3, 4, 0, 2), (0, 3, 0, 0)],
)
def test_empty(variant, m, keys, w, d):
    got = wavepe.relative_bias(np.ones((m, d), np.float32), np.ones((w, d), np.float32), keys)
    assert got.shape == (m, keys)
    assert got.dtype == np.float32
    assert not got.any()


@each_beyond
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_stays_in_its_row(variant, beyond, bad):
    """A NaN or Inf in one row of q or p is in no other's results; entries outside the table read no
    row of it."""
    m, keys, w, first = 19, 23, 9, -2
    q, p = pair(generator("nan"), m, w, 17)
    row = np.arange(m)[:, None] + (keys - m) - np.arange(keys) - first
    inside = (row >= 0) & (row < w) | (beyond == "edge")
    row = np.clip(row, 0, w - 1)
    clean = wavepe.relative_bias(q, p, keys, first=first, beyond=beyond)
    for which, at in [*(("p", at) for at in (0, 3, 8)), *(("q", at) for at in (0, 7, 18))]:
        args = {"q": q.copy(), "p": p.copy()}
        args[which][at, 5] = bad
        with np.errstate(all="ignore"):
            got = wavepe.relative_bias(**args, keys=keys, first=first, beyond=beyond)
        hit = np.broadcast_to(row if which == "p" else np.arange(m)[:, None], got.shape) == at
        assert not np.isfinite(got[inside & hit]).any()
        others = ~(inside & hit) if which == "p" else ~hit
        assert_same_bits(got[others], clean[others], f"{which} row {at} {bad}")


def test_rows_outside_the_table(variant):
    q, p = np.ones((3, 1), np.float32), np.array([[10.0], [11.0]], np.float32)
    zero = wavepe.relative_bias(q, p, 4, first=1)
    assert zero.tolist() == [[10, 0, 0, 0], [11, 10, 0, 0], [0, 11, 10, 0]]
    edge = wavepe.relative_bias(q, p, 4, first=1, beyond="edge")
    assert edge.tolist() == [[10, 10, 10, 10], [11, 10, 10, 10], [11, 11, 10, 10]]


@each_dtype
@each_beyond
def test_bits_do_not_depend_on_slicing(variant, dtype, beyond):
    """Rows start:stop of the causal square are the same call with fewer queries: as in decoding
    with a cache."""
    rng = generator("slicing")
    for d in (5, 33):
        q, p = pair(rng, 65, 40, d, dtype)
        whole = wavepe.relative_bias(q, p, 65, first=-3, beyond=beyond)
        for start, stop in ((0, 1), (0, 17), (3, 4), (16, 48), (31, 65), (64, 65)):
            part = wavepe.relative_bias(q[start:stop], p, stop, first=-3, beyond=beyond)
            assert_same_bits(part, whole[start:stop, :stop], f"d={d} {start}:{stop}")
        longer = wavepe.relative_bias(np.tile(q, (2, 1)), p, 130, first=-3, beyond=beyond)
        assert_same_bits(longer[:65, :65], whole, "a sub-block of twice the length")
        stacked = wavepe.relative_bias(np.stack([q, -q, q]), p, 65, first=-3, beyond=beyond)
        assert_same_bits(stacked[2], whole, "in a batch")
