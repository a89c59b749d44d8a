"""rope_table: cos and sin of positions to 2^31 without rounding of the angle, to one ulp."""

import functools
import math
import re
from fractions import Fraction
from pathlib import Path

import mpmath
import numpy as np
import oracle
import pytest
import wavepe
from cases import INTEGERS, SIZES, assert_same_bits, assert_within, generator, ulp, unit
from checks import check_rope_table as check

ORACLES = {"exact": oracle.rope_table, "hf": oracle.rope_table_hf}
each_precision = pytest.mark.parametrize("precision", ORACLES)


def far_positions(rng):
    powers = np.concatenate([2 ** np.arange(3, 25) + k for k in (-1, 0, 1)])
    powers = powers[powers <= 2**24]
    anywhere = rng.integers(-(2**24), 2**24, 150)
    return np.concatenate([np.arange(-5, 6), powers, -powers, anywhere, [2**24, -(2**24)]])


@each_precision
@pytest.mark.parametrize("dim", [2, 6, 34, 128])
def test_far_positions(variant, dim, precision):
    inv_freq = oracle.rope_frequencies(dim)[:: max(1, dim // 16)]
    positions = far_positions(generator("far", dim))
    if precision == "hf":
        positions = np.concatenate([positions, [2**30 + 77, 2**31 - 1]])
    got = wavepe.rope_table(positions, inv_freq, precision=precision)
    check(got, ORACLES[precision](positions, inv_freq))


def test_next_to_integers_that_are_multiples_of_pi(variant):
    """Convergents of pi, and the quarter turns of the first position."""
    convergents = [3, 22, 333, 355, 103993, 104348, 208341, 312689, 833719, 1146408, 5419351]
    turns = [q * math.pi / 2 for q in (1, 2, 3, 4)]
    for positions, inv_freq in ((convergents, [1.0, 0.5]), ([1, -1, 2], turns)):
        check(wavepe.rope_table(positions, inv_freq), oracle.rope_table(positions, inv_freq))


def test_sane_to_2_31(variant):
    """Beyond 2^24 the contract promises nothing to the ulp, but every value must still be the right
    angle's."""
    positions = generator("2^31").integers(2**24, 2**31, 200)
    positions = np.concatenate([positions, -positions, [2**31 - 1, 2**31, -(2**31)]])
    inv_freq = oracle.rope_frequencies(128)[::5]
    got, want = wavepe.rope_table(positions, inv_freq), oracle.rope_table(positions, inv_freq)
    for table, exact in zip(got, want, strict=True):
        assert_within(table, exact, 2.0**-23)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtypes(variant, dtype):
    positions, inv_freq = far_positions(generator("dtype"))[::3], oracle.rope_frequencies(34)
    positions = np.append(positions, 300)  # in float32 its sine is halfway between two float16
    got = wavepe.rope_table(positions, inv_freq, dtype=dtype)
    for table, exact in zip(got, oracle.rope_table(positions, inv_freq), strict=True):
        assert table.dtype == dtype
        units = {np.float16: 0.5, np.float32: 1}.get(dtype, 0)
        bound = units * ulp(exact, dtype) + 2 * unit(float)
        assert_within(table, exact, bound, str(np.dtype(dtype)))


@pytest.mark.parametrize("factor", [1, 0.5, 1.3465735902799727, 0.1])
@each_precision
def test_attention_factor(variant, factor, precision):
    positions, inv_freq = np.arange(-50, 50), oracle.rope_frequencies(24)
    got = wavepe.rope_table(positions, inv_freq, attention_factor=factor, precision=precision)
    want = ORACLES[precision](positions, inv_freq, factor)
    check(got, want, ulps=1 if precision == "exact" or factor == 1 else 2)


@each_precision
def test_position_zero_is_no_turn(variant, precision):
    for positions, inv_freq in (
        (np.zeros(3, int), oracle.rope_frequencies(10)),
        ([1, 2**24], np.zeros(3)),
    ):
        cos, sin = wavepe.rope_table(positions, inv_freq, precision=precision)
        assert (cos == 1).all()
        assert (sin == 0).all()


@each_precision
@pytest.mark.parametrize("integer", INTEGERS)
def test_every_integer_type(variant, integer, precision):
    info, inv_freq = np.iinfo(integer), oracle.rope_frequencies(6)
    near = (-128, -127, -1, 0, 1, 127, 128, 255, 32767, 65535, 2**24, -(2**24))
    positions = [p for p in near if info.min <= p <= info.max]
    got = wavepe.rope_table(np.array(positions, integer), inv_freq, precision=precision)
    check(got, ORACLES[precision](positions, inv_freq))


@each_precision
def test_shapes_and_layouts(variant, precision):
    def table(positions, inv_freq):
        got = wavepe.rope_table(positions, inv_freq, precision=precision)
        assert got[0].shape == got[1].shape == (*np.shape(positions), len(inv_freq))
        return np.stack(got)

    positions = generator("shapes").integers(-999, 999, (3, 7))
    inv_freq = oracle.rope_frequencies(18)
    whole = table(positions, inv_freq)
    for view in (np.asfortranarray(positions), positions[:, ::-1][:, ::-1], positions.tolist()):
        assert_same_bits(table(view, inv_freq), whole)
    cut = table(positions[1:, ::2], inv_freq[::-1])
    assert_same_bits(cut, whole[:, 1:, ::2, ::-1])
    assert_same_bits(table(7, inv_freq), table([7], inv_freq)[:, 0])
    table(np.empty((2, 0), int), inv_freq)
    table(np.arange(3), np.empty(0))
    for h in SIZES:
        args = np.arange(5), oracle.rope_frequencies(2 * h)
        check(wavepe.rope_table(*args, precision=precision), ORACLES[precision](*args))


@each_precision
@pytest.mark.parametrize("sections", [(4, 5), (9, 0), (0, 9), (2, 3, 4), (9,), (1, 0, 7, 1)])
def test_sections(variant, sections, precision):
    """Pair i keeps inv_freq[i] and is turned by its axis' coordinate alone."""
    inv_freq = oracle.rope_frequencies(18)
    positions = generator("sections").integers(-(2**20), 2**20, (3, 5, len(sections)))
    got = wavepe.rope_table(positions, inv_freq, sections=sections, precision=precision)
    assert got[0].shape == got[1].shape == (3, 5, 9)
    check(got, ORACLES[precision](positions, inv_freq, 1.0, sections))
    again = wavepe.rope_table(positions, inv_freq, sections=list(sections), precision=precision)
    assert_same_bits(got[0], again[0])
    for i, axis in enumerate(np.repeat(np.arange(len(sections)), sections)):
        alone = wavepe.rope_table(positions[..., axis], inv_freq[i : i + 1], precision=precision)
        assert_same_bits(got[0][..., i], alone[0][..., 0])


# ---- the reduction of the angle -----------------------------------------------------------------
#
# docs/internals/rope-exactness.md derives the bounds of its steps. The compiled kernels are judged
# by mpmath, at angles next to quarter turns, where the smallest error of a step would show.

SOURCE = (Path(__file__).parent.parent / "csrc/kernels/angle.h").read_text("utf-8")
PARTS = [float.fromhex(text) for text in re.findall(r"#define PIO2_\d (\S+)", SOURCE)]
BITS = 400
with mpmath.workprec(BITS):
    HALF_PI = Fraction(int(mpmath.floor(mpmath.pi / 2 * mpmath.mpf(2) ** 300)), 2**300)


def hard_frequency(m, exponent):
    """inv_freq = F / 2^exponent, F of 53 bits, with m * inv_freq close to a multiple of pi/2.

    F is a denominator, or a multiple of one, in the continued fraction of m / 2^exponent * 2/pi.
    """
    one = 1 << 300
    part = int(Fraction(m, 1 << exponent) / HALF_PI * one) % one
    a, b, before, now = one, part, 0, 1
    while b and a // b * now + before < 2**53:
        a, b, before, now = b, a % b, now, a // b * now + before
    multiples = {math.ceil(2**52 / q) * q for q in (before, now) if q}
    largest = [x for x in multiples if x < 2**53]
    best = min(largest or [2**53 - 1], key=lambda x: min(x * part % one, -x * part % one))
    return math.ldexp(best, -exponent)


def hard_pairs(count):
    """(position, inv_freq <= 1) of every size, most of them next to a quarter turn."""
    rng = generator("hard pairs")
    pairs = [(2**31, 1.0), (2**31 - 1, 1.0), (1, 2.0**-40), (2**24, math.nextafter(1, 0))]
    for _ in range(count):
        m = int(2 ** rng.uniform(0, 31))
        pairs.append((m, hard_frequency(m, int(rng.integers(53, 70)))))
        pairs.append((int(rng.integers(2**30, 2**31)), float(rng.uniform(0.5, 1))))
        m = int(rng.integers(2**30, 2**31))
        pairs.append((m, hard_frequency(m, 53)))
    return pairs


def test_parts_of_half_pi():
    assert len(PARTS) == 5
    for part in PARTS[:-1]:
        mantissa = int(math.frexp(part)[0] * 2**53)
        assert mantissa % 2**31 == 0, "more than 22 bits: a product with 31 bits would round"
    rest = abs(HALF_PI - sum(map(Fraction, PARTS)))
    assert rest < Fraction(1, 2**145)


@functools.cache
def hard_results():
    """Positions, frequencies, and exact (cos, sin) of their products."""
    pairs, exact = hard_pairs(500), []
    with mpmath.workprec(BITS):
        exact = [mpmath.cos_sin(m * mpmath.mpf(f)) for m, f in pairs]
    return *map(np.array, zip(*pairs, strict=True)), exact


@pytest.mark.parametrize("sign", [1, -1])
def test_results_next_to_quarter_turns(variant, sign):
    """One ulp of the result for inv_freq chosen against us: results down to 1e-19."""
    positions, frequencies, exact = hard_results()
    # one axis a pair: every position meets its own frequency alone
    cos, sin = wavepe.rope_table(sign * positions, frequencies, sections=[1] * len(positions))
    smallest = 1.0
    with mpmath.workprec(BITS):
        for i, right in enumerate(exact):
            for got, want in zip((cos[i], sign * sin[i]), right, strict=True):
                unit = mpmath.ldexp(1, math.frexp(float(want))[1] - 24)
                where = (sign * positions[i], frequencies[i].hex())
                assert abs(mpmath.mpf(float(got)) - want) <= 0.51 * unit, where
                smallest = min(smallest, abs(float(want)))
    assert smallest < 1e-18


def test_a_table_of_floats_would_fail_here():
    """The product rounded to float64 is not enough: the tests above can fail."""
    (*_, m), (*_, f), (*_, exact) = hard_results()
    near, rounded = min(zip(exact, (np.cos(m * f), np.sin(m * f)), strict=True),
                        key=lambda pair: abs(pair[0]))  # fmt: skip
    assert abs(rounded - float(near)) > 1e3 * abs(float(near))
