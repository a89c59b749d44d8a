"""Attention with a query-dependent relative term [W][S][X] or slopes [A], in O(L) memory."""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import ArrayLike

from . import _checks, _numpy, _threads
from ._relative_bias import BEYOND, reached_rows

_FAR = 2**60  # further than any key; sums with it do not overflow
_Arrays = dict[str, np.ndarray]


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    p: ArrayLike | None = None,
    first: int = 0,
    beyond: str = "zero",
    slopes: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    bias_first: int = 0,
    bias_beyond: str = "zero",
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Softmax attention whose scores hold a relative term; no (m, n) array is ever made.

    ``score[i, j] = (q[i] . k[j] + q[i] . p[delta - first]) * scale - slope * abs(delta)
    + bias[delta - bias_first]``, with ``delta = i + (n - m) - j``: the last query stands on the
    last key. p is the table of the wavelet [W], Shaw [S] or Transformer-XL [X] encoding, slopes are
    ALiBi's [A], and bias is any other number for each distance. Softmax and sums are float32
    (float64 for float64).

    Parameters
    ----------
    q : array (..., H, m, d)
        float16, float32, float64 or ml_dtypes.bfloat16, any strides. Without heads: (m, d).
    k, v : arrays (..., Hk, n, d) and (..., Hk, n, dv)
        H is a multiple of Hk: query head h reads key head h // (H / Hk). Other leading axes, and
        heads of which there is one, broadcast. Different dtypes of q, k, v and p are promoted as
        NumPy does, integers at least to float32.
    p : array (w, d), or (..., H, w, d) whose leading axes broadcast with q's
        Row r belongs to delta = first + r.
    first : int
        delta of the table's first row.
    beyond : "zero" or "edge"
        A row outside the table counts as zero, or as the nearest row.
    slopes : array (H,), or (..., H) that broadcasts with q's leading axes
        Read as float64.
    bias : array (w',), or (..., H, w') whose leading axes broadcast with q's
        A number for each delta, added to the score; not scaled. Element r belongs to
        delta = bias_first + r. Read as float32 (float64 for float64).
    bias_first : int
        delta of the first number of bias. It does not depend on p's.
    bias_beyond : "zero" or "edge"
        A delta outside bias counts as zero, or as the nearest number.
    causal : bool
        Keys with delta < 0 are hidden.
    window : int, optional
        Keys with delta >= window are hidden.
    scale : float, optional
        None is d^-1/2.
    return_lse : bool
        Return lse, too.

    Returns
    -------
    out : array (..., H, m, dv)
        0 for a query that sees no key.
    lse : array (..., H, m)
        Logarithm of the sum of the exponentials of the scores, float32 (float64 for float64); -inf
        for a query that sees no key.

    Raises
    ------
    TypeError
        Dtypes that are not real numbers or have no common type; arguments of wrong types.
    ValueError
        Shapes that do not fit, values out of range.

    Notes
    -----
    `set_num_threads` counts: heads and blocks of queries are shared out, with the same bits for any
    number of threads. NaN in a hidden key or value reaches no result. Subnormal numbers count as
    zero.
    """
    given = {"q": q, "k": k, "v": v} | ({} if p is None else {"p": p})
    arrays = _promoted({name: _real(name, x) for name, x in given.items()})
    _check_sizes(arrays)
    if slopes is not None:
        array = _real("slopes", slopes)
        _checks.check_size("slopes", array)
        arrays["slopes"] = array.astype(np.float64)
    if bias is not None:
        arrays["bias"] = _bias(bias, arrays["q"].dtype)
    edge = BEYOND.index(_checks.choice("beyond", beyond, BEYOND))
    bias_edge = BEYOND.index(_checks.choice("bias_beyond", bias_beyond, BEYOND))
    causal = _checks.flag("causal", causal)
    reach = _FAR if window is None else min(_window(window), _FAR)
    first, bias_first = _checks.integer("first", first), _checks.integer("bias_first", bias_first)
    if p is not None:
        rows, first = _reachable(arrays, "p", -2, first, edge, causal, reach)
        arrays["p"] = arrays["p"][..., rows, :]
    if bias is not None:
        numbers, bias_first = _reachable(arrays, "bias", -1, bias_first, bias_edge, causal, reach)
        arrays["bias"] = arrays["bias"][..., numbers]
    d = arrays["q"].shape[-1]
    scale = 1 / math.sqrt(max(d, 1)) if scale is None else _checks.finite("scale", scale)
    return_lse = _checks.flag("return_lse", return_lse)
    out, lse = _run(arrays, (scale, first, edge, bias_first, bias_edge, causal, reach))
    return (out, lse) if return_lse else out


def _real(name: str, value: ArrayLike) -> np.ndarray:
    array = _checks.array_of(name, value)
    if array.dtype == object and type(value).__name__ == "RelativeTable":  # torch may be missing
        raise TypeError(f"{name} must be an array, got a RelativeTable: pass table.p")
    if _checks.is_bfloat16(array.dtype):
        return array
    return _checks.real_array(name, array, any_size=True)


def _bias(value: ArrayLike, dtype: np.dtype) -> np.ndarray:
    """bias as the kernels read it: of their own type, and aligned."""
    array = _real("bias", value)
    if not array.ndim:
        raise ValueError("bias must be (w,) or (..., H, w), got ()")
    return _cast("bias", array, np.dtype(np.float64 if dtype == np.float64 else np.float32))


def _listed(arrays: _Arrays) -> str:
    return ", ".join(f"{name} {x.dtype} {x.shape}" for name, x in arrays.items())


def _promoted(arrays: _Arrays) -> _Arrays:
    """All of one dtype that the kernels have, and aligned."""
    try:
        dtype = np.result_type(*(x.dtype for x in arrays.values()))
    except TypeError:
        raise TypeError(f"there is no common dtype of {_listed(arrays)}") from None
    if dtype.kind in "iu":
        dtype = np.result_type(dtype, np.float32)
    if not (_checks.is_bfloat16(dtype) or dtype in (np.float16, np.float32, np.float64)):
        raise TypeError(
            "float16, float32, float64 or ml_dtypes.bfloat16 needed, got "
            f"{_listed(arrays)}, together {dtype}"
        )
    return {name: _cast(name, x, dtype) for name, x in arrays.items()}


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in this dtype, and aligned: itself where it is so."""
    if array.dtype == dtype and array.flags.aligned:
        return array
    _checks.check_size(name, array)
    return array.astype(dtype)


