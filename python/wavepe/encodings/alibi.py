"""ALiBi: attention with linear biases [A]."""

from __future__ import annotations

import dataclasses

import numpy as np

from .._alibi import alibi_slopes
from .base import Encoding, register_encoding


@register_encoding
@dataclasses.dataclass(frozen=True)
class ALiBi(Encoding):
    """ALiBi [A] (Press et al., arXiv 2108.12409): score = q.k / sqrt(d) - slope_h * abs(delta).

    The slope term is not divided by sqrt(d).
    """

    name = "alibi"
    entry = "slope"

    def slopes(self, heads: int) -> np.ndarray:
        return alibi_slopes(heads)
