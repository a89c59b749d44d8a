"""The bits of the position, added to the token embeddings."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from .. import _checks
from .base import Encoding, register_encoding

_WIDEST = 54  # bits of 2^53, the largest position


@register_encoding
@dataclasses.dataclass(frozen=True)
class Binary(Encoding):
    """The bits of position m, the most significant first, padded with leading zeros.

    Position 252 in 8 dims is 1 1 1 1 1 1 0 0; `dim` dims hold the positions below 2^dim.
    """

    name = "binary"
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
        largest = int(positions.max()) if positions.size else 0
        if largest.bit_length() > dim:
            raise ValueError(
                f"{self.name}: position {largest} has {largest.bit_length()} bits, and there are "
                f"{dim} dims: positions must be below 2^{dim}"
            )
        used = min(dim, _WIDEST)
        vectors = _checks.new_array((*positions.shape, dim), make=np.zeros)
        vectors[..., dim - used :] = positions[..., None] >> np.arange(used)[::-1] & 1
        return vectors