def _check_sizes(arrays: _Arrays) -> None:
    """What q, k, v and p must share; their leading axes are _lead's part."""
    if min(x.ndim for x in arrays.values()) < 2:
        raise ValueError(
            "q (..., m, d), k (..., n, d), v (..., n, dv) and p (..., w, d) needed, got "
            f"{_listed(arrays)}"
        )
    q, k, v, p = (arrays.get(name, arrays["q"]).shape for name in "qkvp")
    if not q[-1] == k[-1] == p[-1]:
        raise ValueError(f"q, k and p must have one head size, got {_listed(arrays)}")
    if k[-2] != v[-2]:
        raise ValueError(f"k and v must hold as many keys, got {_listed(arrays)}")
    # The size of the kernels' scratch memory must not overflow; as csrc/torch/attention_call.cpp.
    largest, elements = max(q[-1], v[-1]), (q[-2] + k[-2] + 2**12) * (q[-1] + v[-1] + 2**8)
    if largest >= 2**20 or elements >= 2**45:
        raise MemoryError(f"attention of {_listed(arrays)} needs more memory than there is")


def _window(window: int) -> int:
    number = _checks.integer("window", window)
    if number < 0:
        raise ValueError(f"window must not be negative, got {number}")
    return number


def _reachable(
    arrays: _Arrays, name: str, axis: int, first: int, edge: int, causal: bool, window: int
) -> tuple[slice, int]:
    """The rows of p, or numbers of bias, that some query can reach, and delta of the first."""
    rows, queries, keys = arrays[name].shape[axis], arrays["q"].shape[-2], arrays["k"].shape[-2]
    if edge and rows == 0:
        needs = {"p": 'beyond="edge" needs a table of at least one row'}
        needs["bias"] = 'bias_beyond="edge" needs a bias of at least one number'
        raise ValueError(f"{needs[name]}, {name} has none")
    nearest, farthest = 0 if causal else 1 - queries, min(keys, window) - 1
    begin, end = reached_rows(rows, first, edge, nearest, farthest)
    return slice(begin, end), max(-_FAR, min(_FAR, first)) + begin


