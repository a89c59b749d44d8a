"""wavelet_grid and wavelet_table, the p of [W], and the published scale sets as specs."""

import re
from pathlib import Path

import numpy as np
import oracle
import pytest
import wavepe
from cases import INTEGERS, SIZES, assert_same_bits, assert_within
from checks import check_wavelet_table as check

each_kind = pytest.mark.parametrize("kind", oracle.KINDS)


@pytest.mark.parametrize("dim", [*SIZES, 6, 12, 24, 128])
def test_grid_of_every_divisor(dim):
    for count in range(1, dim + 1):
        if dim % count:
            with pytest.raises(ValueError, match=rf"{dim}(.|\n)*{count}|{count}(.|\n)*{dim}"):
                wavepe.wavelet_grid(dim, count)
            continue
        for got in (wavepe.wavelet_grid(dim, count), wavepe.wavelet_grid(dim, scales=count)):
            want = oracle.wavelet_grid(dim, [2.0**i for i in range(count)])
            assert np.array_equal(got[0], want[0])
            assert np.array_equal(got[1], want[1])


def test_grid_options():
    """Scale major; a sequence of scales, and the fixed scale of the RoPE-like restriction."""
    scale, shift = wavepe.wavelet_grid(128)
    assert scale.dtype == shift.dtype == np.float64
    assert scale.tolist() == [2.0**i for i in range(8) for _ in range(16)]
    assert shift.tolist() == [float(j) for _ in range(8) for j in range(16)]
    for sequence in ([3, 1.5], (3, 1.5), np.array([3, 1.5])):
        scale, shift = wavepe.wavelet_grid(6, sequence)
        assert scale.tolist() == [3, 3, 3, 1.5, 1.5, 1.5]
        assert shift.tolist() == [0, 1, 2, 0, 1, 2]
    scale, shift = wavepe.wavelet_grid(24, 6, fixed_scale=True)
    assert (scale == 1).all()
    assert shift.tolist() == [0, 1, 2, 3] * 6


# METHODS of [W], for a head size of 128: exponents of the first and last scale, the last shift.
PUBLISHED = [(0, 7, 15), (1, 8, 15), (2, 9, 15), (0, 3, 31), (0, 1, 63), (0, 15, 7), (0, 31, 3),
             (0, 63, 1), (0, 127, 0), (7, 7, 127)]  # fmt: skip
PAGE = (Path(__file__).parent.parent / "docs" / "guides" / "wavelets.md").read_text("utf-8")
ROWS = re.findall(r"^\| 2\^(\d+) \.\. 2\^(\d+) \| 0 \.\. (\d+) \| `([^`]+)` \|$", PAGE, re.M)


def test_the_page_lists_the_published_sets():
    assert [tuple(map(int, row[:3])) for row in ROWS] == PUBLISHED


@pytest.mark.parametrize(("low", "high", "last", "spec"), ROWS)
def test_the_spec_of_a_published_set(low, high, last, spec):
    scales = [2.0**k for k in range(int(low), int(high) + 1)]
    want = oracle.wavelet_grid(128, scales)
    assert want[1].max() == int(last)
    assert str(wavepe.encoding(spec)) == spec
    for got, column in zip(wavepe.wavelet_grid(128, len(scales), scales[0]), want, strict=True):
        assert_same_bits(got, column)
    for kind in oracle.KINDS:
        p = wavepe.encoding(f"{spec}{',' if ':' in spec else ':'}kind={kind}").table(40, 128)[0]
        check(p, 40, *want, kind, None, np.float32)


def test_haar_with_a_fixed_scale():
    spec = "wavelet:kind=haar,fixed_scale=true"
    assert f"`{spec}`" in PAGE
    p = wavepe.encoding(spec).table(40, 128)[0]
    want = oracle.wavelet_table(40, *oracle.wavelet_grid(128, [1.0] * 8), "haar")
    assert np.array_equal(p, want)
    assert p.any()


@each_kind
@pytest.mark.parametrize("mirrored", [None, False, True])
@pytest.mark.parametrize("dtype", [None, np.float16, np.float32, np.float64])
def test_table_against_the_oracle(variant, kind, mirrored, dtype):
    options = {"kind": kind, "mirrored": mirrored, **({"dtype": dtype} if dtype else {})}
    for w in SIZES:
        for dim in (1, 3, 8, 24, 33):
            scale, shift = wavepe.wavelet_grid(dim, 8 if dim % 8 == 0 else 1)
            got = wavepe.wavelet_table(w, scale, shift, **options)
            check(got, w, scale, shift, kind, mirrored, dtype or np.float32)


