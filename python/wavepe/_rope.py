"""Rotary position embedding: rotation, exact tables of angles, frequencies [R]."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from . import _checks, _numpy

DEFAULT_THETA = 10000.0


def rope(
    x,
    cos,
    sin,
    *,
    interleaved: bool = False,
    inverse: bool = False,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Rotate pairs of the last axis by the angles whose cos and sin are given [R].

    Pair i of the first 2h elements, (x[i], x[i+h]) or (x[2i], x[2i+1]) if interleaved, becomes
    (a cos[i] - b sin[i], b cos[i] + a sin[i]); the other d - 2h elements are copied.

    Parameters
    ----------
    x : array (..., d) of float16, float32 or float64
        Any strides.
    cos, sin : arrays (..., h), any float dtype
        Broadcast against x without its last axis; read as float32 (float64 for float64 x).
    interleaved : bool
        Pairs are (2i, 2i+1) as in GPT-J; else (i, i+h) as in NeoX and Llama.
    inverse : bool
        Rotate by the negative angles (the transpose, which is the gradient).
    out : array of x's shape and dtype, optional
        May be x.

    Returns
    -------
    array of x's shape and dtype
    """
    x = np.asarray(x)
    if x.dtype not in (np.float16, np.float32, np.float64):
        raise TypeError(f"x must be float16, float32 or float64, got dtype {x.dtype}")
    real = np.float64 if x.dtype == np.float64 else np.float32
    cos = _checks.real_array("cos", cos, integers=False).astype(real, copy=False)
    sin = _checks.real_array("sin", sin, integers=False).astype(real, copy=False)
    if min(x.ndim, cos.ndim, sin.ndim) < 1:
        raise ValueError(
            f"x (..., d), cos and sin (..., h) need a last axis, got shapes "
            f"{x.shape}, {cos.shape}, {sin.shape}"
        )
    if cos.shape[-1] != sin.shape[-1]:
        raise ValueError(f"cos and sin hold {cos.shape[-1]} and {sin.shape[-1]} pairs")
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"cos and sin hold {cos.shape[-1]} pairs, x has head size {x.shape[-1]}: "
            f"at most {x.shape[-1] // 2} pairs fit"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        shape = _checks.broadcast(
            f"x and {name} without their last axes", x.shape[:-1], table.shape[:-1]
        )
        if shape != x.shape[:-1]:
            raise ValueError(f"{name} of shape {table.shape} does not broadcast to x {x.shape}")
    flags = _checks.flag("interleaved", interleaved), _checks.flag("inverse", inverse)
    if out is not None:
        out = _checks.out_array(out, x.shape, x.dtype)
    return _numpy.rope(x, cos, sin, flags[0], flags[1], out=out)


