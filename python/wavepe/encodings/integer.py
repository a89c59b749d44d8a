"""The position itself, added to the token embeddings."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from .. import _checks
from .base import Encoding, register_encoding


@register_encoding
@dataclasses.dataclass(frozen=True)
class Integer(Encoding):
    """Position m in every component: unbounded, a baseline."""

    name = "integer"
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
        return np.repeat(positions[..., None].astype(np.float64), dim, axis=-1)
