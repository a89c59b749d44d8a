"""Normalised encoding: position / length is added to the token embeddings."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from ..common import checks
from .base import Encoding, sequence_length
from .register import register_encoding


@register_encoding
@dataclasses.dataclass(frozen=True)
class Normalised(Encoding):
    """Add position / length to every component of the token embedding.

    The length is that of the current sequence, so values stay below 1. But the vector of a
    position changes with the length. So a model cannot continue from cached keys and values.
    """

    name = "normalised"

    def absolute(
        self, positions: ArrayLike, dim: int, *, length: int | None = None,
        trained_length: int | None = None,
    ) -> np.ndarray:  # fmt: skip
        positions = checks.counted_positions(f"{self.name} positions", positions)
        dim = checks.integer(f"{self.name} dim", dim, 0)
        length = sequence_length(self, positions, length)
        return np.repeat(positions[..., None] / length, dim, axis=-1)
