"""Attention, for tests of arrays and of tensors: shapes, bounds with their reasons, and options,
which are functions of a random generator and a Shape."""

from typing import NamedTuple

import numpy as np
import wavepe
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
    Shape(1, 2, 1, 131, 131, 32, 32), Shape(2, 1, 1, 300, 777, 24, 40),
    Shape(1, 4, 2, 3, 1100, 16, 16), Shape(1, 3, 3, 1, 2000, 64, 64), Shape(1, 1, 1, 700, 65, 8, 8),
    Shape(1, 2, 2, 513, 513, 64, 64),
]  # fmt: skip
EMPTY = [
    Shape(0, 2, 1, 5, 6, 4, 3), Shape(2, 0, 0, 5, 6, 4, 3), Shape(2, 0, 2, 5, 6, 4, 3),
    Shape(2, 2, 1, 0, 6, 4, 3), Shape(2, 2, 1, 5, 0, 4, 3), Shape(2, 2, 1, 1, 0, 4, 3),
    Shape(2, 2, 1, 5, 6, 0, 3), Shape(2, 2, 1, 1, 6, 0, 3), Shape(2, 2, 1, 5, 6, 4, 0),
    Shape(2, 2, 1, 5, 6, 0, 0), Shape(0, 0, 0, 0, 0, 0, 0),
]  # fmt: skip


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


