"""Attention with a relative term [W][S][X], slopes [A] or a bias, in memory linear in length."""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import ArrayLike

from .. import _numpy
from ..common import checks
from . import threads
from .relative_bias import BEYOND, Bias, Table, cast, ranged, reached_rows, real_operand

_FARTHEST = 2**60  # beyond the distance of any key; sums with it do not overflow
_Arrays = dict[str, np.ndarray]


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    p: ArrayLike | Table | None = None,
    first: int = 0,
    beyond: str = "zero",
    q_rel: ArrayLike | None = None,
    slopes: ArrayLike | None = None,
    bias: ArrayLike | Bias | None = None,
    bias_first: int = 0,
    bias_beyond: str = "zero",
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    sinks: ArrayLike | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Return softmax attention whose scores depend on the distance of query and key.

    ``score[i, j] = (q[i] . k[j] + r[i] . p[delta - first]) * scale - slope * abs(delta)
    + bias[delta - bias_first]``, where ``delta = i + (n - m) - j`` is the distance from key j to
    query i, and r is q_rel or q. The last query and the last key belong to the same token. No
    array of size (m, n) is made: memory grows with m + n.

    Parameters
    ----------
    q : array (..., H, m, d), or (m, d) without heads
        Queries of float16, float32, float64 or ml_dtypes.bfloat16, with any strides.
    k : array (..., Hk, n, d)
        Keys. H is a multiple of Hk, and query head h reads key head h // (H / Hk). The other
        leading axes broadcast, and so does a head axis of size 1. If the dtypes of q, k, v, p and
        q_rel differ, NumPy's common dtype is used. Integers become float32 or float64.
    v : array (..., Hk, n, dv)
        Values of the keys. The rules for k hold for v, too.
    p : array (w, c), or (..., H, w, c) whose leading axes broadcast with those of q, or Table
        The table of a relative encoding: wavelet, Shaw or Transformer-XL. c is d, or the size of
        q_rel. A `wavepe.Table` has its own first and beyond.
    q_rel : array (..., H, m, c) whose leading axes broadcast with those of q, optional
        The factor r of the table in place of q. A small c makes the table's products cheap.
    slopes : array (H,), or (..., H) that broadcasts with q's leading axes, optional
        ALiBi's slope of each head, read as float64.
    bias : array (w',), or (..., H, w') whose leading axes broadcast with those of q, or Bias
        A number for each delta. It is added to the score and not scaled. It is read as float32, or
        as float64 if q is float64. A `wavepe.Bias` has its own first and beyond.
    first, bias_first : int
        The deltas of the first row of p and of the first number of `bias`.
    beyond, bias_beyond : "zero" or "edge"
        What stands for a row or number outside: zero, or the nearest one.
    causal : bool
        Hide keys with delta < 0.
    window : int, optional
        Hide keys with delta >= window.
    scale : float, optional
        The factor on the products; None is d^-1/2.
    return_lse : bool
        Whether to return lse as well.
    sinks : array (H,), or (..., H) that broadcasts with q's leading axes, optional
        One more score for each head, which has no value: exp(sink) is added to the sum that divides
        the weights. It is not scaled. -inf means none.

    Returns
    -------
    out : array (..., H, m, dv)
        The attention output in the common dtype of the inputs. It is 0 for a query that sees no
        key.
    lse : array (..., H, m), only with `return_lse`
        The logarithm of the sum of exp(score) over the keys and the sink, float32 (float64 for
        float64 inputs). For a query that sees no key it is the sink, or -inf without one.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type, if a dtype is not a real number, or if the dtypes have no
        common one; if shapes do not fit together, or if a value is out of range.

    Notes
    -----
    Softmax and sums are computed in float32, or in float64 for float64 inputs. Threads
    (`set_num_threads`) divide the heads and blocks of queries among them, and the results are
    bitwise equal for any number of threads. NaN in a hidden key or value reaches no result.
    Subnormal numbers count as zero.

    References
    ----------
    Tables: Oka et al., "Wavelet-based positional representation for long context", ICLR 2025,
    arXiv 2502.02004; Shaw et al., 2018, arXiv 1803.02155; Dai et al., "Transformer-XL", 2019,
    arXiv 1901.02860. Slopes: Press et al., ALiBi, 2022, arXiv 2108.12409.

    Examples
    --------
    >>> import numpy as np
    >>> import wavepe
    >>> q = k = v = np.ones((8, 5, 16), np.float32)  # 8 heads, 5 tokens, head size 16
    >>> wavepe.attention(q, k, v, slopes=wavepe.alibi_slopes(8)).shape
    (8, 5, 16)
    """
    p, first, beyond = ranged("p", p, first, beyond)
    bias, bias_first, bias_beyond = ranged("bias", bias, bias_first, bias_beyond)
    optional = {name: x for name, x in (("p", p), ("q_rel", q_rel)) if x is not None}
    operands = {"q": q, "k": k, "v": v, **optional}
    arrays = _promoted({name: real_operand(name, x) for name, x in operands.items()})
    checks.sizes(arrays)
    (queries, d), (keys, dv) = (arrays[name].shape[-2:] for name in "qv")
    columns = (d, dv, arrays["p"].shape[-1] if "p" in arrays else d)
    # before the kernels' scratch memory overflows, as attention_call.cpp
    if max(columns) >= 2**20 or (queries + keys + 2**12) * (sum(columns) + 2**8) >= 2**45:
        raise MemoryError(f"attention of {checks.listed(arrays)} needs more memory than there is")
    for name, of_heads in {"slopes": slopes, "sinks": sinks}.items():
        if of_heads is not None:
            arrays[name] = real_operand(name, of_heads).astype(np.float64)
    if bias is not None:
        numbers = real_operand("bias", bias)
        if not numbers.ndim:
            raise ValueError("bias must be (w,) or (..., H, w), got shape ()")
        wide = arrays["q"].dtype == np.float64
        arrays["bias"] = cast(numbers, np.dtype(np.float64 if wide else np.float32))
    edge = BEYOND.index(checks.choice("beyond", beyond, BEYOND))
    bias_edge = BEYOND.index(checks.choice("bias_beyond", bias_beyond, BEYOND))
    causal = checks.flag("causal", causal)
    reach = _FARTHEST if window is None else min(checks.integer("window", window, 0), _FARTHEST)
    first, bias_first = checks.integer("first", first), checks.integer("bias_first", bias_first)
    if p is not None:
        rows, first = _reachable(arrays, "p", -2, first, edge, causal, reach)
        arrays["p"] = arrays["p"][..., rows, :]
    if bias is not None:
        rows, bias_first = _reachable(arrays, "bias", -1, bias_first, bias_edge, causal, reach)
        arrays["bias"] = arrays["bias"][..., rows]
    scale = 1 / math.sqrt(max(d, 1)) if scale is None else checks.finite("scale", scale)
    return_lse = checks.flag("return_lse", return_lse)
    out, lse = _run(arrays, (scale, first, edge, bias_first, bias_edge, causal, reach))
    return (out, lse) if return_lse else out


def _promoted(arrays: _Arrays) -> _Arrays:
    """Return the arrays in one dtype that the kernels have, and aligned."""
    try:
        dtype = np.result_type(*(x.dtype for x in arrays.values()))
    except TypeError:
        raise TypeError(f"the arrays need a common dtype, got {checks.listed(arrays)}") from None
    if dtype.kind in "iu":
        dtype = np.result_type(dtype, np.float32)
    if not (checks.is_bfloat16(dtype) or dtype in (np.float16, np.float32, np.float64)):
        raise TypeError(
            "the common dtype must be float16, float32, float64 or ml_dtypes.bfloat16, got "
            f"{dtype} for {checks.listed(arrays)}"
        )
    return {name: cast(x, dtype) for name, x in arrays.items()}


def _reachable(
    arrays: _Arrays, name: str, axis: int, first: int, edge: int, causal: bool, window: int
) -> tuple[slice, int]:
    """Return the rows of p or bias that a query can reach, and the delta of the first."""
    rows, queries, keys = arrays[name].shape[axis], arrays["q"].shape[-2], arrays["k"].shape[-2]
    checks.edge("beyond" if name == "p" else "bias_beyond", BEYOND[edge], rows)
    nearest, farthest = 0 if causal else 1 - queries, min(keys, window) - 1
    begin, end = reached_rows(rows, first, edge, nearest, farthest)
    return slice(begin, end), max(-_FARTHEST, min(_FARTHEST, first)) + begin


def _lead(arrays: _Arrays) -> tuple[tuple[int, ...], int]:
    """Return the leading axes of the results, heads last, and the number of key heads."""
    core = {"bias": 1, "slopes": 0, "sinks": 0}
    axes = {name: x.shape[: x.ndim - core.get(name, 2)] for name, x in arrays.items()}

    def common(*names: str) -> tuple[int, ...]:
        present = [name for name in names if name in axes]
        return checks.broadcast(
            f"leading axes of {', '.join(present)}", *(axes[name] for name in present)
        )

    query_axes, key_axes = common("q", "p", "q_rel", "slopes", "bias", "sinks"), common("k", "v")
    batch = checks.broadcast("axes before the heads of q and k", query_axes[:-1], key_axes[:-1])
    heads, key_heads = (axes[-1] if axes else 1 for axes in (query_axes, key_axes))
    if heads == 1:
        heads = key_heads
    checks.heads(heads, key_heads, arrays)
    return (*batch, heads) if query_axes or key_axes else (), key_heads


def _run(
    arrays: _Arrays, options: tuple[float, int, int, int, int, bool, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return out and lse; `options` are the last arguments of the kernel."""
    lead, key_heads = _lead(arrays)
    key_lead = (*lead[:-1], key_heads)
    group_lead = (*key_lead, (lead[-1] if lead else 1) // max(key_heads, 1))
    q, k, v = (arrays[name] for name in "qkv")
    (queries, d), (keys, dv) = q.shape[-2:], v.shape[-2:]
    out = np.empty((*lead, queries, dv), q.dtype)
    lse = np.empty(out.shape[:-1], np.float64 if q.dtype == np.float64 else np.float32)
    if not lse.size:
        return out, lse

    def split(x: np.ndarray, *rest: int) -> np.ndarray:
        """Return a view (..., key heads, query heads of each, *rest)."""
        return _bits(x, (*lead, *rest)).reshape(*group_lead, *rest)

    names = ("p", "q_rel", "slopes", "bias", "sinks")
    p, q_rel, slopes, bias, sinks = (arrays.get(name) for name in names)
    if p is not None and not p.size:
        p = None
    operands = (
        split(q, queries, d),
        _bits(k, (*key_lead, keys, d)),
        _bits(v, (*key_lead, keys, dv)),
        None if p is None else split(p, *p.shape[-2:]),
        None if p is None or q_rel is None else split(q_rel, *q_rel.shape[-2:]),
        None if slopes is None else split(slopes),
        split(bias, bias.shape[-1]) if bias is not None and bias.size else None,
        None if sinks is None else split(sinks),
        split(out, queries, dv),
        split(lse, queries),
    )
    blocks = -(-queries // _numpy.ATTENTION_QUERY_BLOCK)
    work = lse.size * keys * (d + dv) // 8  # rotating this many elements takes as long
    call = functools.partial(_numpy.attention, _numpy.kernels(), *operands, *options)
    threads.run(
        lambda units: call(units.start, units.stop), threads.cut(lse.size // queries * blocks, work)
    )
    return out, lse


def _bits(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return x broadcast to `shape`; bfloat16, which NumPy lacks, as integers of the same bits."""
    x = x.view(np.uint16) if checks.is_bfloat16(x.dtype) else x
    return x if x.shape == shape else np.broadcast_to(x, shape)
