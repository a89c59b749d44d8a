"""The relative term of the wavelet, Shaw and Transformer-XL encodings [W][S][X]."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .. import _numpy
from ..common import checks
from . import threads

BEYOND = ("zero", "edge")  # in the order of wpe_beyond, csrc/wavepe.h


class Table(NamedTuple):
    """A table that a query reads, with its range; `attention` and `relative_bias` take it whole.

    Attributes
    ----------
    p : array or Tensor (w, d) or (heads, w, d)
        Row r belongs to the distance delta = first + r.
    first : int
        The delta of the first row.
    beyond : "zero" or "edge"
        What stands for a row outside the table: zeros, or the nearest row.

    Examples
    --------
    >>> import numpy as np
    >>> import wavepe
    >>> q, p = np.ones((2, 1)), np.array([[10.0], [20.0]])
    >>> wavepe.relative_bias(q, wavepe.Table(p, first=1), 3)
    array([[10.,  0.,  0.],
           [20., 10.,  0.]])
    """

    p: Any
    first: int = 0
    beyond: str = "zero"


class Bias(NamedTuple):
    """A number for each head and distance, with its range; `attention` takes it whole.

    Attributes
    ----------
    b : array or Tensor (w,) or (heads, w)
        Number r belongs to the distance delta = first + r.
    first, beyond : int, "zero" or "edge"
        As in `Table`.
    """

    b: Any
    first: int = 0
    beyond: str = "zero"


def ranged(name: str, table: Any, first: Any, beyond: Any) -> tuple[Any, Any, Any]:
    """Return array, first and beyond of a `Table` or `Bias`, or of an array with these two."""
    if not isinstance(table, Table | Bias):
        return table, first, beyond
    kind = Table if name == "p" else Bias
    if not isinstance(table, kind):
        raise TypeError(f"{name} must be an array or a {kind.__name__}, got {type(table).__name__}")
    if not (first == 0 and beyond == "zero"):
        raise ValueError(
            f"{name} is a {type(table).__name__}, which has its own first and beyond; got "
            f"first={first!r} and beyond={beyond!r} too"
        )
    return tuple(table)


def relative_bias(
    q: ArrayLike,
    p: ArrayLike | Table,
    keys: int,
    *,
    first: int = 0,
    beyond: str = "zero",
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return the relative term of attention scores, query times table row of the distance.

    ``out[i, j] = q[i] . p[delta - first]``, where ``delta = i + (n - m) - j`` is the distance from
    key j to query i. The last query and the last key belong to the same token. Nothing is scaled
    or masked. Subnormal numbers count as zero.

    Parameters
    ----------
    q : array (..., m, d), float16, float32, float64 or ml_dtypes.bfloat16
        Queries, with any strides and in any byte order, as everywhere in wavepe.
    p : array (w, d), or (..., w, d) whose leading axes broadcast with those of q, or Table
        The table, whose first row belongs to the distance `first`. A `Table` has its own first and
        beyond.
    keys : int
        The number n of keys.
    first, beyond : int, "zero" or "edge"
        As in `Table`.
    out : array (..., m, n) of the result's dtype, optional
        The array that receives the result.

    Returns
    -------
    out : array (..., m, n)
        float64 if q or p is float64, otherwise float32.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type or dtype; if the shapes do not fit together, if `keys` is
        negative, or if `beyond` is "edge" and the table has no row.

    References
    ----------
    Shaw et al., "Self-attention with relative position representations", NAACL 2018,
    arXiv 1803.02155. Oka et al., "Wavelet-based positional representation for long context",
    ICLR 2025, arXiv 2502.02004.

    Examples
    --------
    >>> import numpy as np
    >>> import wavepe
    >>> q, p = np.ones((2, 1)), np.array([[10.0], [20.0]])
    >>> wavepe.relative_bias(q, p, 3)
    array([[20., 10.,  0.],
           [ 0., 20., 10.]])
    """
    p, first, beyond = ranged("p", p, first, beyond)
    q, p = real_operand("q", q), real_operand("p", p)
    if q.ndim < 2 or p.ndim < 2:
        raise ValueError(
            f"q must be (..., m, d) and p (..., w, d), got shapes {q.shape} and {p.shape}"
        )
    if q.shape[-1] != p.shape[-1]:
        raise ValueError(
            f"q and p must have the same head size, got {q.shape[-1]} and {p.shape[-1]}"
        )
    keys = checks.integer("keys", keys, 0)
    # Beyond 2^62 no table reaches a key. Up to there, sums cannot overflow.
    first = max(-(2**62), min(2**62, checks.integer("first", first)))
    edge = BEYOND.index(checks.choice("beyond", beyond, BEYOND))
    checks.edge("beyond", beyond, p.shape[-2])
    batch = checks.broadcast("leading axes of q and p", q.shape[:-2], p.shape[:-2])
    q, p = (x.astype(np.float32) if checks.is_bfloat16(x.dtype) else x for x in (q, p))
    dtype = np.result_type(q.dtype, p.dtype, np.float32)
    if dtype not in (np.float32, np.float64):
        raise TypeError(f"q and p must be float32 or float64, got {q.dtype} and {p.dtype}")
    queries, rows, d = q.shape[-2], p.shape[-2], q.shape[-1]
    out = checks.out_array(out, (*batch, queries, keys), dtype)
    if out.size == 0:
        return out
    begin, end = reached_rows(rows, first, edge, 1 - queries, keys - 1)
    # The size of the kernel's packed table must not overflow.
    if (end - begin + 2**6) * d >= 2**45:
        raise MemoryError(f"p {p.dtype} {p.shape} needs more memory than there is")
    q, p = (cast(x, dtype) for x in (q, p[..., begin:end, :]))
    q, p = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (q, p))
    # The kernel reads q and p until its end, so it may not write to their memory.
    direct = out.flags.aligned and not any(np.may_share_memory(out, x) for x in (q, p))
    result = out if direct else np.empty_like(out)
    kernels = _numpy.kernels()

    def part(i: slice) -> None:
        # The kernel takes its last query for the last key's token; here it is earlier by
        # queries - i.stop tokens.
        shifted = first + begin + (queries - i.stop)
        _numpy.relative_bias(kernels, q[..., i, :], p, result[..., i, :], shifted, edge)

    work = out.size * d // 8  # rotating this many elements takes as long
    threads.run(part, threads.cut(queries, work))
    if result is not out:
        out[...] = result
    return out