def _lead(arrays: _Arrays) -> tuple[tuple[int, ...], int]:
    """The results' leading axes, the last of them the heads, and the number of key heads."""
    core = {"bias": 1, "slopes": 0}
    axes = {name: x.shape[: x.ndim - core.get(name, 2)] for name, x in arrays.items()}

    def common(*names: str) -> tuple[int, ...]:
        present = [name for name in names if name in axes]
        return _checks.broadcast(
            f"leading axes of {', '.join(present)}", *(axes[name] for name in present)
        )

    of_q, of_k = common("q", "p", "slopes", "bias"), common("k", "v")
    batch = _checks.broadcast("axes before the heads of q and k", of_q[:-1], of_k[:-1])
    heads, key_heads = (of[-1] if of else 1 for of in (of_q, of_k))
    if heads == 1:
        heads = key_heads
    if heads % key_heads if key_heads else heads:
        raise ValueError(
            f"q has {heads} heads, which must be a multiple of the {key_heads} of k and v: "
            f"{_listed(arrays)}"
        )
    return (*batch, heads) if of_q or of_k else (), key_heads


def _run(
    arrays: _Arrays, options: tuple[float, int, int, int, int, bool, int]
) -> tuple[np.ndarray, np.ndarray]:
    """out and lse, by as many threads as there may be."""
    lead, key_heads = _lead(arrays)
    of_keys = (*lead[:-1], key_heads)
    of_groups = (*of_keys, (lead[-1] if lead else 1) // max(key_heads, 1))
    q, k, v = (arrays[name] for name in "qkv")
    (queries, d), (keys, dv) = q.shape[-2:], v.shape[-2:]
    out = np.empty((*lead, queries, dv), q.dtype)
    lse = np.empty(out.shape[:-1], np.float64 if q.dtype == np.float64 else np.float32)
    if not lse.size:
        return out, lse

    def split(x: np.ndarray, *rest: int) -> np.ndarray:
        """A view (..., key heads, query heads of each, *rest)."""
        return _bits(x, (*lead, *rest)).reshape(*of_groups, *rest)

    p, slopes, bias = (arrays.get(name) for name in ("p", "slopes", "bias"))
    operands = (
        split(q, queries, d),
        _bits(k, (*of_keys, keys, d)),
        _bits(v, (*of_keys, keys, dv)),
        split(p, *p.shape[-2:]) if p is not None and d and p.shape[-2] else None,
        None if slopes is None else split(slopes),
        split(bias, bias.shape[-1]) if bias is not None and bias.size else None,
        split(out, queries, dv),
        split(lse, queries),
    )
    blocks = -(-queries // _numpy.ATTENTION_QUERY_BLOCK)
    work = lse.size * keys * (d + dv) // 8  # as much as rotating so many elements
    call = functools.partial(_numpy.attention, _numpy.kernels(), *operands, *options)
    _threads.run(
        lambda units: call(units.start, units.stop),
        _threads.cut(lse.size // queries * blocks, work),
    )
    return out, lse


def _bits(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """x of that shape; bfloat16 as integers of the same bits, as NumPy has no such type."""
    x = x.view(np.uint16) if _checks.is_bfloat16(x.dtype) else x
    return x if x.shape == shape else np.broadcast_to(x, shape)
