"""Integer encoding: the position itself is added to the token embeddings."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..common import checks
from .base import Encoding
from .register import register_encoding


@register_encoding
class Integer(Encoding):
    """Add the position to every component of the token embedding.

    The values have no bound. This encoding is a baseline for comparisons.
    """

    name = "integer"

    def absolute(
        self, positions: ArrayLike, dim: int, *, length: int | None = None,
        trained_length: int | None = None,
    ) -> np.ndarray:  # fmt: skip
        positions = checks.counted_positions(f"{self.name} positions", positions)
        dim = checks.integer(f"{self.name} dim", dim, 0)
        return np.repeat(positions[..., None].astype(np.float64), dim, axis=-1)
