"""wavelet_grid and wavelet_table, the p of [W]."""

import numpy as np
import oracle
import pytest
import wavepe
from cases import (
    INTEGERS,
    OUT_LAYOUTS,
    SIZES,
    Guard,
    assert_same_bits,
    assert_within,
    generator,
)
from checks import check_wavelet_table as check

each_kind = pytest.mark.parametrize("kind", oracle.KINDS)


# ------------------------------------------------------------------ wavelet_grid


def test_grid_columns_are_scale_major():
    scale, shift = wavepe.wavelet_grid(128)
    assert scale.dtype == shift.dtype == np.float64
    assert scale.shape == shift.shape == (128,)
    assert scale.tolist() == [2.0**i for i in range(8) for _ in range(16)]
    assert shift.tolist() == [float(j) for _ in range(8) for j in range(16)]


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
    """The published sets for d = 128, a sequence of scales, and the fixed scale of the RoPE-like
    restriction."""
    for count, smallest in ((8, 2), (8, 4), (4, 1), (2, 1), (16, 1), (32, 1), (64, 1), (128, 1)):
        scale, shift = wavepe.wavelet_grid(128, count, smallest)
        want = oracle.wavelet_grid(128, [smallest * 2.0**i for i in range(count)])
        assert np.array_equal(scale, want[0])
        assert np.array_equal(shift, want[1])
    scale, shift = wavepe.wavelet_grid(128, [2**7])
    assert (scale == 128).all()
    assert shift.tolist() == list(range(128))
    for sequence in ([3, 1.5], (3, 1.5), np.array([3, 1.5])):
        scale, shift = wavepe.wavelet_grid(6, sequence)
        assert scale.tolist() == [3, 3, 3, 1.5, 1.5, 1.5]
        assert shift.tolist() == [0, 1, 2, 0, 1, 2]
    scale, shift = wavepe.wavelet_grid(24, 6, fixed_scale=True)
    assert (scale == 1).all()
    assert shift.tolist() == [0, 1, 2, 3] * 6


@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (ValueError, "dim must be at least 1, got 0", (0,)),
        (ValueError, "dim must be at least 1, got -8", (-8,)),
        (ValueError, "scales must be at least 1, got 0", (8, 0)),
        (ValueError, "scales must be at least 1, got -2", (8, -2)),
        (ValueError, "scales must be a non-empty list", (8, [])),
        (ValueError, "dim 8 is not divisible by the number of scales 3", (8, [1.0, 2.0, 4.0])),
        (TypeError, r"dim must be an integer, got 8\.0", (8.0,)),
        (TypeError, "dim must be an integer, got '8'", ("8",)),
        (TypeError, "dim must be an integer, got None", (None,)),
        (TypeError, "scales must be .* got 'ab'", (8, "ab")),
        (TypeError, "min_scale must be a number, got None", (8, 2, None)),
        (TypeError, "positional arguments", (8, 2, 1, True)),
    ],
)
def test_grid_errors(error, match, args):
    with pytest.raises(error, match=match):
        wavepe.wavelet_grid(*args)


# ------------------------------------------------------------------ wavelet_table


