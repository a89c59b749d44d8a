"""ALiBi: attention with linear biases [A]."""

from __future__ import annotations

import numpy as np

from ..arrays.alibi import alibi_slopes
from .base import Encoding
from .register import register_encoding


@register_encoding
class ALiBi(Encoding):
    """Subtract a slope times the distance from the score: ALiBi.

    score = q.k / sqrt(d) - slope_h * abs(delta), where delta is the distance and slope_h the slope
    of head h (`wavepe.alibi_slopes`). The slope term is not divided by sqrt(d).

    References
    ----------
    Press et al., "Train short, test long: attention with linear biases enables input length
    extrapolation", ICLR 2022, arXiv 2108.12409.
    """

    name = "alibi"

    def slopes(self, heads: int) -> np.ndarray:
        return alibi_slopes(heads)
