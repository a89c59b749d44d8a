"""rope: rotary encoding [R] of NumPy arrays against the oracle, in every variant."""

import itertools

import cases
import numpy as np
import oracle
import pytest
import wavepe
from checks import check_rope as check

each_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])
each_form = pytest.mark.parametrize(
    ("interleaved", "inverse"), list(itertools.product((False, True), repeat=2))
)


@each_dtype
@each_form
def test_every_size(variant, dtype, interleaved, inverse):
    """Pairs h and the copied rest d - 2h over all sizes, odd d too; and every length."""
    rng = cases.generator("sizes")
    shapes = [(3, 2 * h + rest, h) for h in cases.SIZES for rest in (0, 1, 2, 7, 16, 33)]
    for *shape, h in shapes + [(2, n, 10, 4) for n in cases.SIZES]:
        x, (cos, sin) = rng.normal(size=shape).astype(dtype), cases.turn(rng, (shape[-2], h), dtype)
        got = wavepe.rope(x, cos, sin, interleaved=interleaved, inverse=inverse)
        check(got, x, cos, sin, interleaved, inverse, f"h={h}")


@pytest.mark.parametrize("table", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_types_of_x_and_table(variant, table, dtype, interleaved):
    rng = cases.generator("types")
    for d, h in ((2, 1), (9, 4), (40, 20), (66, 31)):
        x, (cos, sin) = (4 * rng.normal(size=(5, d))).astype(dtype), cases.turn(rng, (5, h), table)
        for inverse in (False, True):
            got = wavepe.rope(x, cos, sin, interleaved=interleaved, inverse=inverse)
            check(got, x, cos, sin, interleaved, inverse)


def bfloat16_check(got, x, cos, sin, interleaved=False, inverse=False):
    """float32 arithmetic, then one rounding to 8 bits: an ulp in all, half of it at best."""
    assert got.dtype == x.dtype
    exact = oracle.rope(x, cos, sin, interleaved, inverse)
    terms = oracle.rope_terms(x, cos, sin, interleaved)
    half = np.ldexp(0.5, np.frexp(exact)[1] - 8)
    cases.assert_within(got.astype(np.float64), exact, half + 4 * cases.unit(np.float32) * terms)


@pytest.mark.parametrize("table", ["bfloat16", np.float16, np.float32, np.float64])
@each_form
def test_bfloat16_of_ml_dtypes(variant, table, interleaved, inverse):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rng = cases.generator("bf16")
    for h in cases.SIZES:
        x = rng.normal(size=(3, 2 * h + h % 4)).astype(bfloat16)
        cos, sin = cases.turn(rng, (3, h), bfloat16 if table == "bfloat16" else table)
        options = {"interleaved": interleaved, "inverse": inverse}
        got = wavepe.rope(x, cos, sin, **options)
        bfloat16_check(got, x, cos.astype(np.float32), sin.astype(np.float32), **options)
        cases.assert_same_bits(got[:, 2 * h :].view(np.uint16), x[:, 2 * h :].view(np.uint16))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_bfloat16_layouts_and_outputs(variant, layout):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rng = cases.generator("bf16 layouts")
    x, (cos, sin) = rng.normal(size=(5, 7, 40)).astype(bfloat16), cases.turn(rng, (7, 20))
    laid = cases.lay_out(x, layout)
    expected = wavepe.rope(laid.copy(), cos, sin).view(np.uint16)
    cases.assert_same_bits(wavepe.rope(laid, cos, sin).view(np.uint16), expected)
    out = np.zeros(x.shape, bfloat16)
    assert wavepe.rope(laid, cos, sin, out=out) is out
    cases.assert_same_bits(out.view(np.uint16), expected)
    in_place = laid.copy()
    cases.assert_same_bits(wavepe.rope(in_place, cos, sin, out=in_place).view(np.uint16), expected)
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


def test_bits_do_not_depend_on_slicing(variant):
    rng = cases.generator("slicing")
    for dtype, interleaved in itertools.product((np.float32, np.float64), (False, True)):
        x, (cos, sin) = rng.normal(size=(33, 70)).astype(dtype), cases.turn(rng, (33, 33), dtype)
        whole = wavepe.rope(x, cos, sin, interleaved=interleaved)
        for start, stop in ((0, 1), (1, 8), (5, 33), (16, 32), (32, 33)):
            cut = slice(start, stop)
            part = wavepe.rope(x[cut], cos[cut], sin[cut], interleaved=interleaved)
            cases.assert_same_bits(part, whole[cut], f"{start}:{stop}")


# apply_rope: the frequencies, the table and the rotation in one


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.3, 0.0])
def test_apply_rope(variant, dtype, interleaved, fraction):
    rng = cases.generator("apply_rope", dtype, interleaved, fraction)
    for shape, theta in (((7, 16), 10000.0), ((2, 3, 5, 10), 500000), ((4, 2), 1.5)):
        x = rng.normal(size=shape).astype(dtype)
        inv_freq, _ = wavepe.rope_frequencies(shape[-1], theta)
        inv_freq[int(fraction * shape[-1] // 2) :] = 0
        for positions in (np.arange(shape[-2]), rng.integers(0, 1 << 20, size=shape[:-1])):
            cos, sin = oracle.rope_table(positions, inv_freq)
            got = wavepe.apply_rope(x, positions, theta, interleaved=interleaved, fraction=fraction)
            exact = oracle.rope(x, cos, sin, interleaved)
            assert got.dtype == dtype
            bound = cases.unit(dtype) * (4 * oracle.rope_terms(x, cos, sin, interleaved))
            cases.assert_within(got, exact, bound, f"{shape} {theta}")


def test_apply_rope_takes_what_broadcasts():
    x = cases.generator("apply_rope shapes").normal(size=(2, 3, 5, 8)).astype(np.float32)
    rows = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    got = wavepe.apply_rope(x, rows[:, None])
    for b in range(2):
        cases.assert_same_bits(got[b], wavepe.apply_rope(x[b], rows[b].tolist()))
    cases.assert_same_bits(
        wavepe.apply_rope(x[0, 0, 3], 3), wavepe.apply_rope(x[0, 0], range(5))[3]
    )
    assert wavepe.apply_rope(x[:0], np.arange(5)).shape == (0, 3, 5, 8)
    assert wavepe.apply_rope(x[:, :, :0], []).shape == (2, 3, 0, 8)
