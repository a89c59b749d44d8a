"""The reference for cos and sin of position * inv_freq, far more exact than float32.

The angle of position m, in quarter turns, is m * g with g = inv_freq * 2/pi. It is computed modulo
4 in integers: g is cut after 190 binary places, and multiplied by m in limbs of 32 bits, which is
exact. The signed distance r to the nearest quarter turn is rounded to float64, and NumPy takes its
sin and cos. For |m| < 2^54 the cut moves r by less than 2^-135 radians. All later rounding is
relative to the result and below 2^-48 of it. So an error that is measured in float32 ulp is off by
less than 2^-23 of an ulp if |r| > 2^-86. `Exact.nearest` is the smallest |r| so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mpmath
import numpy as np

PLACES = 190  # binary places of a quarter turn; two more bits number the four quarters of a turn
LIMBS = 6  # of 32 bits each
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
BITS = 400  # precision for pi and for powers of theta


@dataclass
class Exact:
    """Compute cos and sin for one set of frequencies, which are taken as exact numbers.

    Parameters
    ----------
    frequencies : sequence of float or mpmath.mpf (h,)
        Radians per position, positive.
    """

    frequencies: Sequence
    nearest: float = field(default=1.0, init=False)  # smallest |angle - multiple of pi/2| so far

    def __post_init__(self) -> None:
        self.quarters = quarters(self.frequencies)
        limbs = [[g >> 32 * i & 0xFFFFFFFF for g in self.quarters] for i in range(LIMBS)]
        self._limbs = np.array(limbs, np.uint64)

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return cos and sin, float64 (n, h) each, of integer positions (n,) within +-2^53."""
        limbs = self._times(np.abs(positions).astype(np.uint64)[:, None])
        quadrant = limbs[-1] >> np.uint64(30)
        limbs[-1] &= np.uint64(2**30 - 1)
        negative = (limbs[-1] >> np.uint64(29)).astype(bool)
        limbs = _negated(limbs, negative)
        size = np.zeros(negative.shape)
        for i, limb in enumerate(limbs):  # the lowest first: each rounding is relative to the sum
            size += np.ldexp(limb.astype(np.float64), 32 * i - PLACES)
        r = np.where(negative, -size, size) * (np.pi / 2)
        self.nearest = min(self.nearest, float(np.abs(r).min(initial=1.0)))
        quadrant = (quadrant + negative) & np.uint64(3)
        c, s = np.cos(r), np.sin(r)
        odd = (quadrant & np.uint64(1)).astype(bool)
        cos = np.where(odd, s, c) * np.where((quadrant == 1) | (quadrant == 2), -1.0, 1.0)
        sin = np.where(odd, c, s) * np.where(quadrant >= 2, -1.0, 1.0)
        return cos, sin * np.where(positions < 0, -1.0, 1.0)[:, None]

    def _times(self, m: np.ndarray) -> np.ndarray:
        """Return m * g modulo 2^192, as limbs (LIMBS, n, h) of 32 bits."""
        sums = np.zeros((LIMBS + 2, m.shape[0], self._limbs.shape[1]), np.uint64)
        for place, digit in enumerate((m & _LOW, m >> _32)):
            for i in range(LIMBS - place):
                product = digit * self._limbs[i]
                sums[i + place] += product & _LOW
                sums[i + place + 1] += product >> _32
        for i in range(LIMBS):
            sums[i + 1] += sums[i] >> _32
            sums[i] &= _LOW
        return sums[:LIMBS]


def _negated(limbs: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Return 2^PLACES - x for each x in limbs where `where` is true; the top limb has 30 bits."""
    carry = np.ones(where.shape, np.uint64)
    out = np.empty_like(limbs)
    for i, limb in enumerate(limbs):
        mask = _LOW if i < LIMBS - 1 else np.uint64(2**30 - 1)
        turned = (limb ^ mask) + carry
        carry = turned >> _32
        out[i] = np.where(where, turned & mask, limb)
    return out


def quarters(frequencies: Sequence) -> list[int]:
    """Return inv_freq * 2/pi modulo 4, cut after PLACES binary places."""
    with mpmath.workprec(BITS):
        scale = 2 / mpmath.pi * mpmath.mpf(2) ** PLACES
        return [int(mpmath.floor(mpmath.mpf(f) * scale)) % 2 ** (PLACES + 2) for f in frequencies]


def ideal_frequencies(dim: int, theta: float) -> list[mpmath.mpf]:
    """Return theta^(-2i/dim) with BITS bits."""
    with mpmath.workprec(BITS):
        return [mpmath.power(theta, -mpmath.mpf(2 * i) / dim) for i in range(dim // 2)]


def near_quarter_turns(quarter: int, low: int, high: int, count: int) -> list[int]:
    """Return up to `count` positions in [low, high) that are near a multiple of a quarter turn.

    The nearest of all positions below a bound are the denominators of the continued fraction of
    g = quarter / 2^PLACES. In [low, high), their multiples and sums are tried.
    """
    one = 1 << PLACES
    positions, before, now = set(), 0, 1
    a, b = one, quarter % one
    while b and now < high:
        first = max(1, -(-low // now))
        for step in range(first, first + count):
            positions |= {step * now, step * now + before}
        quotient = a // b
        a, b = b, a % b
        before, now = now, quotient * now + before
    inside = [m for m in positions if low <= m < high]

    def distance(m: int) -> int:
        part = m * quarter % one
        return min(part, one - part)

    return sorted(inside, key=distance)[:count]
