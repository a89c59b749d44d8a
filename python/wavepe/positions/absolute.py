"""Absolute encodings: vectors of positions, computed by NumPy once per needed length."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .._wavelet_registered import registrations
from ..encodings import Encoding
from ..encodings import encoding as read_encoding
from .tables import FIRST_CAPACITY, LARGEST_TABLE


class AbsoluteVectors:
    """The vectors that an encoding with the entry point "absolute" adds to token embeddings.

    Attributes
    ----------
    encoding : Encoding
    follows_length : bool
        The vector of a position depends on the length of its sequence.
    """

    def __init__(self, encoding: Encoding, dim: int, trained_length: int | None) -> None:
        self.encoding = encoding
        self.spec = str(encoding)
        self.dim, self.trained_length = dim, trained_length
        one, other = (self._of_row(np.array([1]), (trained_length or 1) * n) for n in (2, 4))
        self.follows_length = not np.array_equal(one, other)

    def __call__(self, positions: Tensor) -> Tensor:
        """Of each position, float32 (B, L, dim); `positions` (B, L), each row with its length."""
        if not (self.follows_length and positions.numel()):
            return absolute_vectors(self.spec, positions, self.dim)
        rows = positions.cpu().numpy()
        found = np.stack([self._of_row(row, max(int(row.max()) + 1, 1)) for row in rows])
        return _to_torch(found, positions.device)

    def _of_row(self, positions: np.ndarray, length: int) -> np.ndarray:
        return self.encoding.absolute(
            positions, self.dim, length=length, trained_length=self.trained_length
        )


def absolute_vectors(spec: str, positions: Tensor, dim: int) -> Tensor:
    """Vectors of an absolute encoding that does not depend on the sequence's length.

    A compiler must not trace into NumPy: under torch.compile and torch.export this is a custom op,
    so that one graph serves every length.

    Parameters
    ----------
    spec : str
        The encoding.
    positions : integer Tensor (...)
    dim : int
        Size of the token embedding.

    Returns
    -------
    Tensor, float32 (..., dim)
    """
    if torch.compiler.is_compiling():
        return torch.ops.wavepe_nn.absolute_vectors(spec, positions, dim)
    if positions.numel() == 0:
        return positions.new_empty((*positions.shape, dim), dtype=torch.float32)
    lowest, highest = (int(value) for value in positions.aminmax())
    if lowest < 0 or highest >= LARGEST_TABLE:
        return _to_torch(
            read_encoding(spec).absolute(positions.cpu().numpy(), dim), positions.device
        )
    rows = _kept_rows(spec, dim, positions.device, registrations())
    return rows.first(highest + 1)[positions]


class _Rows:
    """Vectors of positions 0, 1, 2, ..., as many as were asked for so far."""

    def __init__(self, compute: Callable[[int], np.ndarray], device: torch.device) -> None:
        self.compute, self.device = compute, device
        self.rows = torch.empty(0)

    def first(self, count: int) -> Tensor:
        rows = self.rows
        if len(rows) < count:
            try:
                array = self.compute(max(count, 2 * len(rows), FIRST_CAPACITY))
            except ValueError:  # an encoding may end between: "binary" has 2^dim positions
                array = self.compute(count)
            # Kept for the next caller, who may train: an inference tensor could not be saved there.
            with torch.inference_mode(False):
                rows = self.rows = _to_torch(array, self.device)
        return rows[:count]


# Every model of one spec, size and device shares them; what a user registers anew under a known
# name makes new ones.
@functools.lru_cache(maxsize=16)
def _kept_rows(spec: str, dim: int, device: torch.device, definitions: int) -> _Rows:
    return _Rows(lambda length: read_encoding(spec).absolute(np.arange(length), dim), device)


def _to_torch(array: np.ndarray, device: torch.device) -> Tensor:
    """A float32 tensor of the array's values."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(device)


@torch.library.custom_op("wavepe_nn::absolute_vectors", mutates_args=())
def _absolute_vectors(spec: str, positions: Tensor, dim: int) -> Tensor:
    return absolute_vectors(spec, positions, dim)


@_absolute_vectors.register_fake
def _(spec: str, positions: Tensor, dim: int) -> Tensor:
    return positions.new_empty((*positions.shape, dim), dtype=torch.float32)
