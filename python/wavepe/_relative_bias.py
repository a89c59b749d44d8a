"""The query-dependent relative term of wavelet, Shaw and Transformer-XL encodings [W][S][X]."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from . import _checks, _numpy, _threads

BEYOND = ("zero", "edge")  # in the order of wpe_beyond, csrc/wavepe.h


def relative_bias(
    q: ArrayLike,
    p: ArrayLike,
    keys: int,
    *,
    first: int = 0,
    beyond: str = "zero",
    out: np.ndarray | None = None,
) -> np.ndarray:
    """``out[i, j] = q[i] . p[delta - first]`` with ``delta = i + (keys - m) - j`` [W][S].

    The last query stands on the last key. No scaling, no mask.

    Parameters
    ----------
    q : array (..., m, d) of float32 or float64
        Queries, any strides.
    p : array (w, d), or (..., w, d) whose leading axes broadcast with q's
        Row r belongs to delta = first + r.
    keys : int
        Number of keys n.
    first : int
        delta of the table's first row.
    beyond : "zero" or "edge"
        A row outside the table counts as zero, or as the nearest row.
    out : array (..., m, n) of the result's dtype, optional

    Returns
    -------
    array (..., m, n)
    """
    q, p = _checks.real_array("q", q), _checks.real_array("p", p)
    if q.ndim < 2 or p.ndim < 2:
        raise ValueError(f"q (..., m, d) and p (..., w, d) needed, got {q.shape} and {p.shape}")
    if q.shape[-1] != p.shape[-1]:
        raise ValueError(f"q has head size {q.shape[-1]}, p has {p.shape[-1]}")
    keys = _checks.integer("keys", keys, 0)
    # Further away no table reaches a key, and sums with it cannot overflow.
    first = max(-(2**62), min(2**62, _checks.integer("first", first)))
    edge = BEYOND.index(_checks.choice("beyond", beyond, BEYOND))
    if edge and p.shape[-2] == 0:
        raise ValueError('beyond="edge" needs a table of at least one row, p has none')
    batch = _checks.broadcast("leading axes of q and p", q.shape[:-2], p.shape[:-2])
    dtype = np.result_type(q.dtype, p.dtype, np.float32)
    if dtype not in (np.float32, np.float64):
        raise TypeError(f"q and p must be float32 or float64, got {q.dtype} and {p.dtype}")
    queries = q.shape[-2]
    out = _checks.out_array(out, (*batch, queries, keys), dtype)
    overlap = np.may_share_memory(out, q) or np.may_share_memory(out, p)
    result = np.empty_like(out) if overlap else out  # all of q and p is read until the end

    def part(i: slice) -> None:  # its last query stands queries - i.stop before the last key
        shifted = first + (queries - i.stop)
        _numpy.relative_bias(q[..., i, :], p, shifted, edge, out=result[..., i, :])

    work = out.size * q.shape[-1] // 8  # as much as rotating so many elements
    _threads.run(part, _threads.cut(queries, work))
    if overlap:
        out[...] = result
    return out
