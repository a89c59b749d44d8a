"""Absolute encodings: vectors of positions, which NumPy computes once for each length needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..encodings import Encoding
from ..encodings.base import combine
from ..ops._common import check
from ..ops._compiler import traced
from .requests import at_each_length, current
from .tables import (
    FIX_LENGTH,
    LARGEST_TABLE,
    build_once,
    cached_by_length,
    encoding_named,
    name_of,
    refuse_trace,
    rows_for,
)


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
        """Use the vectors of `length` tokens from now on; None: those of each sequence."""
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
            return _to_torch(np.concatenate(parts, 1), positions.device)
        if self.follows_length and positions.numel():
            rows = positions.cpu().numpy()
            vectors_of_rows = [self._of_row(row, max(int(row.max()) + 1, 1)) for row in rows]
            return _to_torch(np.stack(vectors_of_rows), positions.device)
        return self._computed(positions, 0, below, self.length, positions.device)

    def of_range(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the vectors (1, stop - start, dim), float32, of the last of `stop` tokens."""
        refuse_trace(self.encoding)
        return self._computed(None, start, stop, self.length or max(stop, 1), device)

    def _computed(
        self,
        positions: Tensor | None,
        start: int,
        stop: int | None,
        length: int | None,
        device: torch.device,
    ) -> Tensor:
        """Return the vectors of `positions`, which are below `stop`; None is start..stop-1."""
        lengths = (length, self.trained_length) if self._depends_on_length else (None, None)
        arguments = (positions, start, stop, self.dim, *lengths, device)
        if torch.compiler.is_compiling():
            op = torch.ops.wavepe.absolute_vectors.default
            return traced(op, _standard_vectors)(self._name, *arguments)
        return _vectors(self.encoding, *arguments)

    def _of_row(self, positions: np.ndarray, length: int) -> np.ndarray:
        return self.encoding.absolute(
            positions, self.dim, length=length, trained_length=self.trained_length
        )


def _vectors(
    encoding: Encoding, positions: Tensor | None, start: int, stop: Any, *sizes: Any
) -> Tensor:
    """Return the vectors (..., dim) of `AbsoluteVectors._computed`, kept where others need them."""
    dim, length, trained_length, device = sizes
    if positions is None:
        if length is None and stop <= LARGEST_TABLE:
            return _first_rows(stop, encoding, dim, device)[None, start:stop]
        # Vectors that follow the length are kept for whole sequences only. Each step of a
        # generation has another length.
        rows = (encoding, start, stop, *sizes)
        return _rows(*rows) if start else build_once(_rows, *rows)
    device = positions.device
    if positions.numel() == 0:
        return torch.empty((*positions.shape, dim), device=device)
    lowest, count = 0, stop
    if count is None:
        lowest, highest = torch.stack(positions.aminmax()).tolist()
        count = highest + 1
    if lowest < 0 or count > LARGEST_TABLE or length is not None:
        options = {"length": length, "trained_length": trained_length}
        return _to_torch(encoding.absolute(positions.cpu().numpy(), dim, **options), device)
    return _first_rows(count, encoding, dim, device)[positions]


def _rows(
    encoding: Encoding,
    start: int,
    stop: int,
    dim: int,
    length: int | None,
    trained_length: int | None,
    device: torch.device,
) -> Tensor:
    """Return the vectors (1, stop - start, dim)."""
    options = {"length": length, "trained_length": trained_length}
    return _to_torch(encoding.absolute(np.arange(start, stop), dim, **options)[None], device)


@cached_by_length
def _first_rows(count: int, encoding: Encoding, dim: int, device: torch.device) -> Tensor:
    return _to_torch(encoding.absolute(np.arange(count), dim), device)


def _to_torch(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(device)


# ---- in a compiler's graph ----------------------------------------------------------------------


@torch.library.custom_op(
    "wavepe::absolute_vectors",
    mutates_args=(),
    schema="(str name, Tensor? positions, SymInt start, SymInt? stop, SymInt dim, SymInt? length, "
    "SymInt? trained_length, Device device) -> Tensor",
)
def _absolute_vectors(name: str, positions: Tensor | None, *arguments: Any) -> Tensor:
    vectors = _vectors(encoding_named(name), positions, *arguments)
    return vectors.clone() if positions is None else vectors  # a compiler may write to the result


@_absolute_vectors.register_fake
def _(
    name: str, positions: Tensor | None, start: int, stop: Any, dim: int, *lengths: Any
) -> Tensor:
    if positions is not None:
        return positions.new_empty((*positions.shape, dim), dtype=torch.float32)
    return torch.empty((1, stop - start, dim), dtype=torch.float32, device=lengths[-1])


def _standard_vectors(
    name: str, positions: Tensor | None, start: int, stop: Any, *sizes: Any
) -> Tensor:
    _, length, _, device = sizes
    check(
        length is None or isinstance(length, int),
        f"the vectors of {name!r} depend on the length, so a program of standard operators cannot "
        f"hold those of every length: {FIX_LENGTH}",
    )
    most = rows_for(stop, f"the vectors of {name!r}")
    rows = build_once(_rows, encoding_named(name), 0, most, *sizes)[0]
    if positions is None:
        return rows.index_select(0, torch.arange(start, stop, device=device))[None]
    # A negative index would take a row from the end. One beyond the end is an error.
    place = torch.where(positions < 0, most, positions).flatten()
    return rows.index_select(0, place).unflatten(0, positions.shape)