def rows_at(deltas: np.ndarray, rows: np.ndarray, first: int, beyond: str, axis: int) -> np.ndarray:
    """Return the rows of a table (axis -2), or the numbers of a bias (axis -1), of `deltas`."""
    place, count = deltas - first, rows.shape[axis]
    if count == 0:
        shape = list(rows.shape)
        shape[axis] = len(place)
        return np.zeros_like(rows, shape=shape)
    selected = rows.take(place.clip(0, count - 1), axis)
    if beyond == "zero":
        outside = (place < 0) | (place >= count)
        selected[(..., outside, slice(None)) if axis == -2 else (..., outside)] = 0
    return selected


def reached_rows(rows: int, first: int, edge: int, nearest: int, farthest: int) -> tuple[int, int]:
    """Return begin and end of the table rows that the deltas nearest..farthest read.

    Row 0 belongs to the delta `first`. With `edge` the table has rows, and at least one is read.
    """
    begin = max(0, min(nearest - first, rows))
    end = max(0, min(farthest + 1 - first, rows))
    if edge:  # keep the edge row that stands for deltas outside the table
        begin = min(begin, rows - 1)
        end = max(end, begin + 1)
    return begin, max(begin, end)


def real_operand(name: str, value: ArrayLike) -> np.ndarray:
    """Return `value` as an array of real numbers, bfloat16 included."""
    array = checks.array_of(name, value)
    # Compare the class by name, because importing it needs torch.
    if array.dtype == object and type(value).__name__ == "RelativeTable":
        raise TypeError(f"{name} must be an array, got a RelativeTable: pass table.p")
    return checks.real_array(name, array, bfloat16=True)


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the array in `dtype` and aligned; no copy if it is so already."""
    return array.astype(dtype, copy=array.dtype != dtype or not array.flags.aligned)
