"""Mother wavelets, their grid of scales and shifts, and tables of them [W]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .. import _numpy
from .._numpy import gaussian, haar, morlet, ricker
from ..common import checks
from . import threads, wavelet_pywt, wavelet_registered

KINDS = wavelet_registered.BUILT_IN  # in the order of wpe_kind, csrc/wavepe.h

__all__ = ["KINDS", "gaussian", "haar", "morlet", "ricker", "wavelet_grid", "wavelet_table"]


def wavelet_grid(
    dim: int, scales: int | Sequence[float] = 8, min_scale: float = 1, *, fixed_scale: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scale and the shift of each column of a wavelet table.

    Each of the s scales is combined with the shifts 0, 1, ... dim/s - 1.

    Parameters
    ----------
    dim : int
        Head size, the number of columns. It must be divisible by the number of scales.
    scales : int or sequence of float
        Either the number s of scales, which are then ``min_scale * 2**0`` to
        ``min_scale * 2**(s-1)``, or the scales themselves.
    min_scale : float
        The smallest scale. It may be given only where `scales` is a number.
    fixed_scale : bool
        Use ``min_scale`` for all s scales, so that columns repeat. It may be given only where
        `scales` is a number.

    Returns
    -------
    scale, shift : arrays (dim,), float64
        Column ``i * (dim/s) + j`` has the scale number i and the shift j.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type, if `dim` is not divisible by the number of scales, if a
        scale is not finite and above 0, or if `min_scale` or `fixed_scale` is given beside a list.

    References
    ----------
    Oka et al., "Wavelet-based positional representation for long context", ICLR 2025,
    arXiv 2502.02004.

    Examples
    --------
    >>> import wavepe
    >>> scale, shift = wavepe.wavelet_grid(6, scales=3)
    >>> scale
    array([1., 1., 2., 2., 4., 4.])
    >>> shift
    array([0., 1., 0., 1., 0., 1.])
    """
    dim = checks.integer("dim", dim, 1)
    min_scale = checks.positive("min_scale", min_scale)
    fixed_scale = checks.flag("fixed_scale", fixed_scale)
    if checks.array_of("scales", scales).ndim == 0:
        count = checks.integer("scales", scales, 1)
        if dim % count:
            raise ValueError(f"dim {dim} is not divisible by the number of scales {count}")
        with np.errstate(over="ignore"):
            values = min_scale * np.exp2(np.zeros(count) if fixed_scale else np.arange(count))
    else:
        if fixed_scale or min_scale != 1:
            raise ValueError("min_scale and fixed_scale need a number of scales, not a list")
        values = checks.real_array("scales", scales).astype(np.float64)
        if values.ndim != 1 or values.size == 0:
            raise ValueError(f"scales must be a non-empty list, got shape {values.shape}")
    if len(wrong := values[~((values > 0) & np.isfinite(values))]):
        raise ValueError(f"scales must be finite and above 0, got {wrong[0]}")
    if dim % values.size:
        raise ValueError(f"dim {dim} is not divisible by the number of scales {values.size}")
    shifts = np.arange(dim // values.size, dtype=np.float64)
    return np.repeat(values, shifts.size), np.tile(shifts, values.size)


def check_kind(label: str, value: Any) -> str:
    """Return `value` if it names a wavelet: built in, registered, or discrete in PyWavelets."""
    if isinstance(value, str) and value not in KINDS and wavelet_pywt.is_family(value):
        return wavelet_pywt.check_family(label, value)
    known = (*KINDS, *wavelet_registered.names())
    if isinstance(value, str) and value not in known:
        raise ValueError(
            f"unknown {label} {value!r}; known: {', '.join(known)}, what wavepe.register_wavelet "
            f"adds (import the module that calls it), and the discrete wavelets of PyWavelets, "
            f"such as {wavelet_pywt.EXAMPLES}"
        )
    return checks.choice(label, value, known)


def wavelet_table(
    offsets: ArrayLike,
    scale: ArrayLike,
    shift: ArrayLike,
    *,
    kind: str = "ricker",
    mirrored: bool | None = None,
    dtype: DTypeLike = np.float32,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return a table of wavelets at integer distances, the p of the wavelet position encoding.

    The table holds ``p[r, c] = psi((t - shift[c]) / scale[c])``, where psi is the mother wavelet
    and t the offset of row r. Values are computed in float64 and rounded once. The source is that
    of `wavelet_grid`.

    Parameters
    ----------
    offsets : int or integer array (w,)
        The distance of each row, query position minus key position, within +-2^53. A number w
        stands for 0, 1, ... w-1.
    scale, shift : arrays (dim,) of real numbers
        The scale and the shift of each column; `wavelet_grid` returns them. A scale of 0 gives a
        column of NaN. For a wavelet of PyWavelets, `scale` holds levels, which are integers from 1
        to 16, and shifts are integers.
    kind : str
        The mother wavelet: "ricker", "gaussian", "morlet", "haar", a name given to
        `register_wavelet`, or a discrete wavelet of PyWavelets such as "db4"; ImportError without
        it (``pip install ".[pywt]"`` in a checkout).
    mirrored : bool, optional
        True takes t = -offset instead of t = offset. None is True for haar and False otherwise.
    dtype : float16, float32 or float64
        The dtype of the result.
    out : array (w, dim) of `dtype`, optional
        The array that receives the result.

    Returns
    -------
    p : array (w, dim) of `dtype`

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type or dtype, if shapes do not fit together, if no wavelet is
        called `kind`, or if an offset, level or shift is out of range.

    Notes
    -----
    For a wavelet of PyWavelets, ``p[r, c]`` is sample number t - shift[c] of the psi that
    ``pywt.Wavelet(kind).wavefun(level)`` returns, and 0 outside its samples. The families bior and
    rbio have two psi; the one of decomposition is used.

    Examples
    --------
    >>> import wavepe
    >>> scale, shift = wavepe.wavelet_grid(4, scales=2)
    >>> wavepe.wavelet_table(3, scale, shift).round(3)
    array([[ 1.   ,  0.   ,  1.   ,  0.662],
           [ 0.   ,  1.   ,  0.662,  1.   ],
           [-0.406,  0.   ,  0.   ,  0.662]], dtype=float32)
    """
    kind = check_kind("kind", kind)
    if checks.array_of("offsets", offsets).ndim == 0:
        offsets = np.arange(checks.integer("offsets", offsets, 0))
    offsets = checks.position_array("offsets", offsets)
    if offsets.ndim != 1:
        raise ValueError(f"offsets must be an integer or (w,), got shape {offsets.shape}")
    scale, shift = checks.real_array("scale", scale), checks.real_array("shift", shift)
    if scale.ndim != 1 or scale.shape != shift.shape:
        raise ValueError(
            f"scale and shift must both be (dim,), got shapes {scale.shape} and {shift.shape}"
        )
    dtype = checks.float_dtype(dtype)
    mirrored = kind == "haar" if mirrored is None else checks.flag("mirrored", mirrored)
    out = checks.out_array(out, (offsets.size, scale.size), dtype)
    if not out.size:
        return out
    sign = -1 if mirrored else 1
    scale, shift = (a.astype(np.float64, copy=False) for a in (scale, shift))
    if kind not in KINDS:
        with np.errstate(all="ignore"):  # rounding to float16 may overflow
            out[...] = sampled_table(kind, sign * offsets.astype(np.float64), scale, shift)
        return out
    arrays = (offsets.astype(np.int64, copy=False), scale, shift)
    # An element takes as long as rotating four. No threads where a piece could overwrite an input.
    work = 0 if any(np.may_share_memory(out, a) for a in arrays) else 4 * out.size

    def part(i: slice) -> None:
        code, loop = KINDS.index(kind), (None,) * 5 + (dtype,)
        _numpy.wavelet_table(arrays[0][i], scale, shift, code, sign, out=out[i], signature=loop)

    threads.run(part, threads.cut(offsets.size, work))
    return out


def sampled_table(kind: str, t: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Return the table (w, dim) of a wavelet that is not built in; all arrays are float64."""
    wavelet = wavelet_registered.registered(kind)
    if wavelet is None:
        return wavelet_pywt.table(kind, t, scale, shift)
    return wavelet_registered.table(wavelet, t, scale, shift)
