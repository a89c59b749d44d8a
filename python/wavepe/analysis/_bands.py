"""The frequency band of a rotary head: the pair that theory predicts to be the largest [F]."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from ..common import checks

# V has its maximum at this angle, in radians.
_BAND_ANGLE = 3.6572100979832105


def band_variance(x: ArrayLike) -> np.ndarray:
    """Return the variance of a cosine over the angle from 0 to x, float64 in the shape of x.

    V(x) = 1/2 + sin(2x)/(4x) - (sin(x)/x)^2, with an error of at most 1e-15. A pair with a large
    variance tells positions apart best. V(0) is 0, and the largest value is V(3.6572) = 0.5405.

    Parameters
    ----------
    x : array (...) of real numbers
        Angle in radians that a pair turns over the trained length.

    References
    ----------
    Oka et al., "Frequency Bands in RoPE", ICLR 2026.

    Examples
    --------
    >>> import wavepe.analysis
    >>> wavepe.analysis.band_variance([0.0, 3.6572]).round(4)
    array([0.    , 0.5405])
    """
    x = checks.real_array("x", x).astype(np.float64)
    return 0.5 + 0.5 * np.sinc(2 * x / np.pi) - np.sinc(x / np.pi) ** 2


def predicted_band(dim: int, theta: float, length: int) -> float:
    """Return j*, the index of the rotary pair at which keys are predicted to be largest.

    j* = (dim/2) log_theta(length / 3.6572), not rounded. The cosine of this pair varies most over
    the trained length; see `band_variance`, also for the source. j* lies outside 0..dim/2-1 if no
    pair turns so slowly or so fast.

    Parameters
    ----------
    dim : int
        Head size, even.
    theta : float
        The base, above 1.
    length : int
        The trained length in tokens, at least 1.

    Examples
    --------
    >>> import wavepe.analysis
    >>> round(wavepe.analysis.predicted_band(128, 10000.0, 4096), 2)
    48.79
    """
    dim = checks.integer("dim", dim, 1)
    if dim % 2:
        raise ValueError(f"dim must be even, got {dim}")
    theta = checks.positive("theta", theta)
    if theta <= 1:
        raise ValueError(f"theta must be above 1, got {theta}")
    length = checks.integer("length", length, 1)
    return dim / 2 * math.log(length / _BAND_ANGLE) / math.log(theta)
