"""rope: rotary encoding [R] of NumPy arrays against the oracle, in every variant."""

import itertools

import numpy as np
import oracle
import pytest
import wavepe
from cases import (
    LAYOUTS,
    OUT_LAYOUTS,
    SIZES,
    Guard,
    assert_same_bits,
    assert_within,
    generator,
    lay_out,
    turn,
    unit,
    using,
)
from checks import check_rope as check
from hypothesis import given, settings
from hypothesis import strategies as st

each_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])
each_form = pytest.mark.parametrize(
    ("interleaved", "inverse"), list(itertools.product((False, True), repeat=2))
)


@each_dtype
@each_form
def test_every_size(variant, dtype, interleaved, inverse):
    """Pairs h and the copied rest d - 2h over all sizes, odd d too."""
    rng = generator("sizes")
    for h in SIZES:
        for rest in (0, 1, 2, 7, 16, 33):
            x = rng.normal(size=(3, 2 * h + rest)).astype(dtype)
            cos, sin = turn(rng, (3, h), dtype)
            got = wavepe.rope(x, cos, sin, interleaved=interleaved, inverse=inverse)
            check(got, x, cos, sin, interleaved, inverse, f"h={h} rest={rest}")


@each_dtype
@each_form
def test_every_length(variant, dtype, interleaved, inverse):
    rng = generator("lengths")
    for n in SIZES:
        x, (cos, sin) = rng.normal(size=(2, n, 10)).astype(dtype), turn(rng, (n, 4), dtype)
        got = wavepe.rope(x, cos, sin, interleaved=interleaved, inverse=inverse)
        check(got, x, cos, sin, interleaved, inverse)


@each_dtype
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_layout(variant, dtype, interleaved):
    rng = generator("layouts")
    values = rng.normal(size=(2, 3, 5, 38)).astype(dtype)
    tables = turn(rng, (5, 17), dtype)
    for of_x, of_table in itertools.product(LAYOUTS, repeat=2):
        x, cos, sin = (
            lay_out(values, of_x),
            lay_out(tables[0], of_table),
            lay_out(tables[1], of_table),
        )
        got = wavepe.rope(x, cos, sin, interleaved=interleaved)
        check(got, x, cos, sin, interleaved, what=f"x {of_x}, table {of_table}")
        whole = wavepe.rope(
            np.ascontiguousarray(x), np.array(cos), np.array(sin), interleaved=interleaved
        )
        assert_same_bits(got, whole, f"x {of_x}, table {of_table}")
    heads_major = np.ascontiguousarray(values.swapaxes(1, 2)).swapaxes(1, 2)
    assert_same_bits(
        wavepe.rope(heads_major, *tables, interleaved=interleaved),
        wavepe.rope(values, *tables, interleaved=interleaved),
    )


@each_dtype
@pytest.mark.parametrize("interleaved", [False, True])
def test_output_stays_inside(variant, dtype, interleaved):
    rng = generator("canary")
    for shape, h in (((1, 2), 1), ((3, 7), 3), ((2, 3, 17), 8), ((5, 34), 16), ((2, 2, 3, 66), 31)):
        x, (cos, sin) = rng.normal(size=shape).astype(dtype), turn(rng, (shape[-2], h), dtype)
        want = wavepe.rope(x, cos, sin, interleaved=interleaved)
        for layout in OUT_LAYOUTS:
            guard = Guard(shape, dtype, layout)
            got = wavepe.rope(x, cos, sin, interleaved=interleaved, out=guard.out)
            assert got is guard.out
            guard.check(f"{shape} {layout}")
            assert_same_bits(got, want, f"{shape} {layout}")
            guard.out[...] = x
            assert (
                wavepe.rope(guard.out, cos, sin, interleaved=interleaved, out=guard.out)
                is guard.out
            )
            guard.check(f"{shape} {layout} in place")
            assert_same_bits(guard.out, want, f"{shape} {layout} in place")


