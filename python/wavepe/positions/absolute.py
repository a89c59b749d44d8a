"""Absolute encodings: vectors of positions, which NumPy computes once for each length needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..encodings import Encoding
from ..encodings.base import combine
from .tables import (
    LARGEST_TABLE,
    build_once,
    encoding_named,
    keep_by_length,
    name_of,
    refuse_trace,
)


class AbsoluteVectors:
    """The vectors that an encoding adds to token embeddings, as tensors.

    Attributes
    ----------
    encoding : Encoding
        The parts that add vectors.
    """

    def __init__(self, encoding: Encoding, dim: int, trained_length: int | None) -> None:
        self.encoding = combine([(part, None) for part in encoding.parts if part.adds])
        self._name = name_of(self.encoding)
        self.dim, self.trained_length = dim, trained_length
        self.length: int | None = None
        short, long = (self._of_row(np.array([1]), (trained_length or 1) * n) for n in (2, 4))
        self._depends_on_length = not np.array_equal(short, long)

    @property
    def follows_length(self) -> bool:
        """Whether the vector of a position depends on the length of its sequence."""
        return self._depends_on_length and self.length is None

    def fix(self, length: int | None) -> None:
        """Use the vectors of a sequence of `length` tokens from now on.

        None lets the vectors follow the length of each sequence again.
        """
        self.length = length

    def __call__(self, positions: Tensor, below: int | None = None) -> Tensor:
        """Return the vectors (B, L, dim), float32, of `positions` (B, L); each row is a sequence.

        `below` says that all positions lie in 0..below-1. Then the values of `positions` need not
        be read from the device, unless the vectors depend on the length.
        """
        refuse_trace(self.encoding)
        if self._depends_on_length and positions.numel():
            rows = positions.cpu().numpy()
            found = [self._of_row(row, self.length or max(int(row.max()) + 1, 1)) for row in rows]
            return _to_torch(np.stack(found), positions.device)
        if torch.compiler.is_compiling():
            return torch.ops.wavepe_nn.absolute_vectors(self._name, positions, self.dim, below)
        return _vectors(self.encoding, positions, self.dim, below)

    def of_range(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the vectors (1, stop - start, dim), float32, of the last positions of a sequence.

        The sequence has `stop` tokens.
        """
        refuse_trace(self.encoding)
        length = (self.length or max(stop, 1)) if self._depends_on_length else None
        given = (start, stop, self.dim, length, self.trained_length, device)
        if torch.compiler.is_compiling():
            return torch.ops.wavepe_nn.absolute_range(self._name, *given)
        return _of_range(self.encoding, *given)

    def _of_row(self, positions: np.ndarray, length: int) -> np.ndarray:
        return self.encoding.absolute(
            positions, self.dim, length=length, trained_length=self.trained_length
        )


def _vectors(encoding: Encoding, positions: Tensor, dim: int, below: int | None) -> Tensor:
    """Return the vectors (..., dim) for an encoding that does not depend on the length."""
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


def _of_range(encoding: Encoding, start: int, stop: int, *sizes: Any) -> Tensor:
    """Return `_rows` of these arguments, kept where other calls will need the same."""
    dim, length, _, device = sizes
    if length is None and stop <= LARGEST_TABLE:
        return _first_rows(stop, encoding, dim, device)[None, start:stop]
    # Vectors that follow the length are kept for whole sequences only. Each step of a generation
    # has another length.
    given = (encoding, start, stop, *sizes)
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
    """Return the vectors (1, stop - start, dim); `length` is None if they do not depend on it."""
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


@torch.library.custom_op(
    "wavepe_nn::absolute_range",
    mutates_args=(),
    schema="(str name, SymInt start, SymInt stop, SymInt dim, SymInt? length, "
    "SymInt? trained_length, Device device) -> Tensor",
)
def _absolute_range(name: str, *given: Any) -> Tensor:
    return _of_range(encoding_named(name), *given).clone()  # a compiler may write to the result


@_absolute_range.register_fake
def _(name: str, start: int, stop: int, dim: int, *given: Any) -> Tensor:
    return torch.empty((1, stop - start, dim), dtype=torch.float32, device=given[-1])
