"""The position as a share of the sequence, added to the token embeddings."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from .. import _checks
from .base import Encoding, register_encoding, sequence_length


@register_encoding
@dataclasses.dataclass(frozen=True)
class Normalised(Encoding):
    """m / N in every component, N the length of the current sequence.

    Bounded, but position m has another vector in a sequence of another length: a model that adds
    it cannot go on from a cache.
    """

    name = "normalised"
    entry = "absolute"

    def absolute(
        self,
        positions: ArrayLike,
        dim: int,
        *,
        length: int | None = None,
        trained_length: int | None = None,
    ) -> np.ndarray:
        positions = _checks.counted_positions(f"{self.name} positions", positions)
        dim = _checks.integer(f"{self.name} dim", dim, 0)
        length = sequence_length(self, positions, length)
        return np.repeat(positions[..., None] / length, dim, axis=-1)
