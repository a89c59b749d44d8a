"""Binary encoding: the bits of the position are added to the token embeddings."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..common import checks
from .base import Encoding
from .register import register_encoding


@register_encoding
class Binary(Encoding):
    """Add the bits of the position to the token embedding.

    The most significant bit comes first, after leading zeros. In 8 dims, position 252 is
    1 1 1 1 1 1 0 0. With `dim` dims, positions must be below 2^dim.

    Examples
    --------
    >>> import wavepe
    >>> wavepe.encoding("binary").absolute([1, 6], 4)
    array([[0., 0., 0., 1.],
           [0., 1., 1., 0.]])
    """

    name = "binary"

    def absolute(
        self, positions: ArrayLike, dim: int, *, length: int | None = None,
        trained_length: int | None = None,
    ) -> np.ndarray:  # fmt: skip
        positions = checks.counted_positions(f"{self.name} positions", positions)
        dim = checks.integer(f"{self.name} dim", dim, 0)
        largest = int(positions.max()) if positions.size else 0
        if largest.bit_length() > dim:
            raise ValueError(
                f"{self.name}: with {dim} dims positions must be below 2^{dim}, got {largest}, "
                f"which has {largest.bit_length()} bits"
            )
        # NumPy defines a shift by 64 and more, too: it gives 0.
        return (positions[..., None] >> np.arange(dim)[::-1] & 1).astype(np.float64)
