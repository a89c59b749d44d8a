"""Rotary position embedding [R]: the rotation, and exact tables of its cosines and sines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .. import _numpy
from ..common import checks
from . import threads
from .rope_frequencies import rope_frequencies, rotated_part


def rope(
    x: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    *,
    interleaved: bool = False,
    inverse: bool = False,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Rotate pairs of elements of x by the angles of a cosine and sine table.

    The first 2h elements of the last axis form h pairs. Pair i = (a, b) becomes
    (a cos[i] - b sin[i], b cos[i] + a sin[i]). The other d - 2h elements are copied.

    Parameters
    ----------
    x : array (..., d) of float16, float32, float64 or ml_dtypes.bfloat16
        Queries or keys, with any strides.
    cos, sin : arrays (..., h), any float dtype
        Cosines and sines of the angles, as `rope_table` returns them; 2h <= d. The leading axes
        broadcast to those of x. Values are read as float32, or as float64 for float64 x.
    interleaved : bool
        True pairs elements (2i, 2i+1), as in GPT-J. False pairs elements (i, i+h), as in GPT-NeoX
        and Llama.
    inverse : bool
        Rotate by the negative angles. This is the transpose of the rotation, and its gradient.
    out : array of x's shape and dtype, optional
        The array that receives the result. It may be x itself.

    Returns
    -------
    rotated : array of x's shape and dtype

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type or dtype; if shapes do not fit together.

    References
    ----------
    Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021,
    arXiv 2104.09864.

    Examples
    --------
    >>> import numpy as np
    >>> import wavepe
    >>> inv_freq, _ = wavepe.rope_frequencies(4)
    >>> cos, sin = wavepe.rope_table([0, 1], inv_freq)
    >>> wavepe.rope(np.ones((2, 4), np.float32), cos, sin).round(3)
    array([[ 1.   ,  1.   ,  1.   ,  1.   ],
           [-0.301,  0.99 ,  1.382,  1.01 ]], dtype=float32)
    """
    x = checks.native(checks.array_of("x", x))
    bfloat16 = checks.is_bfloat16(x.dtype)
    if not (bfloat16 or x.dtype in (np.float16, np.float32, np.float64)):
        raise TypeError(
            f"x must be float16, float32, float64 or ml_dtypes.bfloat16, got dtype {x.dtype}"
        )
    real = np.float64 if x.dtype == np.float64 else np.float32
    cos = checks.float_array("cos", cos).astype(real, copy=False)
    sin = checks.float_array("sin", sin).astype(real, copy=False)
    if min(x.ndim, cos.ndim, sin.ndim) < 1:
        raise _misfit("x (..., d), cos and sin (..., h) need a last axis", x, cos, sin)
    if cos.shape[-1] != sin.shape[-1]:
        raise _misfit("cos and sin must hold the same number of pairs", x, cos, sin)
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise _misfit(f"cos and sin must hold at most {x.shape[-1] // 2} pairs", x, cos, sin)
    for leading in (cos.shape[:-1], sin.shape[:-1]):
        pairs_of_sizes = zip(leading[::-1], x.shape[-2::-1], strict=False)
        if len(leading) >= x.ndim or not all(n in (1, m) for n, m in pairs_of_sizes):
            rule = "the leading axes of cos and sin must broadcast to those of x"
            raise _misfit(rule, x, cos, sin)
    flags = checks.flag("interleaved", interleaved), checks.flag("inverse", inverse)
    out = np.empty_like(x) if out is None else checks.out_array(out, x.shape, x.dtype)
    if not out.size:
        return out
    if bfloat16:  # a ufunc takes no dtype of another package: pass the bits as integers
        _rotate(_numpy.rope_bf16, x.view(np.uint16), cos, sin, flags, out.view(np.uint16))
    else:
        _rotate(_numpy.rope, x, cos, sin, flags, out)
    return out


def _misfit(rule: str, *arrays: np.ndarray) -> ValueError:
    """Return an error that names the shapes of x, cos and sin."""
    return ValueError(f"{rule}, got shapes {', '.join(str(array.shape) for array in arrays)}")


def apply_rope(
    x: ArrayLike,
    positions: ArrayLike,
    theta: float = 10000.0,
    *,
    interleaved: bool = False,
    fraction: float = 1.0,
) -> np.ndarray:
    """Rotate queries or keys by their positions: rotary position embedding in one call.

    It calls `rope_frequencies`, `rope_table` and `rope`. Angles are exact. Cosines and sines are
    float32, or float64 for float64 x.

    Parameters
    ----------
    x, interleaved : as for `rope`
        Queries or keys (..., L, d) of L tokens, with an even head size d; all of it rotates.
    positions : integer array (L,), or (..., L) that broadcasts to the leading axes of x
        The position of each token, as in `rope_table`.
    theta : float
        The base of the frequencies.
    fraction : float
        The part of the pairs that rotate, from 0 to 1. These are the pairs of the highest
        frequencies (p-RoPE: Barbero et al., "Round and round we go", 2024, arXiv 2410.06205).

    Returns
    -------
    rotated : array of x's shape and dtype

    Examples
    --------
    >>> import numpy as np
    >>> import wavepe
    >>> wavepe.apply_rope(np.ones((2, 4), np.float32), [0, 1], theta=100.0).round(3)
    array([[ 1.   ,  1.   ,  1.   ,  1.   ],
           [-0.301,  0.895,  1.382,  1.095]], dtype=float32)
    """
    x = checks.array_of("x", x)
    if x.ndim < 1 or x.shape[-1] < 2 or x.shape[-1] % 2:
        raise ValueError(f"x needs shape (..., L, d) with an even d, got {x.shape}")
    inv_freq, _ = rope_frequencies(x.shape[-1], theta)
    inv_freq = rotated_part(inv_freq, checks.zero_to_one("fraction", fraction))
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    cos, sin = rope_table(positions, inv_freq, dtype=dtype)
    return rope(x, cos, sin, interleaved=interleaved)


