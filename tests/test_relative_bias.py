"""relative_bias: q . p[delta - first] [W] of NumPy arrays against the oracle, in every variant."""

import itertools

import numpy as np
import pytest
import wavepe
from cases import (
    LAYOUTS,
    OUT_LAYOUTS,
    SIZES,
    Guard,
    assert_same_bits,
    generator,
    lay_out,
)
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
        for keys, w in (
            (m, m),
            (m, 5),
            (m + 13, m + 13),
            (m + 3, m + 40),
            (max(m - 4, 0), m),
            (1, 1),
        ):
            q, p = pair(rng, m, w, 6, dtype)
            check(wavepe.relative_bias(q, p, keys, beyond=beyond), q, p, keys, 0, beyond)


@each_beyond
@pytest.mark.parametrize("first", [-97, -17, -16, -3, -1, 0, 1, 2, 7, 16, 60, 10**6, -(10**6)])
def test_first(variant, beyond, first):
    """Tables that begin before, at or after delta 0, or lie wholly outside."""
    rng = generator("first")
    for m, keys in ((1, 1), (1, 33), (17, 17), (9, 40), (40, 9)):
        for w in (1, 5, 16, 33, 130):
            q, p = pair(rng, m, w, 9)
            got = wavepe.relative_bias(q, p, keys, first=first, beyond=beyond)
            check(got, q, p, keys, first, beyond)


def test_rows_outside_the_table(variant):
    q, p = np.ones((3, 1), np.float32), np.array([[10.0], [11.0]], np.float32)
    zero = wavepe.relative_bias(q, p, 4, first=1)
    assert zero.tolist() == [[10, 0, 0, 0], [11, 10, 0, 0], [0, 11, 10, 0]]
    edge = wavepe.relative_bias(q, p, 4, first=1, beyond="edge")
    assert edge.tolist() == [[10, 10, 10, 10], [11, 10, 10, 10], [11, 11, 10, 10]]


@each_beyond
@each_dtype
def test_every_layout(variant, beyond, dtype):
    rng = generator("layouts")
    q0, p0 = (
        rng.normal(size=(2, 3, 7, 19)).astype(dtype),
        rng.normal(size=(3, 11, 19)).astype(dtype),
    )
    for of_q, of_p in itertools.product(LAYOUTS, repeat=2):
        q, p = lay_out(q0, of_q), lay_out(p0, of_p)
        got = wavepe.relative_bias(q, p, 9, first=-2, beyond=beyond)
        check(got, q, p, 9, -2, beyond, f"q {of_q}, p {of_p}")
        plain = wavepe.relative_bias(
            np.array(q, order="C"), np.array(p, order="C"), 9, first=-2, beyond=beyond
        )
        assert_same_bits(got, plain, f"q {of_q}, p {of_p}")
    heads_major = np.ascontiguousarray(q0.swapaxes(1, 2)).swapaxes(1, 2)
    assert_same_bits(wavepe.relative_bias(heads_major, p0, 9), wavepe.relative_bias(q0, p0, 9))


def test_leading_dims_broadcast(variant):
    rng = generator("lead")
    for of_q, of_p in (
        ((), ()),
        ((2, 3), ()),
        ((2, 3), (3,)),
        ((2, 3), (1,)),
        ((2, 3), (2, 1)),
        ((2, 3), (2, 3)),
        ((), (3,)),
        ((1, 3), (2, 1)),
        ((2, 1), (3,)),
        ((1,), (4, 2)),
        ((0, 3), (3,)),
    ):
        q = rng.normal(size=(*of_q, 5, 4)).astype(np.float32)
        p = rng.normal(size=(*of_p, 6, 4)).astype(np.float32)
        got = wavepe.relative_bias(q, p, 7)
        assert got.shape == (*np.broadcast_shapes(of_q, of_p), 5, 7)
        check(got, q, p, 7)


