"""rope_frequencies and rope_table: angles of positions to 2^31 without rounding, cos and sin to one
ulp."""

import math

import mpmath
import numpy as np
import oracle
import pytest
import wavepe
from cases import BOUNDS, INTEGERS, SIZES, assert_same_bits, assert_within, generator, ulp, unit
from checks import check_rope_table as check

BOTH = ("exact", "hf")


def far_positions(rng):
    near = np.arange(-5, 6)
    powers = np.concatenate([2 ** np.arange(3, 25) + k for k in (-1, 0, 1)])
    powers = powers[powers <= 2**24]
    anywhere = rng.integers(-(2**24), 2**24, 150)
    return np.concatenate([near, powers, -powers, anywhere, [2**24, -(2**24)]])


# ------------------------------------------------------------------ rope_frequencies


@pytest.mark.parametrize("theta", [None, 1, 128, 500.0, 10000.0, 5e5, 1e6, 2**31])
def test_frequencies(theta):
    for dim in (*(2 * n for n in SIZES), 24, 96, 128, 256):
        got, factor = wavepe.rope_frequencies(dim, theta)
        want = oracle.rope_frequencies(dim, theta or 10000.0)
        assert type(factor) is float
        assert factor == 1.0
        assert got.dtype == np.float64
        assert got.shape == (dim // 2,)
        assert got[0] == 1
        bound = BOUNDS["rope_frequencies"].units * unit(float) * want * (1 + np.abs(np.log(want)))
        assert_within(got, want, bound, f"dim={dim} theta={theta}")


def test_frequencies_from_rope_parameters():
    want = wavepe.rope_frequencies(64, 500.0)[0]
    for scaling in (
        {"rope_type": "default", "rope_theta": 500.0},
        {"type": "default", "rope_theta": 500.0},
        {"rope_type": "default", "rope_theta": 500},
    ):
        got, factor = wavepe.rope_frequencies(64, scaling=scaling)
        assert_same_bits(got, want)
        assert factor == 1.0
    assert_same_bits(wavepe.rope_frequencies(64, 500.0, scaling={"rope_type": "default"})[0], want)
    same = {"rope_type": "default", "rope_theta": 500.0}
    assert_same_bits(wavepe.rope_frequencies(64, 500.0, scaling=same)[0], want)
    assert_same_bits(
        wavepe.rope_frequencies(64, length=10, max_length=20)[0], wavepe.rope_frequencies(64)[0]
    )
    part = {"rope_type": "default", "partial_rotary_factor": 0.25}
    assert_same_bits(wavepe.rope_frequencies(64, scaling=part)[0], wavepe.rope_frequencies(16)[0])


@pytest.mark.parametrize(
    ("error", "match", "args", "options"),
    [
        (ValueError, "7", (7,), {}),
        (ValueError, "-2", (-2,), {}),
        (ValueError, r"theta must be above 0, got 0\.0", (8, 0.0), {}),
        (ValueError, r"theta must be above 0, got -1\.0", (8, -1.0), {}),
        (ValueError, "theta must be finite, got nan", (8, math.nan), {}),
        (ValueError, "theta must be finite, got inf", (8, math.inf), {}),
        (TypeError, r"dim must be an integer, got 8\.0", (8.0,), {}),
        (TypeError, "dim must be an integer, got '8'", ("8",), {}),
        (TypeError, "theta must be a number, got 'many'", (8, "many"), {}),
        (TypeError, "positional arguments", (8, 1e4, {"rope_type": "default"}), {}),
        (TypeError, "scaling must be a dict .* got 4", (8,), {"scaling": 4}),
        (ValueError, "warped", (8,), {"scaling": {"rope_type": "warped"}}),
        (ValueError, "500", (8, 1e4), {"scaling": {"rope_type": "default", "rope_theta": 500.0}}),
    ],
)
def test_frequencies_errors(error, match, args, options):
    with pytest.raises(error, match=match):
        wavepe.rope_frequencies(*args, **options)


def test_unknown_key_of_rope_parameters_warns():
    with pytest.warns(UserWarning, match="wobble"):
        wavepe.rope_frequencies(8, scaling={"rope_type": "default", "wobble": 3})


# ------------------------------------------------------------------ rope_table, exact


@pytest.mark.parametrize("dim", [2, 6, 34, 128])
def test_exact_to_2_24(variant, dim):
    inv_freq = oracle.rope_frequencies(dim)[:: max(1, dim // 16)]
    positions = far_positions(generator("exact", dim))
    check(wavepe.rope_table(positions, inv_freq), oracle.rope_table(positions, inv_freq))


def near_zeros(rng):
    """(position, inv_freq) with position * inv_freq as close to a multiple of pi/2 as float64
    allows, or nearly."""
    positions, inv_freq = [], []
    with mpmath.workprec(oracle.PRECISION):
        for position in (1, 2, 3, 355, 1000, 65537, 10**6, 2**24 - 1, 2**24):
            for quarters in {1, 2, *(int(q) for q in rng.integers(1, max(2, position // 2), 5))}:
                frequency = float(mpmath.pi / 2 * quarters / position)
                for value in (frequency, np.nextafter(frequency, 0), np.nextafter(frequency, 9)):
                    positions.append(position)
                    inv_freq.append(value)
    return np.array(positions), np.array(inv_freq)


def test_exact_near_the_zeros_of_cos_and_sin(variant):
    positions, inv_freq = near_zeros(generator("zeros"))
    for sign in (1, -1):
        got = [wavepe.rope_table(sign * p, inv_freq[i : i + 1]) for i, p in enumerate(positions)]
        want = [oracle.rope_table(sign * p, inv_freq[i : i + 1]) for i, p in enumerate(positions)]
        for k in (0, 1):
            a = np.array([g[k][0] for g in got])
            b = np.array([w[k][0] for w in want])
            assert np.abs(b).min() < 1e-13
            assert_within(a, b, ulp(b, np.float32), ("cos", "sin")[k])
    # Convergents of pi: integers themselves close to multiples of pi, at frequency 1.
    convergents = np.array(
        [3, 22, 333, 355, 103993, 104348, 208341, 312689, 833719, 1146408, 5419351]
    )
    check(wavepe.rope_table(convergents, [1.0, 0.5]), oracle.rope_table(convergents, [1.0, 0.5]))


def test_exact_is_sane_to_2_31(variant):
    """Beyond 2^24 the contract promises nothing to the ulp, but every value must still be the right
    angle's."""
    rng = generator("2^31")
    positions = np.concatenate([rng.integers(2**24, 2**31, 200), [2**31 - 1, 2**31]])
    inv_freq = oracle.rope_frequencies(128)[::5]
    for sign in (1, -1):
        cos, sin = wavepe.rope_table(sign * positions, inv_freq)
        want = oracle.rope_table(sign * positions, inv_freq)
        assert_within(cos, want[0], 2.0**-23, "cos")
        assert_within(sin, want[1], 2.0**-23, "sin")


def test_exact_beats_a_rounded_product(variant):
    """The product alone, rounded to float64, is already off by more than the bound: the test above
    can fail."""
    positions, inv_freq = near_zeros(generator("zeros"))
    exact = np.array(
        [oracle.rope_table(p, [f])[0][0] for p, f in zip(positions, inv_freq, strict=True)]
    )
    naive = np.cos(positions * inv_freq).astype(np.float32)
    with pytest.raises(AssertionError, match="wrong"):
        assert_within(naive, exact, ulp(exact, np.float32))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_table_dtypes(variant, dtype):
    positions, inv_freq = far_positions(generator("dtype"))[::3], oracle.rope_frequencies(34)
    cos, sin = wavepe.rope_table(positions, inv_freq, dtype=dtype)
    want = oracle.rope_table(positions, inv_freq)
    for got, exact in ((cos, want[0]), (sin, want[1])):
        assert got.dtype == dtype
        bound = 2 * unit(float) if dtype == np.float64 else ulp(exact, dtype)
        assert_within(got, exact, bound, str(np.dtype(dtype)))


@pytest.mark.parametrize("factor", [1, 0.5, 1.3465735902799727, 0.1])
@pytest.mark.parametrize("precision", BOTH)
def test_attention_factor(variant, factor, precision):
    positions, inv_freq = np.arange(-50, 50), oracle.rope_frequencies(24)
    got = wavepe.rope_table(positions, inv_freq, attention_factor=factor, precision=precision)
    exact = precision == "exact"
    want = (oracle.rope_table if exact else oracle.rope_table_hf)(positions, inv_freq, factor)
    check(got, want, ulps=1 if exact or factor == 1 else 2)


def test_position_zero_is_no_turn(variant):
    for precision in BOTH:
        cos, sin = wavepe.rope_table(
            np.zeros(3, int), oracle.rope_frequencies(10), precision=precision
        )
        assert (cos == 1).all()
        assert (sin == 0).all()
        cos, sin = wavepe.rope_table([1, 2**24], np.zeros(3), precision=precision)
        assert (cos == 1).all()
        assert (sin == 0).all()


@pytest.mark.parametrize("precision", BOTH)
@pytest.mark.parametrize("integer", INTEGERS)
def test_every_integer_type(variant, integer, precision):
    info, inv_freq = np.iinfo(integer), oracle.rope_frequencies(6)
    near = (-128, -127, -1, 0, 1, 127, 128, 255, 32767, 65535, 2**24, -(2**24))
    positions = [p for p in near if info.min <= p <= info.max]
    got = wavepe.rope_table(np.array(positions, integer), inv_freq, precision=precision)
    want = (oracle.rope_table if precision == "exact" else oracle.rope_table_hf)(
        positions, inv_freq
    )
    check(got, want)


@pytest.mark.parametrize("precision", BOTH)
def test_shapes_and_layouts(variant, precision):
    rng = generator("shapes")
    positions, inv_freq = rng.integers(-999, 999, (3, 7)), oracle.rope_frequencies(18)
    whole = wavepe.rope_table(positions, inv_freq, precision=precision)
    assert whole[0].shape == (3, 7, 9)
    for view in (np.asfortranarray(positions), positions[:, ::-1][:, ::-1], positions.tolist()):
        again = wavepe.rope_table(view, inv_freq, precision=precision)
        assert_same_bits(again[0], whole[0])
        assert_same_bits(again[1], whole[1])
    cut = wavepe.rope_table(positions[1:, ::2], inv_freq[::-1], precision=precision)
    assert_same_bits(cut[0], whole[0][1:, ::2, ::-1])
    assert_same_bits(cut[1], whole[1][1:, ::2, ::-1])
    for h in SIZES:
        got = wavepe.rope_table(np.arange(5), oracle.rope_frequencies(2 * h), precision=precision)
        want = (oracle.rope_table if precision == "exact" else oracle.rope_table_hf)(
            np.arange(5), oracle.rope_frequencies(2 * h)
        )
        check(got, want)
    scalar = wavepe.rope_table(7, inv_freq, precision=precision)
    assert scalar[0].shape == (9,)
    assert_same_bits(scalar[0], wavepe.rope_table([7], inv_freq, precision=precision)[0][0])
    assert wavepe.rope_table(np.empty((2, 0), int), inv_freq)[0].shape == (2, 0, 9)
    assert wavepe.rope_table(np.arange(3), np.empty(0))[1].shape == (3, 0)


# ------------------------------------------------------------------ rope_table, hf and n-D


@pytest.mark.parametrize("dim", [2, 34, 128])
def test_hf_is_what_hugging_face_computes(variant, dim):
    inv_freq = oracle.rope_frequencies(dim)[:: max(1, dim // 16)]
    positions = np.concatenate([far_positions(generator("hf")), [2**30 + 77, 2**31 - 1]])
    got = wavepe.rope_table(positions, inv_freq, precision="hf")
    check(got, oracle.rope_table_hf(positions, inv_freq))


@pytest.mark.parametrize("precision", BOTH)
@pytest.mark.parametrize("sections", [(4, 5), (9, 0), (0, 9), (2, 3, 4), (9,), (1, 0, 7, 1)])
def test_sections(variant, sections, precision):
    """Pair i keeps inv_freq[i] and is turned by its axis' coordinate alone."""
    rng, inv_freq = generator("sections"), oracle.rope_frequencies(18)
    positions = rng.integers(-(2**20), 2**20, (3, 5, len(sections)))
    got = wavepe.rope_table(positions, inv_freq, sections=sections, precision=precision)
    assert got[0].shape == got[1].shape == (3, 5, 9)
    exact = precision == "exact"
    check(
        got,
        (oracle.rope_table if exact else oracle.rope_table_hf)(positions, inv_freq, 1.0, sections),
    )
    assert_same_bits(
        got[0],
        wavepe.rope_table(positions, inv_freq, sections=list(sections), precision=precision)[0],
    )
    axis = np.repeat(np.arange(len(sections)), sections)
    for i, a in enumerate(axis):
        alone = wavepe.rope_table(positions[..., a], inv_freq[i : i + 1], precision=precision)
        assert_same_bits(got[0][..., i], alone[0][..., 0])


FREQ = oracle.rope_frequencies(8)


@pytest.mark.parametrize(
    ("error", "match", "args", "options"),
    [
        (ValueError, "exact", (np.arange(3), FREQ), {"precision": "fast"}),
        (TypeError, "precision must be .*exact, hf; got 3", (np.arange(3), FREQ), {"precision": 3}),
        (
            ValueError,
            r"inv_freq must be 1-D .* got shape \(2, 2\)",
            (np.arange(3), FREQ.reshape(2, 2)),
            {},
        ),
        (
            ValueError,
            r"inv_freq must be 1-D .* got shape \(\)",
            (np.arange(3), np.float64(1.0)),
            {},
        ),
        (
            TypeError,
            "inv_freq must hold real numbers, got dtype complex128",
            (np.arange(3), FREQ.astype(complex)),
            {},
        ),
        (
            TypeError,
            "inv_freq must hold real numbers, got dtype <U8",
            (np.arange(3), "inv_freq"),
            {},
        ),
        (
            TypeError,
            "positions must hold integers, got dtype complex128",
            (np.arange(3) * 1j, FREQ),
            {},
        ),
        (TypeError, "positions must hold integers, got dtype <U9", ("positions", FREQ), {}),
        (TypeError, "positions must hold integers, got dtype object", (None, FREQ), {}),
        (
            TypeError,
            "dtype must be float16, .* got int32",
            (np.arange(3), FREQ),
            {"dtype": np.int32},
        ),
        (
            TypeError,
            "dtype must be float16, .* got complex64",
            (np.arange(3), FREQ),
            {"dtype": np.complex64},
        ),
        (
            TypeError,
            "attention_factor must be a number, got '1'",
            (np.arange(3), FREQ),
            {"attention_factor": "1"},
        ),
        (TypeError, "positional arguments", (np.arange(3), FREQ, 1.0), {}),
        (ValueError, "5", (np.zeros((3, 2), int), FREQ), {"sections": (2, 3)}),
        (ValueError, "3", (np.zeros((3, 3), int), FREQ), {"sections": (2, 2)}),
        (ValueError, "-1", (np.zeros((3, 2), int), FREQ), {"sections": (5, -1)}),
        (
            ValueError,
            r"must have a last axis of 2, .* got shape \(\)",
            (np.int64(3), FREQ),
            {"sections": (2, 2)},
        ),
        (
            TypeError,
            r"sections must be an integer, got 2\.0",
            (np.zeros((3, 2), int), FREQ),
            {"sections": (2.0, 2.0)},
        ),
        (
            TypeError,
            "sections must be a list .* got '22'",
            (np.zeros((3, 2), int), FREQ),
            {"sections": "22"},
        ),
    ],
)
def test_table_errors(error, match, args, options):
    with pytest.raises(error, match=match):
        wavepe.rope_table(*args, **options)
