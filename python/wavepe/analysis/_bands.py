"""Which pair of a rotary head carries a band: what the theory predicts [F]."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from .. import _checks

# Where V has its maximum, in radians turned over the trained length.
BAND_ANGLE = 3.6572100979832105


def band_variance(x: ArrayLike) -> np.ndarray:
    """V(x) = 1/2 + sin(2x)/(4x) - (sin(x)/x)^2, the variance of a cosine over an angle x [F].

    Parameters
    ----------
    x : array (...) of real numbers
        Radians that a pair turns over the trained length. V(0) is 0; the largest value, 0.5405,
        is at 3.6572.

    Returns
    -------
    ndarray, float64 (...)
        Within 1e-15.

    Raises
    ------
    TypeError
        No real numbers.
    """
    x = _checks.real_array("x", x).astype(np.float64)
    return 0.5 + 0.5 * np.sinc(2 * x / np.pi) - np.sinc(x / np.pi) ** 2


def predicted_band(dim: int, theta: float, length: int) -> float:
    """The pair index at which keys are predicted to be largest, j* [F].

    j* = (dim/2) log_theta(length / 3.6572): of all pairs this one varies most over the trained
    length. It is not rounded, and lies outside 0..dim/2-1 where no pair is that slow or fast.

    Parameters
    ----------
    dim : int
        Head size, even.
    theta : float
        The base, above 1.
    length : int
        The trained length.

    Raises
    ------
    ValueError, TypeError
        An odd `dim`, a base not above 1, a length below 1.
    """
    dim = _checks.integer("dim", dim, 1)
    if dim % 2:
        raise ValueError(f"dim must be even, got {dim}")
    theta = _checks.positive("theta", theta)
    if theta <= 1:
        raise ValueError(f"theta must be above 1, got {theta}")
    length = _checks.integer("length", length, 1)
    return dim / 2 * math.log(length / BAND_ANGLE) / math.log(theta)