def rope_table(
    positions,
    inv_freq,
    *,
    attention_factor: float = 1.0,
    precision: str = "exact",
    sections: Sequence[int] | None = None,
    dtype=np.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position * inv_freq, exact for positions within +-2^31 [R].

    Parameters
    ----------
    positions : integer array (...), or (..., axes) with `sections`
        Within +-2^53; beyond +-2^31 the error grows with the position.
    inv_freq : array (h,)
        Radians per position of each pair, as `rope_frequencies` gives them.
    attention_factor : float
        Multiplies cos and sin (YaRN, LongRoPE).
    precision : "exact" or "hf"
        exact: the product is taken without rounding error and the result rounded once, within
        1 ulp of float32, next to zeros too, for positions within +-2^31. hf: a float32 product
        of float32 operands, as Hugging Face computes it.
    sections : sequence of int, optional
        Pairs per axis of positions, summing to h; pair i keeps inv_freq[i].
    dtype : float16, float32 or float64

    Returns
    -------
    (cos, sin) : arrays (..., h)
    """
    positions = _checks.position_array("positions", positions)
    inv_freq = _checks.real_array("inv_freq", inv_freq).astype(np.float64)
    if inv_freq.ndim != 1:
        raise ValueError(f"inv_freq must be 1-D (pairs,), got shape {inv_freq.shape}")
    if not np.all(np.isfinite(inv_freq)):
        raise ValueError("inv_freq must be finite")
    factor = _checks.finite("attention_factor", attention_factor)
    precision = _checks.choice("precision", precision, ("exact", "hf"))
    dtype = np.dtype(dtype)
    if dtype not in (np.float16, np.float32, np.float64):
        raise TypeError(f"dtype must be float16, float32 or float64, got {dtype}")
    per_pair = _positions_per_pair(positions, inv_freq.size, sections).astype(np.float64)
    if precision == "hf":
        inv_freq = (per_pair.astype(np.float32) * inv_freq.astype(np.float32)).astype(np.float64)
        per_pair = 1.0
    real = np.float32 if dtype == np.float32 else np.float64
    cos, sin = _numpy.rope_table(per_pair, inv_freq, factor, signature=(None,) * 3 + (real,) * 2)
    return cos.astype(dtype, copy=False), sin.astype(dtype, copy=False)


def _positions_per_pair(positions, pairs: int, sections) -> np.ndarray:
    """Positions with a last axis that broadcasts against the pairs."""
    if sections is None:
        return positions[..., None]
    sections = [_checks.integer("sections", s, 0) for s in sections]
    if sum(sections) != pairs:
        raise ValueError(f"sections {sections} sum to {sum(sections)}, inv_freq has {pairs} pairs")
    if positions.ndim < 1 or positions.shape[-1] != len(sections):
        raise ValueError(
            f"positions of shape {positions.shape} need a last axis of {len(sections)}, "
            f"one coordinate per section"
        )
    return positions[..., np.repeat(np.arange(len(sections)), sections)]


def rope_frequencies(
    dim: int,
    theta: float | None = None,
    *,
    scaling: Mapping | None = None,
    length: int | None = None,
    max_length: int | None = None,
) -> tuple[np.ndarray, float]:
    """Radians per position of each pair, ``theta**(-2i/dim)`` [R].

    Parameters
    ----------
    dim : int
        Head size, even.
    theta : float, optional
        Base. None: the base of `scaling`, else 10000.
    scaling : dict, optional
        Hugging Face ``rope_parameters``: rope_type (or type), rope_theta,
        partial_rotary_factor. This version knows the type "default".
    length, max_length : int, optional
        Current and trained length; the type "default" needs neither.

    Returns
    -------
    (inv_freq, attention_factor) : float64 array (rotary_dim / 2,), float
    """
    dim = _checks.integer("dim", dim, 1)
    for name, value in (("length", length), ("max_length", max_length)):
        if value is not None:
            _checks.integer(name, value, 1)
    scaling = _read_scaling(scaling)
    theta = None if theta is None else _checks.positive("theta", theta)
    base = scaling.get("rope_theta")
    base = None if base is None else _checks.positive("rope_theta", base)
    if theta is not None and base is not None and theta != base:
        raise ValueError(f"theta is {theta} and scaling's rope_theta is {base}: give one")
    theta = base if theta is None else theta
    theta = DEFAULT_THETA if theta is None else theta
    partial = _checks.positive("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0))
    rotary_dim = int(dim * partial)
    if rotary_dim % 2 or rotary_dim > dim:
        raise ValueError(
            f"the rotated part of the head must be even and at most {dim}, got {rotary_dim} "
            f"(dim {dim}, partial_rotary_factor {partial})"
        )
    return theta ** (-np.arange(0, rotary_dim, 2) / max(rotary_dim, 1)), 1.0


def _read_scaling(scaling: Mapping | None) -> dict:
    if scaling is None:
        return {}
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling must be a dict of rope parameters, got {scaling!r}")
    scaling = {k: v for k, v in scaling.items() if v is not None}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    _checks.choice("rope_type", kind, ["default"])
    unknown = set(scaling) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown:
        warnings.warn(
            f"unknown keys in scaling: {', '.join(sorted(map(str, unknown)))}", stacklevel=3
        )
    return scaling