@each_kind
@pytest.mark.parametrize("mirrored", [None, False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_table_against_the_oracle(variant, kind, mirrored, dtype):
    for w in SIZES:
        for dim in (1, 3, 8, 24, 33):
            scale, shift = wavepe.wavelet_grid(dim, 8 if dim % 8 == 0 else 1)
            options = {} if dtype == np.float32 else {"dtype": dtype}
            got = wavepe.wavelet_table(w, scale, shift, kind=kind, mirrored=mirrored, **options)
            check(got, w, scale, shift, kind, mirrored, dtype)


def test_table_values_of_the_papers(variant):
    def value(delta, a, b, **options):
        return wavepe.wavelet_table([delta], [a], [b], dtype=np.float64, **options)[0, 0]

    at = {(2, 1, 0): -0.4060058497, (10, 8, 3): 0.1598298636, (511, 128, 15): -0.0076914980}
    for key, want in at.items():
        assert value(*key) == pytest.approx(want, abs=1e-10)
    assert value(3, 2, 1) == 0
    assert value(3, 2, 1, mirrored=True) == pytest.approx(-0.4060058497, abs=1e-10)
    assert value(10, 8, 3, mirrored=True) == pytest.approx(-0.4381319172, abs=1e-10)
    # haar, t = -delta: +1 for 0 < (delta + b)/a <= .5, -1 for .5 < (delta + b)/a <= 1.
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
    mirrored = wavepe.wavelet_table(9, scale, shift, mirrored=True)
    assert_same_bits(negative[::-1], mirrored)
    assert wavepe.wavelet_table(0, scale, shift).shape == (0, 8)
    assert wavepe.wavelet_table(np.empty(0, int), scale, shift).shape == (0, 8)
    assert wavepe.wavelet_table(5, [], []).shape == (5, 0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_table_output_stays_inside(variant, dtype):
    for w in (1, 2, 7, 16, 33):
        for dim in (1, 5, 8, 17, 32):
            scale, shift = wavepe.wavelet_grid(dim, 1, 5)
            for layout in OUT_LAYOUTS:
                guard = Guard((w, dim), dtype, layout)
                got = wavepe.wavelet_table(w, scale, shift, dtype=dtype, out=guard.out)
                assert got is guard.out
                guard.check(f"{w}x{dim} {layout}")
                assert_same_bits(got, wavepe.wavelet_table(w, scale, shift, dtype=dtype))
                check(got, w, scale, shift, "ricker", None, dtype)


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


GOOD = {"offsets": 4, "scale": [1.0, 2.0], "shift": [0.0, 1.0]}


@pytest.mark.parametrize(
    ("error", "match", "changed"),
    [
        (ValueError, "ricker", {"kind": "mexican"}),
        (TypeError, "kind must be .*ricker.* got None", {"kind": None}),
        (ValueError, "-1", {"offsets": -1}),
        (TypeError, r"offsets must be an integer, got 4\.0", {"offsets": 4.0}),
        (TypeError, "offsets must hold integers, got dtype float64", {"offsets": [0.0, 1.0]}),
        (TypeError, "offsets must be an integer, got '4'", {"offsets": "4"}),
        (TypeError, "offsets must be an integer, got None", {"offsets": None}),
        (
            ValueError,
            r"offsets must be an integer or \(w,\), got shape \(2, 2\)",
            {"offsets": np.zeros((2, 2), int)},
        ),
        (ValueError, "3", {"scale": [1.0, 2.0, 3.0]}),
        (ValueError, "3", {"shift": [1.0, 2.0, 3.0]}),
        (
            ValueError,
            r"scale and shift must both be \(dim,\), got shapes \(1, 2\)",
            {"scale": [[1.0, 2.0]], "shift": [[1.0, 2.0]]},
        ),
        (TypeError, "scale must hold real numbers, got dtype complex128", {"scale": [1j, 2j]}),
        (TypeError, "scale must hold real numbers, got dtype <U1", {"scale": ["a", "b"]}),
        (TypeError, "dtype must be float16, .* got int32", {"dtype": np.int32}),
        (TypeError, "dtype must be float16, .* got complex64", {"dtype": np.complex64}),
        (ValueError, "4, 2", {"out": np.empty((4, 3), np.float32)}),
        (ValueError, "4, 2", {"out": np.empty((1, 4, 2), np.float32)}),
        (TypeError, "float64", {"out": np.empty((4, 2), np.float64)}),
        (TypeError, "out must be a NumPy array, got list", {"out": [[0.0] * 2] * 4}),
        (
            ValueError,
            "out must be writeable, got a read-only array",
            {"out": np.broadcast_to(np.float32(0), (4, 2))},
        ),
    ],
)
def test_table_errors(error, match, changed):
    arguments = GOOD | changed
    args = [arguments.pop(name) for name in ("offsets", "scale", "shift")]
    with pytest.raises(error, match=match):
        wavepe.wavelet_table(*args, **arguments)


def test_options_are_keywords_only():
    with pytest.raises(TypeError, match="positional arguments"):
        wavepe.wavelet_table(4, [1.0], [0.0], "ricker")


def test_inputs_are_left_alone(variant):
    rng = generator("left alone")
    offsets, scale, shift = np.arange(7), rng.random(5) + 1, rng.random(5)
    before = [a.copy() for a in (offsets, scale, shift)]
    wavepe.wavelet_table(offsets, scale, shift, kind="haar")
    for a, b in zip((offsets, scale, shift), before, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_powers_of_two_at_the_ends_of_float64(variant, kind):
    """1 / scale overflows for the smallest, and is subnormal for the largest."""
    scale = np.repeat(np.ldexp(1.0, [-1074, -1030, -1022, 0, 1022, 1023]), 8)
    shift = np.tile(np.arange(8.0), 6)
    got = wavepe.wavelet_table(9, scale, shift, kind=kind, dtype=np.float64)
    exact = oracle.wavelet_table(9, scale, shift, kind)
    assert_within(got, exact, 1e-15, kind)
    assert np.isfinite(got).all()
