"""Absolute encodings: vectors of positions, which NumPy computes once for each length needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..encodings import Encoding
from ..encodings.base import combine
from .tables import LARGEST_TABLE, build_once, encoding_named, keep_by_length, name_of


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
        second, lengths = np.array([1]).tobytes(), [(trained_length or 1) * n for n in (2, 4)]
        short, long = (_of_row(self.encoding, second, dim, n, trained_length) for n in lengths)
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
        given = (
            positions, self.dim, below, self._depends_on_length, self.length, self.trained_length
        )  # fmt: skip
        if torch.compiler.is_compiling():
            return torch.ops.wavepe_nn.absolute_vectors(self._name, *given)
        return _vectors(self.encoding, *given)

    def of_range(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the vectors (1, stop - start, dim), float32, of the last positions of a sequence.

        The sequence has `stop` tokens.
        """
        return self(torch.arange(start, stop, device=device)[None], below=stop)


def _vectors(
    encoding: Encoding,
    positions: Tensor,
    dim: int,
    below: int | None,
    depends_on_length: bool,
    length: int | None,
    trained_length: int | None,
) -> Tensor:
    """Return the vectors (..., dim); where they depend on the length, None is that of each row."""
    device = positions.device
    if positions.numel() == 0:
        return torch.empty((*positions.shape, dim), device=device)
    if depends_on_length:
        found = []
        for row in positions.long().cpu().numpy():
            of_row = length or max(int(row.max()) + 1, 1)
            given = (encoding, row.tobytes(), dim, of_row, trained_length)
            # Whole sequences are kept. Each step of a generation has another length.
            found.append(_of_row(*given) if row[0] else build_once(_of_row, *given))
        return _to_torch(np.stack(found), device)
    lowest, count = 0, below
    if count is None:
        lowest, highest = torch.stack(positions.aminmax()).tolist()
        count = highest + 1
    if lowest < 0 or count > LARGEST_TABLE:
        rows = encoding.absolute(positions.cpu().numpy(), dim, trained_length=trained_length)
        return _to_torch(rows, device)
    return _first_rows(count, encoding, dim, trained_length, device)[positions]


def _of_row(
    encoding: Encoding, positions: bytes, dim: int, length: int, trained_length: int | None
) -> np.ndarray:
    row = np.frombuffer(positions, np.int64)
    return encoding.absolute(row, dim, length=length, trained_length=trained_length)


@keep_by_length
def _first_rows(
    count: int, encoding: Encoding, dim: int, trained_length: int | None, device: torch.device
) -> Tensor:
    rows = encoding.absolute(np.arange(count), dim, trained_length=trained_length)
    return _to_torch(rows, device)


def _to_torch(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(device)


@torch.library.custom_op("wavepe_nn::absolute_vectors", mutates_args=())
def _absolute_vectors(
    name: str,
    positions: Tensor,
    dim: int,
    below: int | None,
    depends_on_length: bool,
    length: int | None,
    trained_length: int | None,
) -> Tensor:
    given = (positions, dim, below, depends_on_length, length, trained_length)
    return _vectors(encoding_named(name), *given)


@_absolute_vectors.register_fake
def _(name: str, positions: Tensor, dim: int, *_: Any) -> Tensor:
    return positions.new_empty((*positions.shape, dim), dtype=torch.float32)
