"""Absolute encodings: vectors of positions, which NumPy computes once for each length needed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..encodings import Encoding
from ..encodings.base import combine
from .requests import at_each_length, current
from .tables import FIX_LENGTH, name_of, refuse_trace
from .vectors import graph_range, graph_vectors, range_of, to_torch, vectors


class AbsoluteVectors:
    """The vectors that the parts of an encoding add to token embeddings, as tensors."""

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
        if self.follows_length and torch.compiler.is_exporting():
            raise RuntimeError(
                f"wavepe: the vectors of '{self.encoding}' depend on the length, so an exported "
                f"program cannot compute them from positions: {FIX_LENGTH}"
            )
        several = None if torch.compiler.is_compiling() else current.lengths
        if self.follows_length and several is not None:
            parts = at_each_length(
                several, positions.cpu(), int, lambda row, n: self._of_row(row.numpy(), n)
            )
            return to_torch(np.concatenate(parts, 1), positions.device)
        if self.follows_length and positions.numel():
            rows = positions.cpu().numpy()
            vectors_of_rows = [self._of_row(row, max(int(row.max()) + 1, 1)) for row in rows]
            return to_torch(np.stack(vectors_of_rows), positions.device)
        lengths = (self.length, self.trained_length) if self._depends_on_length else (None, None)
        if torch.compiler.is_compiling():
            return graph_vectors(self._name, positions, self.dim, below, *lengths)
        return vectors(self.encoding, positions, self.dim, below, *lengths)

    def of_range(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the vectors (1, stop - start, dim), float32, of the last positions of a sequence.

        The sequence has `stop` tokens.
        """
        refuse_trace(self.encoding)
        length = (self.length or max(stop, 1)) if self._depends_on_length else None
        sizes = (start, stop, self.dim, length, self.trained_length, device)
        if torch.compiler.is_compiling():
            return graph_range(self._name, *sizes)
        return range_of(self.encoding, *sizes)

    def _of_row(self, positions: np.ndarray, length: int) -> np.ndarray:
        return self.encoding.absolute(
            positions, self.dim, length=length, trained_length=self.trained_length
        )
