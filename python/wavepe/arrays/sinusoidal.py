"""Sinusoidal absolute position encoding [V]."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .. import _numpy
from ..common import checks
from .rope_frequencies import DEFAULT_THETA, rope_frequencies


def sinusoidal(
    positions: ArrayLike, dim: int, theta: float = DEFAULT_THETA, *, out: np.ndarray | None = None
) -> np.ndarray:
    """Return the sinusoidal position vectors of the Transformer.

    The vector of position m holds ``sin(m * w_i)`` at index 2i and ``cos(m * w_i)`` at index
    2i + 1, where ``w_i = theta**(-2i/dim)``.

    Parameters
    ----------
    positions : array (...) or scalar of real numbers
        The positions themselves, finite. A scalar is one position, not a count.
    dim : int
        Size of a vector, even.
    theta : float
        The base of the frequencies, above 0.
    out : array (..., dim), float64, optional
        The array that receives the result.

    Returns
    -------
    vectors : array (..., dim), float64
        Exact to float64 rounding for integer positions within +-2^31.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type, dtype or shape; if a value is out of range.

    References
    ----------
    Vaswani et al., "Attention is all you need", NeurIPS 2017, arXiv 1706.03762.

    Examples
    --------
    >>> import wavepe
    >>> wavepe.sinusoidal([0, 1], 4).round(4)
    array([[0.    , 1.    , 0.    , 1.    ],
           [0.8415, 0.5403, 0.01  , 1.    ]])
    """
    positions = checks.with_room("positions", checks.real_array("positions", positions))
    dim = checks.even("dim", dim, 0)
    theta = checks.positive("theta", theta)
    if not np.all(np.isfinite(checks.distinct(positions))):
        raise ValueError("positions must be finite")
    out = checks.out_array(out, (*positions.shape, dim), np.float64)
    if not out.size:
        return out
    inv_freq, _ = rope_frequencies(dim, theta)
    positions = positions.astype(np.float64, copy=False)
    loop = (None,) * 3 + (np.float64,) * 2
    cos_sin = (out[..., 1::2], out[..., 0::2])
    _numpy.rope_table(positions[..., None], inv_freq, 1.0, out=cos_sin, signature=loop)
    return out
