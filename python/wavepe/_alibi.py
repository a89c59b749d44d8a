"""ALiBi: a slope per head, taken from the score for each token of distance [A]."""

from __future__ import annotations

import numpy as np

from . import _checks


def alibi_slopes(heads: int) -> np.ndarray:
    """Slopes of ALiBi [A].

    Geometric from 2^(-8/heads) for a power of two; otherwise those of the power of two below,
    then every second one of the power of two above.

    Parameters
    ----------
    heads : int
        At least 1.

    Returns
    -------
    float64 array (heads,)
    """
    heads = _checks.integer("heads", heads, 1)
    lower = 1 << (heads.bit_length() - 1)
    slopes = np.exp2(-8.0 / lower * np.arange(1, lower + 1))
    between = np.exp2(-4.0 / lower * np.arange(1, 2 * lower, 2))
    return np.concatenate([slopes, between[: heads - lower]])
