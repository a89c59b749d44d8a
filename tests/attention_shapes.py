"""Shapes of attention, and bounds with their reasons, for tests of arrays and of tensors."""

from typing import NamedTuple

import numpy as np
from cases import SIZES, Bound

BOUNDS = {
    "terms": Bound(
        8, "of the entry's own sum of terms' magnitudes: exp to four units, quotient and products "
        "round once each; a weight's relative error is its score's absolute one, so each counts "
        "1 + the score's terms"
    ),
    "sum": Bound(
        1 / 2, "of the same, for each term of the longest sum: each addition in sequence rounds, "
        "by a unit of the sum so far, which is half the whole one on average"
    ),
    "low": Bound(2, "of the error of rounding the exact result once, and what float32 has"),
    "out": Bound(
        1, "of what the rounding of out adds to a gradient of low precision, as backward reads it"
    ),
}  # fmt: skip


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    m: int
    n: int
    d: int
    dv: int


LEADS = ((1, 1, 1), (2, 4, 2), (1, 3, 3), (2, 2, 1), (1, 6, 2), (3, 1, 1))
# Every size is once in every place, because 5, 7 and 3 have no common factor with 17, their number.
SHAPES = [
    Shape(*LEADS[i % 6], *(SIZES[(a * i + b) % 17] for a, b in ((1, 0), (5, 3), (7, 1), (3, 2))))
    for i in range(17)
]
LARGE = [  # more than two blocks of queries, of keys, of rows of a table
    Shape(1, 2, 1, 131, 131, 32, 32),
    Shape(2, 1, 1, 300, 777, 24, 40),
    Shape(1, 4, 2, 3, 1100, 16, 16),
    Shape(1, 3, 3, 1, 2000, 64, 64),
    Shape(1, 1, 1, 700, 65, 8, 8),
    Shape(1, 2, 2, 513, 513, 64, 64),
]


def largest(x):
    x = np.abs(x[np.isfinite(x)])
    return x.max(initial=0.0)


def rounding(size, unit, dtype, terms):
    """Return the allowed error of each entry, a sum of `terms` numbers in arithmetic of `dtype`.

    Numbers below the smallest normal number may be dropped.
    """
    tiny = float(np.finfo(dtype).tiny)
    units = BOUNDS["terms"].units + BOUNDS["sum"].units * terms
    return units * (unit * size + tiny * (1 + largest(size)))
