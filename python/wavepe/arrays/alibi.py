"""ALiBi: the score of head h loses slope_h for each token of distance [A]."""

from __future__ import annotations

import numpy as np

from ..common import checks


def alibi_slopes(heads: int) -> np.ndarray:
    """Return the slope of each head in ALiBi, float64 (heads,).

    The score of a query and a key loses slope * distance. For a power of two, the slopes are
    2^(-8/heads), 2^(-16/heads), ... 2^-8. For another number, they are the slopes of the next
    lower power of two, followed by every second slope of the next higher one.

    Parameters
    ----------
    heads : int
        Number of attention heads. TypeError unless it is an integer, ValueError if it is below 1.

    References
    ----------
    Press et al., "Train short, test long: attention with linear biases enables input length
    extrapolation", ICLR 2022, arXiv 2108.12409.

    Examples
    --------
    >>> import wavepe
    >>> wavepe.alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])
    """
    heads = checks.integer("heads", heads, 1)
    lower = 1 << (heads.bit_length() - 1)
    slopes = np.exp2(-8.0 / lower * np.arange(1, lower + 1))
    between = np.exp2(-4.0 / lower * np.arange(1, 2 * lower, 2))
    return np.concatenate([slopes, between[: heads - lower]])