@each_dtype
@each_beyond
def test_output_stays_inside(variant, dtype, beyond):
    rng = generator("canary")
    for lead, m, keys, w, d in (
        ((), 1, 1, 1, 1),
        ((), 3, 5, 4, 3),
        ((2,), 7, 9, 16, 8),
        ((2, 3), 5, 17, 6, 5),
        ((), 33, 20, 40, 17),
        ((), 16, 64, 64, 16),
        ((), 65, 65, 33, 4),
    ):
        q, p = rng.normal(size=(*lead, m, d)).astype(dtype), rng.normal(size=(w, d)).astype(dtype)
        want = wavepe.relative_bias(q, p, keys, first=-1, beyond=beyond)
        for layout in OUT_LAYOUTS:
            guard = Guard((*lead, m, keys), dtype, layout)
            got = wavepe.relative_bias(q, p, keys, first=-1, beyond=beyond, out=guard.out)
            assert got is guard.out
            guard.check(f"{lead} {m} {keys} {layout}")
            assert_same_bits(got, want, f"{lead} {m} {keys} {layout}")


def test_empty(variant):
    for m, keys, w, d in (
        (0, 5, 3, 4),
        (5, 0, 3, 4),
        (0, 0, 0, 4),
        (3, 4, 5, 0),
        (3, 4, 0, 2),
        (0, 3, 0, 0),
    ):
        q, p = np.ones((m, d), np.float32), np.ones((w, d), np.float32)
        got = wavepe.relative_bias(q, p, keys)
        assert got.shape == (m, keys)
        assert got.dtype == np.float32
        assert not got.any()
    with pytest.raises(ValueError, match="edge"):
        wavepe.relative_bias(np.ones((3, 2)), np.ones((0, 2)), 3, beyond="edge")


@each_beyond
def test_nan_stays_in_its_row(variant, beyond):
    """A NaN or Inf in one row of q or p is in no other's results; entries outside the table read no
    row of it."""
    rng = generator("nan")
    m, keys, w, d, first = 19, 23, 9, 17, -2
    q, p = pair(rng, m, w, d)
    row = np.arange(m)[:, None] + (keys - m) - np.arange(keys) - first
    inside = (row >= 0) & (row < w) if beyond == "zero" else np.full(row.shape, True)
    row = np.clip(row, 0, w - 1)
    clean = wavepe.relative_bias(q, p, keys, first=first, beyond=beyond)
    for bad in (np.nan, np.inf):
        for at in (0, 3, 8):
            spoilt = p.copy()
            spoilt[at, 5] = bad
            with np.errstate(all="ignore"):
                got = wavepe.relative_bias(q, spoilt, keys, first=first, beyond=beyond)
            hit = inside & (row == at)
            assert not np.isfinite(got[hit]).any()
            assert_same_bits(got[~hit], clean[~hit], f"p row {at} {bad}")
        for at in (0, 7, 18):
            spoilt = q.copy()
            spoilt[at, 16] = bad
            with np.errstate(all="ignore"):
                got = wavepe.relative_bias(spoilt, p, keys, first=first, beyond=beyond)
            assert not np.isfinite(got[at][inside[at]]).any()
            others = np.arange(m) != at
            assert_same_bits(got[others], clean[others], f"q row {at} {bad}")


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


def test_equal_queries_give_one_value_a_distance(variant):
    """The scores depend on delta alone, so they keep when all positions shift together."""
    rng = generator("toeplitz")
    q, p = np.repeat(rng.normal(size=(1, 24)), 20, 0), rng.normal(size=(30, 24))
    got = wavepe.relative_bias(q, p, 30, first=-5)
    for offset in range(-19, 30):
        diagonal = np.diagonal(got, offset)
        assert (diagonal == diagonal[0]).all()


def test_table_of_wavelets(variant):
    """The encoding itself: beyond its band the wavelet bias vanishes, so the scores are those of no
    encoding."""
    rng = generator("wavelet")
    scale, shift = wavepe.wavelet_grid(24, 3)
    p = wavepe.wavelet_table(200, scale, shift)
    q = rng.normal(size=(200, 24)).astype(np.float32)
    got = wavepe.relative_bias(q, p, 200)
    check(got, q, p, 200)
    delta = np.subtract.outer(np.arange(200), np.arange(200))
    assert np.abs(got[delta > 6 * 4 + 7]).max() < 1e-6 * np.abs(q).sum(1).max()
    assert not got[delta < 0].any()


