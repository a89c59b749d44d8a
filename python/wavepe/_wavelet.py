"""Mother wavelets, their grid of scales and shifts, and tables of them [W]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from . import _checks, _numpy, _threads, _wavelet_pywt, _wavelet_registered
from ._numpy import gaussian, haar, morlet, ricker

KINDS = _wavelet_registered.BUILT_IN  # in the order of wpe_kind, csrc/wavepe.h

__all__ = ["KINDS", "gaussian", "haar", "morlet", "ricker", "wavelet_grid", "wavelet_table"]


def wavelet_grid(
    dim: int,
    scales: int | Sequence[float] = 8,
    min_scale: float = 1,
    *,
    fixed_scale: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Scale and shift of each column of a wavelet table [W].

    Parameters
    ----------
    dim : int
        Head size.
    scales : int or sequence of float
        A number s of scales, ``min_scale * 2**0 .. min_scale * 2**(s-1)``, or the scales.
    min_scale : float
        The smallest scale; only with a number of scales.
    fixed_scale : bool
        All s scales are ``min_scale`` (columns repeat); only with a number of scales.

    Returns
    -------
    (scale, shift) : float64 arrays (dim,)
        Scale major: column ``i * (dim/s) + j`` has scale i and shift j.

    Raises
    ------
    ValueError
        If dim is not divisible by the number of scales, or a scale is not above 0.
    """
    dim = _checks.integer("dim", dim, 1)
    min_scale = _checks.positive("min_scale", min_scale)
    fixed_scale = _checks.flag("fixed_scale", fixed_scale)
    if _checks.array_of("scales", scales).ndim == 0:
        count = _checks.integer("scales", scales, 1)
        if dim % count:
            raise ValueError(f"dim {dim} is not divisible by the number of scales {count}")
        with np.errstate(over="ignore"):
            values = min_scale * np.exp2(np.zeros(count) if fixed_scale else np.arange(count))
    else:
        if fixed_scale or min_scale != 1:
            raise ValueError("min_scale and fixed_scale need a number of scales, not a list")
        values = _checks.real_array("scales", scales).astype(np.float64)
        if values.ndim != 1 or values.size == 0:
            raise ValueError(f"scales must be a non-empty list, got shape {values.shape}")
    if not (np.all(values > 0) and np.all(np.isfinite(values))):
        raise ValueError(f"scales must be finite and above 0, got {values.tolist()}")
    if dim % values.size:
        raise ValueError(f"dim {dim} is not divisible by the number of scales {values.size}")
    shifts = np.arange(dim // values.size, dtype=np.float64)
    return np.repeat(values, shifts.size), np.tile(shifts, values.size)


def check_kind(label: str, value: Any) -> str:
    """`value`, a kind that is built in, registered, or a discrete wavelet of PyWavelets.

    Raises
    ------
    TypeError, ValueError
        It is none of these.
    ImportError
        It needs PyWavelets, which is not installed.
    """
    if isinstance(value, str) and value not in KINDS and _wavelet_pywt.is_family(value):
        return _wavelet_pywt.check_family(label, value)
    known = (*KINDS, *_wavelet_registered.names())
    if isinstance(value, str) and value not in known:
        raise ValueError(
            f"unknown {label} {value!r}; known: {', '.join(known)}, what wavepe.register_wavelet "
            f"adds (import the module that calls it), and the discrete wavelets of PyWavelets, "
            f"such as {_wavelet_pywt.EXAMPLES}"
        )
    return _checks.choice(label, value, known)


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
    """Table of wavelets: ``p[r, c] = psi((t - shift[c]) / scale[c])`` [W].

    Parameters
    ----------
    offsets : int or integer array (w,)
        Distances query minus key; a number w means 0..w-1.
    scale, shift : arrays (dim,)
        As `wavelet_grid` gives them. A scale of 0 gives a column of NaN. For PyWavelets scale holds
        levels (integers from 1 to 16) and shift integers: ``p[r, c]`` is sample number t - shift[c]
        of ``pywt.Wavelet(kind).wavefun(level)``'s psi (bior, rbio: of decomposition), 0 outside.
    kind : str
        ricker, gaussian, morlet or haar, a name given to `register_wavelet`, or a discrete wavelet
        of PyWavelets such as db4 (``pip install ".[pywt]"`` in a checkout).
    mirrored : bool, optional
        t is -offset instead of offset. None: True for haar, else False.
    dtype : float16, float32 or float64
        Of the result; evaluated in float64 and rounded once.
    out : array (w, dim) of that dtype, optional

    Returns
    -------
    array (w, dim)
    """
    kind = check_kind("kind", kind)
    if _checks.array_of("offsets", offsets).ndim == 0:
        offsets = np.arange(_checks.integer("offsets", offsets, 0))
    offsets = _checks.position_array("offsets", offsets)
    if offsets.ndim != 1:
        raise ValueError(f"offsets must be a number or 1-D, got shape {offsets.shape}")
    scale, shift = _checks.real_array("scale", scale), _checks.real_array("shift", shift)
    if scale.ndim != 1 or scale.shape != shift.shape:
        raise ValueError(
            f"scale and shift must be 1-D and of one size, got {scale.shape} and {shift.shape}"
        )
    dtype = _checks.float_dtype(dtype)
    mirrored = kind == "haar" if mirrored is None else _checks.flag("mirrored", mirrored)
    out = _checks.out_array(out, (offsets.size, scale.size), dtype)
    if not out.size:
        return out
    sign = -1 if mirrored else 1
    scale, shift = (a.astype(np.float64, copy=False) for a in (scale, shift))
    if kind not in KINDS:
        with np.errstate(all="ignore"):  # float16 may overflow
            out[...] = sampled_table(kind, sign * offsets.astype(np.float64), scale, shift)
        return out
    arrays = (offsets.astype(np.int64, copy=False), scale, shift)
    # An element is as much work as the rotation of four.
    work = 0 if any(np.may_share_memory(out, a) for a in arrays) else 4 * out.size

    def part(i: slice) -> None:
        code, loop = KINDS.index(kind), (None,) * 5 + (dtype,)
        _numpy.wavelet_table(arrays[0][i], scale, shift, code, sign, out=out[i], signature=loop)

    _threads.run(part, _threads.cut(offsets.size, work))
    return out


def sampled_table(kind: str, t: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """The table of a kind that is not built in, float64 (w, dim); t (w,), scale, shift (dim,)."""
    wavelet = _wavelet_registered.registered(kind)
    if wavelet is None:
        return _wavelet_pywt.table(kind, t, scale, shift)
    return _wavelet_registered.table(wavelet, t, scale, shift)