@pytest.mark.parametrize("interleaved", [False, True])
def test_overlapping_output(variant, interleaved):
    """An output that shares memory with an input gives the same result."""
    rng = generator("overlap")
    n, d = 9, 16
    for shift in (1, 2, 7, 8, 16, 17, 64, -1, -8, -16):
        buffer = rng.normal(size=n * d + 2 * abs(shift)).astype(np.float32)
        start = abs(shift)
        x, out = (buffer[s : s + n * d].reshape(n, d) for s in (start, start + shift))
        cos, sin = turn(rng, (n, d // 2))
        want = wavepe.rope(x.copy(), cos, sin, interleaved=interleaved)
        assert wavepe.rope(x, cos, sin, interleaved=interleaved, out=out) is out
        assert_same_bits(out, want, f"shifted by {shift}")
    table = rng.normal(size=(4, 8)).astype(np.float32)
    x, (_, sin) = rng.normal(size=(4, 8)).astype(np.float32), turn(rng, (4, 4))
    want = wavepe.rope(x, table[:, :4].copy(), sin, interleaved=interleaved)
    assert_same_bits(
        wavepe.rope(x, table[:, :4], sin, interleaved=interleaved, out=table), want, "out over cos"
    )


def test_reversed_view_of_itself_as_output(variant):
    x, (cos, sin) = np.arange(32.0).reshape(4, 8), turn(generator("reversed"), (4, 4), np.float64)
    want = wavepe.rope(x.copy(), cos, sin)
    assert_same_bits(wavepe.rope(x, cos, sin, out=x[::-1]), want)


@pytest.mark.parametrize("table", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_types_of_x_and_table(variant, table, dtype, interleaved):
    rng = generator("types")
    for d, h in ((2, 1), (9, 4), (40, 20), (66, 31)):
        x, (cos, sin) = (4 * rng.normal(size=(5, d))).astype(dtype), turn(rng, (5, h), table)
        for inverse in (False, True):
            got = wavepe.rope(x, cos, sin, interleaved=interleaved, inverse=inverse)
            check(got, x, cos, sin, interleaved, inverse)


def bfloat16_check(got, x, cos, sin, interleaved=False, inverse=False):
    """float32 arithmetic, then one rounding to 8 bits: an ulp in all, half of it at best."""
    assert got.dtype == x.dtype
    exact = oracle.rope(x, cos, sin, interleaved, inverse)
    terms = oracle.rope_terms(x, cos, sin, interleaved)
    half = np.ldexp(0.5, np.frexp(exact)[1] - 8)
    assert_within(got.astype(np.float64), exact, half + 4 * unit(np.float32) * terms)


@pytest.mark.parametrize("table", ["bfloat16", np.float16, np.float32, np.float64])
@each_form
def test_bfloat16_of_ml_dtypes(variant, table, interleaved, inverse):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rng = generator("bf16")
    for h in SIZES:
        x = rng.normal(size=(3, 2 * h + h % 4)).astype(bfloat16)
        cos, sin = turn(rng, (3, h), bfloat16 if table == "bfloat16" else table)
        options = {"interleaved": interleaved, "inverse": inverse}
        got = wavepe.rope(x, cos, sin, **options)
        bfloat16_check(got, x, cos.astype(np.float32), sin.astype(np.float32), **options)
        assert_same_bits(got[:, 2 * h :].view(np.uint16), x[:, 2 * h :].view(np.uint16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_layouts_and_outputs(variant, layout):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rng = generator("bf16 layouts")
    x, (cos, sin) = rng.normal(size=(5, 7, 40)).astype(bfloat16), turn(rng, (7, 20))
    laid = lay_out(x, layout)
    expected = wavepe.rope(laid.copy(), cos, sin).view(np.uint16)
    assert_same_bits(wavepe.rope(laid, cos, sin).view(np.uint16), expected)
    out = np.zeros(x.shape, bfloat16)
    assert wavepe.rope(laid, cos, sin, out=out) is out
    assert_same_bits(out.view(np.uint16), expected)
    in_place = laid.copy()
    assert_same_bits(wavepe.rope(in_place, cos, sin, out=in_place).view(np.uint16), expected)
    with pytest.raises(TypeError, match="out must have dtype bfloat16, got float32"):
        wavepe.rope(x, cos, sin, out=np.zeros(x.shape, np.float32))


def test_bfloat16_nan_and_infinity(variant):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x = np.ones((2, 64), bfloat16)
    x[0, 3], x[0, 40], x[1, 5] = np.nan, -np.nan, np.inf
    cos, sin = np.full((2, 32), 0.6, np.float32), np.full((2, 32), 0.8, np.float32)
    worst = np.array(0x7FFFFFFF, np.uint32).view(np.float32)  # a NaN that rounding would carry away
    cos[1, 7] = worst
    got = wavepe.rope(x, cos, sin).astype(np.float32)
    assert np.isnan(got[0, [3, 35, 8, 40]]).all()
    assert np.isnan(got).sum() == 6
    assert np.isinf(got[1, [5, 37]]).all()


def test_table_broadcasts_against_x(variant):
    rng = generator("broadcast")
    x = rng.normal(size=(2, 3, 5, 12)).astype(np.float32)
    for shape in (
        (6,),
        (1,),
        (5, 6),
        (1, 6),
        (3, 1, 6),
        (3, 5, 4),
        (2, 1, 5, 6),
        (1, 1, 1, 2),
        (2, 3, 5, 6),
    ):
        cos, sin = turn(rng, shape)
        check(wavepe.rope(x, cos, sin), x, cos, sin)
    cos, sin = turn(rng, (5, 6))
    check(wavepe.rope(x[0, 0], cos, sin), x[0, 0], cos, sin)
    check(wavepe.rope(x[0, 0, 0], cos[0], sin[0]), x[0, 0, 0], cos[0], sin[0])
    # cos and sin of different leading shapes broadcast too.
    cos, sin = turn(rng, (5, 6))[0], turn(rng, (2, 3, 5, 6))[1]
    check(wavepe.rope(x, cos, sin), x, np.broadcast_to(cos, sin.shape), sin)


def test_empty(variant):
    for shape, table in (
        ((0, 8), (0, 4)),
        ((2, 0, 8), (0, 4)),
        ((0, 3, 8), (3, 4)),
        ((3, 0), (3, 0)),
        ((3, 5), (3, 0)),
    ):
        x = np.ones(shape, np.float32)
        got = wavepe.rope(x, np.ones(table, np.float32), np.zeros(table, np.float32))
        assert got.dtype == np.float32
        assert np.array_equal(got, x)


def test_nan_and_inf_stay_in_their_pair(variant):
    rng = generator("nan")
    for interleaved, bad in itertools.product((False, True), (np.nan, np.inf, -np.inf)):
        x, (cos, sin) = rng.normal(size=(3, 37)).astype(np.float32), turn(rng, (3, 17))
        for place in (0, 5, 16, 17, 33, 34, 36):
            spoilt = x.copy()
            spoilt[1, place] = bad
            with np.errstate(all="ignore"):
                check(
                    wavepe.rope(spoilt, cos, sin, interleaved=interleaved),
                    spoilt,
                    cos,
                    sin,
                    interleaved,
                )
        cos[1, 7] = bad
        check(wavepe.rope(x, cos, sin, interleaved=interleaved), x, cos, sin, interleaved)


def test_bits_do_not_depend_on_slicing(variant):
    rng = generator("slicing")
    for dtype, interleaved in itertools.product((np.float32, np.float64), (False, True)):
        x, (cos, sin) = rng.normal(size=(33, 70)).astype(dtype), turn(rng, (33, 33), dtype)
        whole = wavepe.rope(x, cos, sin, interleaved=interleaved)
        for start, stop in ((0, 1), (1, 8), (5, 33), (16, 32), (32, 33)):
            cut = slice(start, stop)
            part = wavepe.rope(x[cut], cos[cut], sin[cut], interleaved=interleaved)
            assert_same_bits(part, whole[cut], f"{start}:{stop}")


def test_layouts_are_permutations_of_each_other(variant):
    rng = generator("permutation")
    x, (cos, sin) = rng.normal(size=(4, 34)).astype(np.float32), turn(rng, (4, 17))
    order = np.arange(34).reshape(2, 17).T.ravel()
    assert_same_bits(
        wavepe.rope(x, cos, sin)[:, order], wavepe.rope(x[:, order], cos, sin, interleaved=True)
    )


def test_inputs_are_left_alone(variant):
    rng = generator("left alone")
    x, (cos, sin) = rng.normal(size=(4, 9)).astype(np.float32), turn(rng, (4, 4))
    before = [a.copy() for a in (x, cos, sin)]
    wavepe.rope(x, cos, sin)
    for a, b in zip((x, cos, sin), before, strict=True):
        assert_same_bits(a, b)


X, TABLE = np.ones((2, 3, 8), np.float32), np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    ("error", "match", "x", "cos", "sin", "options"),
    [
        (ValueError, "8", X, np.ones((3, 5), "f4"), np.ones((3, 5), "f4"), {}),
        (ValueError, "2", X, np.ones((2, 4), "f4"), np.ones((2, 4), "f4"), {}),
        (ValueError, "4", X, TABLE, np.ones((3, 3), "f4"), {}),
        (ValueError, "5", X, np.ones((5, 1, 3, 4), "f4"), np.ones((5, 1, 3, 4), "f4"), {}),
        (ValueError, "6", X[:, :1], np.ones((6, 4), "f4"), np.ones((6, 4), "f4"), {}),
        (
            ValueError,
            r"need a last axis, got shapes \(\), \(3, 4\)",
            np.float32(1),
            TABLE,
            TABLE,
            {},
        ),
        (
            ValueError,
            r"need a last axis, got shapes \(2, 3, 8\), \(\)",
            X,
            np.float32(1),
            np.float32(0),
            {},
        ),
        (TypeError, "int64", X.astype(int), TABLE, TABLE, {}),
        (TypeError, "complex", X.astype(complex), TABLE, TABLE, {}),
        (TypeError, "int64", X, TABLE.astype(int), TABLE.astype(int), {}),
        (
            TypeError,
            "cos must hold floating point numbers, got dtype complex128",
            X,
            TABLE.astype(complex),
            TABLE,
            {},
        ),
        (TypeError, "x must be float16, .* got dtype object", X.astype(object), TABLE, TABLE, {}),
        (TypeError, "x must be float16, .* got dtype object", None, TABLE, TABLE, {}),
        (TypeError, "cos must hold floating point numbers, got dtype <U3", X, "cos", "sin", {}),
        (ValueError, "2, 3, 8", X, TABLE, TABLE, {"out": np.empty((2, 3, 9), np.float32)}),
        (ValueError, "2, 3, 8", X, TABLE, TABLE, {"out": np.empty((1, 2, 3, 8), np.float32)}),
        (TypeError, "float64", X, TABLE, TABLE, {"out": np.empty((2, 3, 8))}),
        (TypeError, "out must be a NumPy array, got list", X, TABLE, TABLE, {"out": [1.0]}),
        (
            ValueError,
            "out must be writeable, got a read-only array",
            X,
            TABLE,
            TABLE,
            {"out": np.broadcast_to(np.float32(0), X.shape)},
        ),
        (TypeError, "unexpected keyword argument 'layout'", X, TABLE, TABLE, {"layout": "neox"}),
    ],
)
def test_errors(error, match, x, cos, sin, options):
    with pytest.raises(error, match=match):
        wavepe.rope(x, cos, sin, **options)


def test_options_are_keywords_only():
    with pytest.raises(TypeError, match="positional arguments"):
        wavepe.rope(X, TABLE, TABLE, True)


# ------------------------------------------------------------------ invariants

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
sizes = st.integers(1, 20)


def frequencies(rng, h):
    return rng.uniform(0, 1, h)


@quick
@given(
    sizes, sizes, st.booleans(), st.booleans(), st.integers(-(2**24), 2**24), st.integers(0, 999)
)
def test_pair_norms_are_kept_and_inverse_undoes(n, h, interleaved, inverse, position, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2 * h)) * 10.0 ** rng.integers(-3, 3)
    cos, sin = wavepe.rope_table(position + np.arange(n), frequencies(rng, h), dtype=np.float64)
    for name in wavepe.variants():
        with using(name):
            y = wavepe.rope(x, cos, sin, interleaved=interleaved, inverse=inverse)
            back = wavepe.rope(y, cos, sin, interleaved=interleaved, inverse=not inverse)
        pairs = np.array(oracle.rope_pairs(h, interleaved))
        norm = np.hypot(*np.moveaxis(x[:, pairs], -1, 0))
        assert_within(
            np.hypot(*np.moveaxis(y[:, pairs], -1, 0)), norm, 8 * unit(float) * norm, name
        )
        each = np.empty_like(x)
        each[:, pairs] = norm[..., None]
        assert_within(back, x, 12 * unit(float) * each, name)


@quick
@given(
    sizes, st.booleans(), st.integers(-(10**5), 10**5), st.integers(0, 10**5), st.integers(0, 999)
)
def test_scores_keep_when_all_positions_shift(h, interleaved, shift, distance, seed):
    """[R] Eq. 16: q_m . k_n depends on m - n alone."""
    rng = np.random.default_rng(seed)
    q, k, inv_freq = rng.normal(size=2 * h), rng.normal(size=2 * h), frequencies(rng, h)

    def score(m, n):
        rows = wavepe.rope_table(np.array([m, n]), inv_freq, dtype=np.float64)
        x = wavepe.rope(np.stack([q, k]), *rows, interleaved=interleaved)
        return x[0] @ x[1]

    for name in wavepe.variants():
        with using(name):
            error = abs(score(distance + shift, shift) - score(distance, 0))
            assert error <= 40 * unit(float) * np.linalg.norm(q) * np.linalg.norm(k), name


# apply_rope: the frequencies, the table and the rotation in one


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.3, 0.0])
def test_apply_rope(variant, dtype, interleaved, fraction):
    rng = generator("apply_rope", dtype, interleaved, fraction)
    for shape, theta in (((7, 16), 10000.0), ((2, 3, 5, 10), 500000), ((4, 2), 1.5)):
        x = rng.normal(size=shape).astype(dtype)
        inv_freq, _ = wavepe.rope_frequencies(shape[-1], theta)
        inv_freq[int(fraction * shape[-1] // 2) :] = 0
        for positions in (np.arange(shape[-2]), rng.integers(0, 1 << 20, size=shape[:-1])):
            cos, sin = oracle.rope_table(positions, inv_freq)
            got = wavepe.apply_rope(x, positions, theta, interleaved=interleaved, fraction=fraction)
            exact = oracle.rope(x, cos, sin, interleaved)
            assert got.dtype == dtype
            bound = unit(dtype) * (4 * oracle.rope_terms(x, cos, sin, interleaved))
            assert_within(got, exact, bound, f"{shape} {theta}")


def test_apply_rope_takes_what_broadcasts():
    x = generator("apply_rope shapes").normal(size=(2, 3, 5, 8)).astype(np.float32)
    rows = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    got = wavepe.apply_rope(x, rows[:, None])
    for b in range(2):
        assert_same_bits(got[b], wavepe.apply_rope(x[b], rows[b].tolist()))
    assert_same_bits(wavepe.apply_rope(x[0, 0, 3], 3), wavepe.apply_rope(x[0, 0], range(5))[3])
    assert wavepe.apply_rope(x[:0], np.arange(5)).shape == (0, 3, 5, 8)
    assert wavepe.apply_rope(x[:, :, :0], []).shape == (2, 3, 0, 8)


@pytest.mark.parametrize(
    ("x", "positions", "options", "error", "words"),
    [
        ((2, 5), [0, 1], {}, ValueError, r"even d, got \(2, 5\)"),
        ((), 0, {}, ValueError, "even d"),
        ((2, 0), [0, 1], {}, ValueError, r"\(2, 0\)"),
        ((2, 4), [0, 1, 2], {}, ValueError, "broadcast"),
        ((2, 4), [0.5, 1], {}, TypeError, "positions must hold integers"),
        ((2, 4), [0, 1], {"theta": 0}, ValueError, "theta must be above 0"),
        ((2, 4), [0, 1], {"theta": "base"}, TypeError, "theta must be a number"),
        ((2, 4), [0, 1], {"fraction": 1.5}, ValueError, "fraction must be a number from 0 to 1"),
        ((2, 4), [0, 1], {"interleaved": 2}, TypeError, "interleaved must be True or False"),
    ],
)
def test_apply_rope_says_what_is_wrong(x, positions, options, error, words):
    with pytest.raises(error, match=words):
        wavepe.apply_rope(np.ones(x, np.float32), positions, **options)
    with pytest.raises(TypeError, match="x must be float16"):
        wavepe.apply_rope(np.ones((2, 4), int), [0, 1])
