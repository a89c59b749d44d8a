"""Absolute encodings: vectors of positions, computed by NumPy once per needed length."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..encodings import Encoding
from .tables import LARGEST_TABLE, encoding_named, keep_by_length, name_of


class AbsoluteVectors:
    """The vectors that an encoding with the entry point "absolute" adds to token embeddings.

    Attributes
    ----------
    encoding : Encoding
    """

    def __init__(self, encoding: Encoding, dim: int, trained_length: int | None) -> None:
        self.encoding, self._name = encoding, name_of(encoding)
        self.dim, self.trained_length = dim, trained_length
        self.length: int | None = None
        one, other = (self._of_row(np.array([1]), (trained_length or 1) * n) for n in (2, 4))
        self._differs = not np.array_equal(one, other)

    @property
    def follows_length(self) -> bool:
        """Tell whether the vector of a position depends on the length of its sequence."""
        return self._differs and self.length is None

    def fix(self, length: int | None) -> None:
        """Take the vectors of `length` tokens in every call; None lets them follow again."""
        self.length = length

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the vectors, float32 (B, L, dim), of `positions` (B, L), each row a sequence."""
        if self._differs and positions.numel():
            rows = positions.cpu().numpy()
            found = [self._of_row(row, self.length or max(int(row.max()) + 1, 1)) for row in rows]
            return _to_torch(np.stack(found), positions.device)
        if torch.compiler.is_compiling():
            return torch.ops.wavepe_nn.absolute_vectors(self._name, positions, self.dim)
        return _vectors(self.encoding, positions, self.dim)

    def _of_row(self, positions: np.ndarray, length: int) -> np.ndarray:
        return self.encoding.absolute(
            positions, self.dim, length=length, trained_length=self.trained_length
        )


def _vectors(encoding: Encoding, positions: Tensor, dim: int) -> Tensor:
    """Return the vectors (..., dim) of an encoding that does not depend on the length."""
    device = positions.device
    if positions.numel() == 0:
        return torch.empty((*positions.shape, dim), device=device)
    lowest, highest = (int(value) for value in positions.aminmax())
    if lowest < 0 or highest >= LARGEST_TABLE:
        return _to_torch(encoding.absolute(positions.cpu().numpy(), dim), device)
    return _first_rows(highest + 1, encoding, dim, device)[positions]


@keep_by_length
def _first_rows(count: int, encoding: Encoding, dim: int, device: torch.device) -> Tensor:
    return _to_torch(encoding.absolute(np.arange(count), dim), device)


def _to_torch(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(device)


@torch.library.custom_op("wavepe_nn::absolute_vectors", mutates_args=())
def _absolute_vectors(name: str, positions: Tensor, dim: int) -> Tensor:
    return _vectors(encoding_named(name), positions, dim)


@_absolute_vectors.register_fake
def _(name: str, positions: Tensor, dim: int) -> Tensor:
    return positions.new_empty((*positions.shape, dim), dtype=torch.float32)
