"""Normalised encoding: position / length is added to the token embeddings."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .base import sequence_length
from .integer import Integer
from .register import register_encoding


@register_encoding
class Normalised(Integer):
    """Add position / length to every component of the token embedding.

    The length is that of the current sequence, so values stay below 1. But the vector of a
    position changes with the length. So a model cannot continue from cached keys and values.
    """

    name = "normalised"

    def absolute(
        self, positions: ArrayLike, dim: int, *, length: int | None = None,
        trained_length: int | None = None,
    ) -> np.ndarray:  # fmt: skip
        return super().absolute(positions, dim) / sequence_length(self, positions, length)