def relative(rng, s, w=None, *, per_head=False, q_rel=False, c=None, **rest):
    """A table, and q_rel if asked for. c is the size of both, if it is not that of the head."""
    w, size = max(1, s.n // 2) if w is None else w, s.d if c is None else c
    args = {"p": rng.normal(size=(*([s.heads] if per_head else []), w, size)), **rest}
    if q_rel or c is not None:
        args["q_rel"] = rng.normal(size=(s.batch, s.heads, s.m, size))
    return args


def sinks(rng, s):
    return {"sinks": rng.normal(size=s.heads)}


def biased(rng, s, w=None, *, per_head=True, first=0, beyond="zero", **rest):
    w = max(1, s.n // 2) if w is None else w
    bias = rng.normal(size=(*([s.heads] if per_head else []), w))
    return {"bias": bias, "bias_first": first, "bias_beyond": beyond, **rest}


def biased_both_sides(rng, s, **rest):
    w = max(1, s.m + s.n - 3)
    return biased(rng, s, w, first=s.n - s.m - (w // 2), causal=False, **rest)


def both_sides(rng, s, **rest):
    """A table of every delta of a model that is not causal, without its outermost ones."""
    w = max(1, s.m + s.n - 3)
    return relative(rng, s, w, first=s.n - s.m - (w // 2), causal=False, **rest)


def per_row(rng, s):
    return rng.integers(-s.m, s.n + 3, s.batch)


def keys_seen(rng, s, batch=None):
    return rng.random((batch or s.batch, s.n)) < 0.6


def pairs_seen(rng, s, batch=None, heads=None):
    return rng.random((batch or s.batch, heads or s.heads, s.m, s.n)) < 0.5


def packed(rng, s):
    return np.cumsum(rng.random((s.batch, s.n)) < 0.2, -1)


def slopes(s):
    return wavepe.alibi_slopes(max(s.heads, 1))[: s.heads]


def everything(rng, s, **rest):
    drawn = relative(rng, s, s.n // 2 + 1, per_head=True, c=s.d // 2 + 1, first=-2, beyond="edge")
    drawn |= sinks(rng, s)
    drawn |= {"slopes": slopes(s), "window": s.n // 2 + 2, "softcap": 3.0, "scale": 0.4}
    drawn |= biased(rng, s, s.n // 3 + 1, first=1, beyond="edge")
    drawn |= {"key_mask": keys_seen(rng, s), "mask": pairs_seen(rng, s, 1, 1)}
    return drawn | {"offset": per_row(rng, s), "dropout_p": 0.2} | rest


OPTIONS = {
    "plain": lambda rng, s: {},
    "every key": lambda rng, s: {"causal": False},
    "window": lambda rng, s: {"window": max(1, s.n // 3)},
    "window of nothing": lambda rng, s: {"window": 0},
    "window, future too": lambda rng, s: {"window": s.n // 4, "causal": False},
    "softcap": lambda rng, s: {"softcap": 1.5},
    "scale": lambda rng, s: {"scale": -0.7},
    "scale 0": lambda rng, s: {"scale": 0.0},
    "slopes": lambda rng, s: {"slopes": slopes(s)},
    "slopes, both sides": lambda rng, s: {"slopes": slopes(s), "causal": False},
    "bias": lambda rng, s: biased(rng, s),
    "bias of all heads": lambda rng, s: biased(rng, s, per_head=False),
    "bias from 2": lambda rng, s: biased(rng, s, first=2),
    "bias longer, from -3": lambda rng, s: biased(rng, s, 2 * (s.m + s.n), first=-3),
    "bias in a window": lambda rng, s: biased(rng, s, s.n, window=s.n // 3 + 1, per_head=False),
    "bias, both sides": lambda rng, s: biased_both_sides(rng, s),
    "bias, both sides, edge": lambda rng, s: biased_both_sides(rng, s, beyond="edge"),
    "bias, edge": lambda rng, s: biased(rng, s, beyond="edge"),
    "bias, edge of 1 for all": lambda rng, s: biased(
        rng, s, 1, first=2, beyond="edge", per_head=False, causal=False
    ),
    "bias out of reach": lambda rng, s: biased(rng, s, first=10**6),
    "bias, edge far above": lambda rng, s: biased(rng, s, first=10**6, beyond="edge"),
    "bias, edge far below": lambda rng, s: biased(rng, s, first=-(10**6), beyond="edge"),
    "bias, table": lambda rng, s: biased_both_sides(rng, s) | both_sides(rng, s, beyond="edge"),
    "bias, slopes, softcap, scale": lambda rng, s: {
        "softcap": 2.0, "slopes": slopes(s), "scale": 0.3
    } | biased_both_sides(rng, s, beyond="edge"),
    "bias, offset of rows": lambda rng, s: biased_both_sides(
        rng, s, offset=per_row(rng, s), beyond="edge"
    ),
    "bias, offset far": lambda rng, s: biased(rng, s, offset=2**40, first=2**40 - 2),
    "bias, segments": lambda rng, s: biased_both_sides(rng, s, segments=packed(rng, s) % 3),
    "bias, mask": lambda rng, s: biased(
        rng, s, mask=pairs_seen(rng, s), key_mask=keys_seen(rng, s), per_head=False
    ),
    "bias, dropout": lambda rng, s: biased(rng, s, dropout_p=0.3),
    "table": lambda rng, s: relative(rng, s),
    "table per head": lambda rng, s: relative(rng, s, per_head=True),
    "table, q_rel": lambda rng, s: relative(rng, s, q_rel=True),
    "table, q_rel, per head": lambda rng, s: relative(rng, s, per_head=True, q_rel=True),
    "table from 2": lambda rng, s: relative(rng, s, first=2),
    "table from -3": lambda rng, s: relative(rng, s, first=-3),
    "table longer": lambda rng, s: relative(rng, s, 2 * (s.m + s.n)),
    "table in a window": lambda rng, s: relative(rng, s, s.n, window=s.n // 3 + 1),
    "table of 1 row": lambda rng, s: relative(rng, s, 1, beyond="edge"),
    "table, both sides": lambda rng, s: both_sides(rng, s),
    "table, both sides, edge": lambda rng, s: both_sides(rng, s, beyond="edge"),
    "table, both sides, per head": lambda rng, s: both_sides(rng, s, per_head=True, q_rel=True),
    "edge": lambda rng, s: relative(rng, s, beyond="edge"),
    "edge from 2, per head": lambda rng, s: relative(rng, s, per_head=True, first=2, beyond="edge"),
    "edge of q_rel, causal no": lambda rng, s: relative(
        rng, s, 5, first=-2, beyond="edge", q_rel=True, causal=False
    ),
    "narrow table": lambda rng, s: relative(rng, s, c=max(1, s.d // 4)),
    "narrow table, both sides, edge": lambda rng, s: both_sides(rng, s, c=8, beyond="edge"),
    "wide table, per head": lambda rng, s: relative(rng, s, per_head=True, c=s.d + 5),
    "table of no columns": lambda rng, s: relative(rng, s, c=0),
    "sinks": lambda rng, s: sinks(rng, s),
    "sinks, some": lambda rng, s: {"sinks": np.where(np.arange(s.heads) % 2, -np.inf, 3.0)},
    "sinks, key_mask of nothing": lambda rng, s: sinks(rng, s) | {
        "key_mask": np.zeros((s.batch, s.n), bool)
    },
    "sinks, segments, dropout": lambda rng, s: relative(
        rng, s, c=3, segments=packed(rng, s), window=s.n // 2, dropout_p=0.3, **sinks(rng, s)
    ),
    "table out of reach": lambda rng, s: relative(rng, s, first=10**6),
    "edge far above": lambda rng, s: relative(rng, s, first=10**6, beyond="edge"),
    "edge far below": lambda rng, s: relative(rng, s, first=-(10**6), beyond="edge"),
    "offset": lambda rng, s: {"offset": 3},
    "offset below 0": lambda rng, s: relative(rng, s, offset=-2, first=-1, beyond="edge"),
    "offset far": lambda rng, s: relative(rng, s, offset=2**40, first=2**40 - 2),
    "offset far below": lambda rng, s: relative(
        rng, s, offset=-(2**40), first=2 - 2**40, causal=False
    ),
    "offset of rows": lambda rng, s: {"offset": per_row(rng, s)},
    "offset of rows, table": lambda rng, s: relative(rng, s, offset=per_row(rng, s)),
    "offset of rows, edge": lambda rng, s: both_sides(
        rng, s, offset=per_row(rng, s).astype(np.int32), beyond="edge"
    ),
    "offset of one": lambda rng, s: {"offset": np.array([1]), "window": 5},
    "key_mask": lambda rng, s: {"key_mask": keys_seen(rng, s)},
    "key_mask of all": lambda rng, s: {"key_mask": keys_seen(rng, s, 1), "causal": False},
    "key_mask of nothing": lambda rng, s: {"key_mask": np.zeros((s.batch, s.n), bool)},
    "segments": lambda rng, s: {"segments": packed(rng, s)},
    "segments, both sides": lambda rng, s: both_sides(rng, s, segments=packed(rng, s) % 3),
    "segments of one row": lambda rng, s: {
        "segments": packed(rng, s)[:1].astype(np.int32), "window": 4
    },
    "mask": lambda rng, s: {"mask": pairs_seen(rng, s), "causal": False},
    "mask of rows": lambda rng, s: {"mask": pairs_seen(rng, s, heads=1)},
    "mask of heads": lambda rng, s: relative(rng, s, mask=pairs_seen(rng, s, batch=1)),
    "mask of all": lambda rng, s: {"mask": pairs_seen(rng, s, 1, 1), "causal": False},
    "dropout": lambda rng, s: {"dropout_p": 0.3},
    "dropout, table": lambda rng, s: relative(rng, s, per_head=True, dropout_p=0.5),
    "dropout of all": lambda rng, s: {"dropout_p": 1.0},
    "shaw": lambda rng, s: relative(rng, s, 9, first=-4, beyond="edge", causal=False),
    "transformer_xl": lambda rng, s: relative(rng, s, s.n, per_head=True, q_rel=True),
    "packed training": lambda rng, s: relative(
        rng, s, segments=packed(rng, s), slopes=slopes(s), window=s.n // 2, dropout_p=0.1
    ),
    "batched decoding": lambda rng, s: relative(
        rng, s, s.n, offset=per_row(rng, s), key_mask=keys_seen(rng, s), softcap=5.0
    ),
    "softcap, slopes, scale": lambda rng, s: {
        "softcap": 2.0, "slopes": slopes(s), "scale": 1.3
    },
    "everything": everything,
    "everything, both sides": lambda rng, s: everything(rng, s, causal=False),
}  # fmt: skip

COMBINED = (
    "plain", "table", "edge from 2, per head", "narrow table, both sides, edge", "bias", "sinks",
    "everything", "everything, both sides",
)  # fmt: skip