def test_haar_of_the_paper(variant):
    """The numbers of the other kinds are in test_wavelet.py and test_encodings.py."""
    # t = -delta: +1 for 0 < (delta + b)/a <= .5, -1 for .5 < (delta + b)/a <= 1.
    haar = wavepe.wavelet_table(6, [4.0, 4.0], [0, 1], kind="haar")
    assert haar.T.tolist() == [[0, 1, 1, -1, -1, 0], [1, 1, -1, -1, 0, 0]]
    # Read literally it is zero for every visible delta > b.
    assert not wavepe.wavelet_table(9, [4.0], [0], kind="haar", mirrored=False).any()


@pytest.mark.parametrize("integer", INTEGERS)
@pytest.mark.parametrize("mirrored", [False, True])
def test_offsets_of_every_integer_type(variant, integer, mirrored):
    """Negating the smallest, or any unsigned, integer in its own type would wrap."""
    info = np.iinfo(integer)
    offsets = [o for o in (-128, -3, 0, 1, 5, 127, 255, 40000, 2**31) if info.min <= o <= info.max]
    scale, shift = np.array([64.0, 40000.0]), np.array([3.0, 0.0])
    for kind in oracle.KINDS:
        got = wavepe.wavelet_table(
            np.array(offsets, integer), scale, shift, kind=kind, mirrored=mirrored
        )
        check(got, offsets, scale, shift, kind, mirrored, np.float32)


def test_offsets_forms(variant):
    scale, shift = wavepe.wavelet_grid(8, 2)
    table = wavepe.wavelet_table(9, scale, shift)
    for offsets in (range(9), list(range(9)), np.arange(9), np.arange(0, 18, 2)[:9] // 2):
        assert_same_bits(wavepe.wavelet_table(offsets, scale, shift), table)
    assert_same_bits(wavepe.wavelet_table(np.arange(9)[::-1], scale, shift), table[::-1])
    assert_same_bits(
        wavepe.wavelet_table(np.arange(40)[3:30:3], scale, shift),
        wavepe.wavelet_table(30, scale, shift)[3::3],
    )
    negative = wavepe.wavelet_table(np.arange(-8, 1), scale, shift)
    assert_same_bits(negative[::-1], wavepe.wavelet_table(9, scale, shift, mirrored=True))
    assert wavepe.wavelet_table(0, scale, shift).shape == (0, 8)
    assert wavepe.wavelet_table(np.empty(0, int), scale, shift).shape == (0, 8)
    assert wavepe.wavelet_table(5, [], []).shape == (5, 0)


def test_scales_without_a_band(variant):
    """[W] gives scale sets up to 2^127: everything stays finite, and far beyond the band nothing is
    left."""
    for count in (32, 64, 128):
        scale, shift = wavepe.wavelet_grid(128, count)
        for kind in oracle.EVEN:
            table = wavepe.wavelet_table(300, scale, shift, kind=kind)
            assert np.isfinite(table).all()
            assert (table[0, shift == 0] == 1).all()
            check(table, 300, scale, shift, kind, None, np.float32)
    scale, shift = wavepe.wavelet_grid(24, 6)
    table = wavepe.wavelet_table(1024, scale, shift)
    assert np.abs(table[6 * 32 + 4 :]).max() < 1e-6


def test_bits_do_not_depend_on_slicing(variant):
    scale, shift = wavepe.wavelet_grid(33, 1, 20)
    for kind in oracle.KINDS:
        whole = wavepe.wavelet_table(97, scale, shift, kind=kind)
        for start, stop in ((0, 1), (3, 20), (17, 97), (96, 97)):
            part = wavepe.wavelet_table(np.arange(start, stop), scale, shift, kind=kind)
            assert_same_bits(part, whole[start:stop])
            assert_same_bits(
                wavepe.wavelet_table(97, scale[start:][:5], shift[start:][:5], kind=kind),
                whole[:, start : start + 5],
            )


@each_kind
def test_powers_of_two_at_the_ends_of_float64(variant, kind):
    """1 / scale overflows for the smallest, and is subnormal for the largest."""
    scale = np.repeat(np.ldexp(1.0, [-1074, -1030, -1022, 0, 1022, 1023]), 8)
    shift = np.tile(np.arange(8.0), 6)
    got = wavepe.wavelet_table(9, scale, shift, kind=kind, dtype=np.float64)
    assert_within(got, oracle.wavelet_table(9, scale, shift, kind), 1e-15, kind)
    assert np.isfinite(got).all()
