"""Absolute encodings: vectors of positions, computed by NumPy once per needed length."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..encodings import Encoding
from .tables import LARGEST_TABLE, build_once, encoding_named, keep_by_length, name_of


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

    def __call__(self, positions: Tensor, below: int | None = None) -> Tensor:
        """Return the vectors, float32 (B, L, dim), of `positions` (B, L), each row a sequence.

        The positions are read, unless they are known to lie in 0..`below`-1 and the length of the
        sequence does not matter.
        """
        if self._differs and positions.numel():
            rows = positions.cpu().numpy()
            found = [self._of_row(row, self.length or max(int(row.max()) + 1, 1)) for row in rows]
            return _to_torch(np.stack(found), positions.device)
        if torch.compiler.is_compiling():
            return torch.ops.wavepe_nn.absolute_vectors(self._name, positions, self.dim, below)
        return _vectors(self.encoding, positions, self.dim, below)

    def of_range(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the vectors, float32 (1, stop - start, dim), of a sequence's last positions."""
        length = (self.length or max(stop, 1)) if self._differs else None
        given = (start, stop, self.dim, length, self.trained_length, device)
        if torch.compiler.is_compiling():
            return torch.ops.wavepe_nn.absolute_range(self._name, *given)
        return _of_range(self.encoding, *given)

    def _of_row(self, positions: np.ndarray, length: int) -> np.ndarray:
        return self.encoding.absolute(
            positions, self.dim, length=length, trained_length=self.trained_length
        )


def _vectors(encoding: Encoding, positions: Tensor, dim: int, below: int | None) -> Tensor:
    """Return the vectors (..., dim) of an encoding that does not depend on the length."""
    device = positions.device
    if positions.numel() == 0:
        return torch.empty((*positions.shape, dim), device=device)
    lowest, count = 0, below
    if count is None:
        lowest, highest = torch.stack(positions.aminmax()).tolist()
        count = highest + 1
    if lowest < 0 or count > LARGEST_TABLE:
        return _to_torch(encoding.absolute(positions.cpu().numpy(), dim), device)
    return _first_rows(count, encoding, dim, device)[positions]


def _of_range(
    encoding: Encoding,
    start: int,
    stop: int,
    dim: int,
    length: int | None,
    trained_length: int | None,
    device: torch.device,
) -> Tensor:
    """Return the vectors (1, stop - start, dim); `length` is None where it does not matter."""
    if length is None and stop <= LARGEST_TABLE:
        return _first_rows(stop, encoding, dim, device)[None, start:stop]
    given = (encoding, start, stop, dim, length, trained_length, device)
    # What follows the length is kept for whole sequences: the steps of a generation differ.
    return _rows(*given) if start else build_once(_rows, *given)


def _rows(
    encoding: Encoding,
    start: int,
    stop: int,
    dim: int,
    length: int | None,
    trained_length: int | None,
    device: torch.device,
) -> Tensor:
    options = {} if length is None else {"length": length, "trained_length": trained_length}
    return _to_torch(encoding.absolute(np.arange(start, stop), dim, **options)[None], device)


@keep_by_length
def _first_rows(count: int, encoding: Encoding, dim: int, device: torch.device) -> Tensor:
    return _to_torch(encoding.absolute(np.arange(count), dim), device)


def _to_torch(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(device)


@torch.library.custom_op("wavepe_nn::absolute_vectors", mutates_args=())
def _absolute_vectors(name: str, positions: Tensor, dim: int, below: int | None) -> Tensor:
    return _vectors(encoding_named(name), positions, dim, below)


@_absolute_vectors.register_fake
def _(name: str, positions: Tensor, dim: int, below: int | None) -> Tensor:
    return positions.new_empty((*positions.shape, dim), dtype=torch.float32)


@torch.library.custom_op("wavepe_nn::absolute_range", mutates_args=())
def _absolute_range(
    name: str,
    start: int,
    stop: int,
    dim: int,
    length: int | None,
    trained_length: int | None,
    device: torch.device,
) -> Tensor:
    given = (start, stop, dim, length, trained_length, device)
    return _of_range(encoding_named(name), *given).clone()  # a compiler may write to it


@_absolute_range.register_fake
def _(
    name: str,
    start: int,
    stop: int,
    dim: int,
    length: int | None,
    trained_length: int | None,
    device: torch.device,
) -> Tensor:
    return torch.empty((1, stop - start, dim), dtype=torch.float32, device=device)
