"""The bounds that docs/internals/rope-exactness.md derives for the angle's reduction, step by step.

The steps of exact_product and sincos_sum (csrc/kernels/angle.h) are repeated here in Python
floats and judged by fractions, because the compiled code gives no intermediate result whose
exactness could be asked for. The compiled kernels are judged by mpmath, at angles next to quarter
turns.
"""

import math
import re
from fractions import Fraction
from pathlib import Path

import mpmath
import numpy as np
import oracle
import pytest
import wavepe
from cases import generator

SOURCE = (Path(__file__).parent.parent / "csrc/kernels/angle.h").read_text("utf-8")
PARTS = [float.fromhex(text) for text in re.findall(r"#define PIO2_\d (\S+)", SOURCE)]
ROUNDER = 1.5 * 2.0**52
BITS = 400
with mpmath.workprec(BITS):
    _SCALED = mpmath.floor(mpmath.pi / 2 * mpmath.mpf(2) ** 300)
    HALF_PI = Fraction(int(_SCALED), 2**300)


def exact_product(x, y):
    """x * y, which must need no rounding: contracted into a following sum or not, it is the same
    number."""
    assert Fraction(x) * Fraction(y) == Fraction(x * y), (x.hex(), y.hex())
    return x * y


def exact_difference(x, y):
    assert Fraction(x) - Fraction(y) == Fraction(x - y), (x.hex(), y.hex())
    return x - y


def two_sum(a, b):
    total = a + b
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)
    assert Fraction(total) + Fraction(error) == Fraction(a) + Fraction(b)
    return total, error


def high_bits(x):
    bits = np.float64(x).view(np.int64) & ~np.int64(0x7FFFFFFF)
    return float(bits.view(np.float64))


def product(m, f):
    """hi, lo of exact_product."""
    f1 = high_bits(f)
    f2 = high_bits(exact_difference(f, f1))
    f3 = exact_difference(exact_difference(f, f1), f2)
    total, e1 = two_sum(exact_product(m, f1), exact_product(m, f2))
    hi, e2 = two_sum(total, exact_product(m, f3))
    assert Fraction(e1) + Fraction(e2) == Fraction(e1 + e2)
    return hi, e1 + e2


def reduced(hi, lo, fused):
    """k, r, tail of sincos_sum; `fused`: the one inexact product is contracted, or not."""
    k = (hi * float.fromhex("0x1.45f306dc9c883p-1") + ROUNDER) - ROUNDER
    r = exact_difference(hi, exact_product(k, PARTS[0]))
    r = exact_difference(r, exact_product(k, PARTS[1]))
    r, e1 = two_sum(r, lo)
    r, e2 = two_sum(r, -exact_product(k, PARTS[2]))
    r, e3 = two_sum(r, -exact_product(k, PARTS[3]))
    rest = (e1 + e2) + e3
    if fused:
        rest = float(Fraction(rest) - Fraction(k) * Fraction(PARTS[4]))
    else:
        rest = rest - k * PARTS[4]
    return k, *two_sum(r, rest)


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


def test_product_has_no_error():
    rng = generator("product")
    for m, f in hard_pairs(300):
        for sign, scale in ((1, 1), (-1, 1), (1, int(rng.integers(-900, 900)))):
            frequency = math.ldexp(f, scale if scale != 1 else 0)
            hi, lo = product(float(sign * m), frequency)
            assert Fraction(hi) + Fraction(lo) == sign * m * Fraction(frequency)


@pytest.mark.parametrize("fused", [False, True])
def test_reduction_is_within_its_bounds(fused):
    worst, worst_near_zero, smallest = 0, 0, 1
    for m, f in hard_pairs(1500):
        hi, lo = product(float(m), f)
        k, r, tail = reduced(hi, lo, fused)
        exact = m * Fraction(f) - int(k) * HALF_PI
        assert abs(r) < math.pi / 4 + 2.0**-20
        error = abs(Fraction(r) + Fraction(tail) - exact)
        worst = max(worst, error)
        if abs(r) < 2.0**-14:
            worst_near_zero = max(worst_near_zero, error)
            smallest = min(smallest, abs(exact))
    assert worst < Fraction(1, 2**104)
    assert worst_near_zero < Fraction(1, 2**113)
    assert smallest < Fraction(1, 2**62), "nothing hard was tried"


def test_results_next_to_quarter_turns(variant):
    """One ulp of the result for inv_freq chosen against us: results down to 1e-19."""
    pairs = hard_pairs(1500)
    smallest = 1.0
    for sign in (1, -1):
        positions = np.array([sign * m for m, _ in pairs])
        frequencies = np.array([f for _, f in pairs])
        # one axis a pair: every position meets its own frequency alone
        made = wavepe.rope_table(positions, frequencies, sections=[1] * len(pairs))
        for i, (m, f) in enumerate(pairs):
            with mpmath.workprec(BITS):
                exact = mpmath.cos_sin(sign * m * mpmath.mpf(f))
                for got, right in zip((made[0][i], made[1][i]), exact, strict=True):
                    unit = mpmath.ldexp(1, math.frexp(float(right))[1] - 24)
                    assert abs(mpmath.mpf(float(got)) - right) <= 0.51 * unit, (sign * m, f.hex())
                    smallest = min(smallest, abs(float(right)))
    assert smallest < 1e-18


def test_a_table_of_floats_would_fail_here():
    """The product rounded to float64 is not enough: the tests above can fail."""
    m, f = hard_pairs(1)[-1]
    right = oracle.rope_table([m], [f])
    rounded = np.cos(m * f), np.sin(m * f)
    near = min((0, 1), key=lambda which: abs(right[which][0, 0]))
    assert abs(rounded[near] - right[near][0, 0]) > 1e3 * abs(right[near][0, 0])
