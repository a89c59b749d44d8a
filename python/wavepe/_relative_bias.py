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
    """``out[i, j] = q[i] . p[delta - first]`` with ``delta = i + (keys - m) - j`` [W], [S].

    The last query stands on the last key. No scaling, no mask. Subnormal numbers count as zero.

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
    q, p = (_checks.real_array(n, x, any_size=True) for n, x in (("q", q), ("p", p)))
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
    queries, rows, d = q.shape[-2], p.shape[-2], q.shape[-1]
    out = _checks.out_array(out, (*batch, queries, keys), dtype)
    if out.size == 0:
        return out
    begin, end = reached_rows(rows, first, edge, 1 - queries, keys - 1)
    # The size of the packed table must not overflow.
    if (end - begin + 2**6) * d >= 2**45:
        raise MemoryError(f"p {p.dtype} {p.shape} needs more memory than there is")
    q, p = (_ready(x, batch, dtype) for x in (q, p[..., begin:end, :]))
    apart = out.flags.aligned and not any(np.may_share_memory(out, x) for x in (q, p))
    result = out if apart else np.empty_like(out)  # all of q and p is read until the end
    kernels = _numpy.kernels()

    def part(i: slice) -> None:  # its last query stands queries - i.stop before the last key
        shifted = first + begin + (queries - i.stop)
        _numpy.relative_bias(kernels, q[..., i, :], p, result[..., i, :], shifted, edge)

    work = out.size * d // 8  # as much as rotating so many elements
    _threads.run(part, _threads.cut(queries, work))
    if result is not out:
        out[...] = result
    return out


def reached_rows(rows: int, first: int, edge: int, nearest: int, farthest: int) -> tuple[int, int]:
    """Begin and end of the rows that the deltas nearest..farthest read; row 0 is that of first.

    With beyond="edge" the table holds rows, and one at least is read.
    """
    begin = max(0, min(nearest - first, rows))
    end = max(0, min(farthest + 1 - first, rows))
    if edge:  # the nearest row of what is out of reach stays
        begin = min(begin, rows - 1)
        end = max(end, begin + 1)
    return begin, max(begin, end)


def _ready(x: np.ndarray, batch: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """x as the kernels read it: of their dtype, aligned, with the result's leading axes."""
    x = x.astype(dtype, copy=False)
    x = x if x.flags.aligned else x.copy()
    return np.broadcast_to(x, (*batch, *x.shape[-2:]))
