"""Sinusoidal absolute position encoding [V]."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from . import _checks, _numpy
from ._rope_frequencies import DEFAULT_THETA, rope_frequencies


def sinusoidal(
    positions: ArrayLike,
    dim: int,
    theta: float = DEFAULT_THETA,
    *,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """``PE[m, 2i] = sin(m w_i)``, ``PE[m, 2i+1] = cos(m w_i)``, ``w_i = theta**(-2i/dim)`` [V].

    Parameters
    ----------
    positions : array (...) or scalar of real numbers
        The positions themselves, never a count.
    dim : int
        Even.
    theta : float
    out : float64 array (..., dim), optional

    Returns
    -------
    float64 array (..., dim)
        Exact to float64 rounding for integer positions within +-2^31.
    """
    positions = _checks.real_array("positions", positions)
    dim = _checks.integer("dim", dim, 0)
    if dim % 2:
        raise ValueError(f"dim must be even, got {dim}")
    theta = _checks.positive("theta", theta)
    if not np.all(np.isfinite(_checks.distinct(positions))):
        raise ValueError("positions must be finite")
    out = _checks.out_array(out, (*positions.shape, dim), np.float64)
    if not out.size:
        return out
    inv_freq, _ = rope_frequencies(dim, theta)
    positions = positions.astype(np.float64, copy=False)
    double = (None,) * 3 + (np.float64,) * 2
    pairs = (out[..., 1::2], out[..., 0::2])  # cos, sin
    _numpy.rope_table(positions[..., None], inv_freq, 1.0, out=pairs, signature=double)
    return out