def test_inputs_are_left_alone(variant):
    q, p = pair(generator("left alone"), 5, 6, 7)
    before = q.copy(), p.copy()
    wavepe.relative_bias(q, p, 8, beyond="edge")
    assert_same_bits(q, before[0])
    assert_same_bits(p, before[1])


Q, P = np.ones((2, 3, 4), np.float32), np.ones((5, 4), np.float32)


@pytest.mark.parametrize(
    ("error", "match", "args", "options"),
    [
        (ValueError, "4(.|\n)*6|6(.|\n)*4", (Q, np.ones((5, 6), "f4"), 3), {}),
        (
            ValueError,
            r"leading axes of q and p \(2,\) and \(3,\)",
            (Q, np.ones((3, 5, 4), "f4"), 3),
            {},
        ),
        (ValueError, r"must be .* got shapes \(4,\) and \(5, 4\)", (np.ones(4, "f4"), P, 3), {}),
        (ValueError, r"must be .* got shapes \(2, 3, 4\) and \(4,\)", (Q, np.ones(4, "f4"), 3), {}),
        (ValueError, r"must be .* got shapes \(\) and \(5, 4\)", (np.float32(1), P, 3), {}),
        (ValueError, "-1", (Q, P, -1), {}),
        (ValueError, "edge", (Q, P, 3), {"beyond": "wrap"}),
        (TypeError, "beyond must be .*zero, edge; got None", (Q, P, 3), {"beyond": None}),
        (TypeError, r"keys must be an integer, got 3\.0", (Q, P, 3.0), {}),
        (TypeError, "keys must be an integer, got '3'", (Q, P, "3"), {}),
        (TypeError, "keys must be an integer, got None", (Q, P, None), {}),
        (TypeError, r"first must be an integer, got 0\.5", (Q, P, 3), {"first": 0.5}),
        (TypeError, "first must be an integer, got '0'", (Q, P, 3), {"first": "0"}),
        (TypeError, "missing .* 'keys'", (Q, P), {}),
        (TypeError, "positional arguments", (Q, P, 3, 0), {}),
        (TypeError, "complex", (Q.astype(complex), P, 3), {}),
        (
            TypeError,
            "p must hold real numbers, got dtype complex128",
            (Q, P.astype(complex), 3),
            {},
        ),
        (TypeError, "q must hold real numbers, got dtype object", (Q.astype(object), P, 3), {}),
        (TypeError, "q must hold real numbers, got dtype <U1", ("q", P, 3), {}),
        (TypeError, "q must hold real numbers, got dtype object", (None, P, 3), {}),
        (ValueError, "2, 3, 3", (Q, P, 3), {"out": np.empty((2, 3, 4), np.float32)}),
        (ValueError, "2, 3, 3", (Q, P, 3), {"out": np.empty((1, 2, 3, 3), np.float32)}),
        (TypeError, "float64", (Q, P, 3), {"out": np.empty((2, 3, 3))}),
        (TypeError, "out must be a NumPy array, got list", (Q, P, 3), {"out": [1.0]}),
        (
            ValueError,
            "out must be writeable, got a read-only array",
            (Q, P, 3),
            {"out": np.broadcast_to(np.float32(0), (2, 3, 3))},
        ),
    ],
)
def test_errors(error, match, args, options):
    with pytest.raises(error, match=match):
        wavepe.relative_bias(*args, **options)


@pytest.mark.parametrize("keys", [2**53, 2**63 - 1, 2**70])
def test_sizes_that_overflow(keys):
    """No product of sizes may wrap: a clear error instead."""
    with pytest.raises(ValueError, match=rf"keys must be below 2\^53, got {keys}"):
        wavepe.relative_bias(Q, P, keys)


@pytest.mark.parametrize("first", [2**63 - 1, -(2**63), 2**62, -(2**62), 2**70])
@each_beyond
def test_extreme_first(variant, first, beyond):
    """delta - first must not wrap around into the table."""
    q, p = pair(generator("extreme"), 3, 5, 4)
    got = wavepe.relative_bias(q, p, 4, first=first, beyond=beyond)
    check(got, q, p, 4, first, beyond)
