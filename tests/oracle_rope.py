"""The reference of the length scalings of RoPE: their formulas in mpmath.

The package shares no code with this file.

[Y] Peng et al., YaRN, arXiv 2309.00071; LongRoPE: Ding et al., arXiv 2402.13753; Llama 3.1: the
reference code of its release; the rest as the documentation of transformers >= 5 has them.
"""

import mpmath
import numpy as np
from mpmath import mpf
from oracle import PRECISION


def exact(function):
    """Run a function in `PRECISION` bits; round its results once to float64."""

    def rounded(*args, **options):
        with mpmath.workprec(PRECISION):
            frequencies, factor = function(*args, **options)
            return np.array([float(w) for w in frequencies]), float(factor)

    return rounded


def plain(dim, theta):
    """[R]: theta^(-2i/d)."""
    return [mpf(theta) ** (-mpf(2 * i) / dim) for i in range(dim // 2)]


@exact
def default(dim, theta):
    return plain(dim, theta), 1


@exact
def linear(dim, theta, factor):
    """Position m becomes m/s."""
    return [w / mpf(factor) for w in plain(dim, theta)], 1


@exact
def dynamic(dim, theta, factor, length, trained):
    """NTK-aware: b (s L/L_train - (s - 1))^(d/(d-2)) for L > L_train."""
    if length > trained:
        theta = mpf(theta) * (mpf(factor) * length / trained - (mpf(factor) - 1)) ** (
            mpf(dim) / (dim - 2)
        )
    return plain(dim, theta), 1


@exact
def yarn(dim, theta, factor, original, fast=32, slow=1, truncate=True):
    """[Y] 3.2 with the ramp over the pair index: 0 up to the pair that turns `fast` times in the
    original length, 1 from the one that turns `slow` times; attention [Y] 3.4."""

    def index(turns):
        wavelength = mpf(original) / mpf(turns)
        return dim * mpmath.log(wavelength / (2 * mpmath.pi)) / (2 * mpmath.log(theta))

    first, last = index(fast), index(slow)
    if truncate:
        first, last = mpmath.floor(first), mpmath.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    out = []
    for i, w in enumerate(plain(dim, theta)):
        slowed = min(max((i - first) / (last - first), mpf(0)), mpf(1))
        out.append(w * (1 - slowed) + w / mpf(factor) * slowed)
    return out, yarn_factor(factor)


def yarn_factor(scale, weight=1):
    return 1 if scale <= 1 else mpf(weight) * mpmath.log(mpf(scale)) / 10 + 1


@exact
@exact
def longrope(dim, theta, divisors, factor, original):
    """w_i / lambda_i; attention sqrt(1 + ln s / ln L_original)."""
    out = [w / mpf(value) for w, value in zip(plain(dim, theta), divisors, strict=True)]
    if factor <= 1:
        return out, 1
    return out, mpmath.sqrt(1 + mpmath.log(mpf(factor)) / mpmath.log(mpf(original)))


@exact
def llama3(dim, theta, factor, original, low, high):
    """By the wavelength: short ones kept, long ones divided by the factor, smooth in between."""
    out = []
    for w in plain(dim, theta):
        wavelength = 2 * mpmath.pi / w
        if wavelength < mpf(original) / high:
            out.append(w)
        elif wavelength > mpf(original) / low:
            out.append(w / mpf(factor))
        else:
            smooth = (mpf(original) / wavelength - low) / (mpf(high) - low)
            out.append((1 - smooth) * w / mpf(factor) + smooth * w)
    return out, 1


@exact
def proportional(dim, theta, partial=1.0, factor=1.0):
    """[B]: int(p d / 2) pairs are rotated, with the denominator d; the others are not."""
    turning = int(partial * dim // 2)
    return [w / mpf(factor) if i < turning else 0 for i, w in enumerate(plain(dim, theta))], 1