def _rotate(
    kernel: np.ufunc,
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    flags: tuple[bool, bool],
    out: np.ndarray,
) -> None:
    """Rotate x into `out`, with x's longest leading axis cut into a piece for each thread."""
    axis = max(range(x.ndim - 1), key=x.shape.__getitem__, default=0)
    pieces = threads.cut(x.shape[axis], x.size) if x.ndim > 1 else []
    in_place = x.ctypes.data == out.ctypes.data and x.strides == out.strides
    read = (cos, sin) if in_place else (cos, sin, x)
    overlap = any(np.may_share_memory(a, out) for a in read)
    if len(pieces) < 2 or overlap:  # with overlap a piece would write what another piece reads
        kernel(x, cos, sin, *flags, out=out)
        return
    tables = (np.broadcast_to(t, (*x.shape[:-1], t.shape[-1])) for t in (cos, sin))
    x, cos, sin, out = (np.moveaxis(a, axis, 0) for a in (x, *tables, out))
    threads.run(lambda i: kernel(x[i], cos[i], sin[i], *flags, out=out[i]), pieces)


def rope_table(
    positions: ArrayLike,
    inv_freq: ArrayLike,
    *,
    attention_factor: float = 1.0,
    precision: str = "exact",
    sections: Sequence[int] | None = None,
    dtype: DTypeLike = np.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines and sines of position * inv_freq for each position and pair.

    Parameters
    ----------
    positions : integer array (...), or (..., axes) with `sections`
        Positions within +-2^53. Beyond +-2^31 the error grows with the position.
    inv_freq : array (h,) of real numbers
        Radians per position of each pair, as `rope_frequencies` returns them.
    attention_factor : float
        A factor on the cosines and sines, for YaRN and LongRoPE.
    precision : "exact" or "hf"
        "exact" computes the angles without rounding error and rounds each result once. For
        positions within +-2^31 the error is at most 1 ulp of float32, also next to zeros.
        "hf" multiplies position and inv_freq in float32, as Hugging Face models do.
    sections : sequence of int, optional
        The number of pairs for each axis of n-dimensional positions; their sum is h. A pair
        rotates by the coordinate of its axis. Pair i uses inv_freq[i].
    dtype : float16, float32 or float64
        The dtype of the results.

    Returns
    -------
    cos, sin : arrays (..., h) of `dtype`

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type, dtype or shape; if a position is outside +-2^53, or
        `inv_freq` is not finite, or `sections` do not fit `positions` and `inv_freq`.

    Examples
    --------
    >>> import wavepe
    >>> cos, sin = wavepe.rope_table([0, 1], [1.0, 0.01])
    >>> cos.round(4)
    array([[1.    , 1.    ],
           [0.5403, 1.    ]], dtype=float32)
    """
    positions = checks.position_array("positions", positions)
    inv_freq = checks.real_array("inv_freq", inv_freq)
    if inv_freq.ndim != 1:
        raise ValueError(f"inv_freq must be 1-D (pairs,), got shape {inv_freq.shape}")
    if not np.all(np.isfinite(checks.distinct(inv_freq))):
        raise ValueError("inv_freq must be finite")
    factor = checks.finite("attention_factor", attention_factor)
    precision = checks.choice("precision", precision, ("exact", "hf"))
    dtype = checks.float_dtype(dtype)
    per_pair: Any = _positions_per_pair(positions, inv_freq.size, sections)
    shape = checks.broadcast("axes of positions and inv_freq", per_pair.shape, inv_freq.shape)
    real = np.dtype(np.float32 if dtype == np.float32 else np.float64)
    cos, sin = (np.empty(shape, real) for _ in range(2))
    if not cos.size:
        return cos.astype(dtype, copy=False), sin.astype(dtype, copy=False)
    per_pair, inv_freq = per_pair.astype(np.float64), inv_freq.astype(np.float64)
    if precision == "hf":
        inv_freq = (per_pair.astype(np.float32) * inv_freq.astype(np.float32)).astype(np.float64)
        per_pair = 1.0
    angles = np.broadcast_arrays(per_pair, inv_freq)
    loop = (None,) * 3 + (real,) * 2

    def part(i: slice) -> None:
        _numpy.rope_table(*(a[i] for a in angles), factor, out=(cos[i], sin[i]), signature=loop)

    # Cut along the first axis. An angle takes as long as rotating four elements.
    threads.run(part, threads.cut(cos.shape[0], 4 * cos.size))
    return cos.astype(dtype, copy=False), sin.astype(dtype, copy=False)


def _positions_per_pair(
    positions: np.ndarray, pairs: int, sections: Sequence[int] | None
) -> np.ndarray:
    """Return the positions with a last axis that broadcasts against the pairs."""
    if sections is None:
        return positions[..., None]
    listed = np.iterable(sections) and not isinstance(sections, (str, bytes))
    if not (listed and checks.is_short(sections)):
        raise TypeError(f"sections must be a list of pairs per axis, got {sections!r}")
    sections = [checks.integer("sections", s, 0) for s in sections]
    if sum(sections) != pairs:
        raise ValueError(f"sections {sections} sum to {sum(sections)}, inv_freq has {pairs} pairs")
    if positions.ndim < 1 or positions.shape[-1] != len(sections):
        raise ValueError(
            f"positions must have a last axis of {len(sections)}, one coordinate per section; got "
            f"shape {positions.shape}"
        )
    return positions[..., np.repeat(np.arange(len(sections)), sections)]
