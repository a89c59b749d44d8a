"""Vectors of absolute encodings, which NumPy computes once for each length needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..encodings import Encoding
from ..ops._common import check
from ..ops._compiler import traced
from .tables import (
    FIX_LENGTH,
    LARGEST_TABLE,
    build_once,
    cached_by_length,
    encoding_named,
    rows_for,
)


def vectors(
    encoding: Encoding, positions: Tensor, dim: int, below: int | None, *lengths: int | None
) -> Tensor:
    """Return the vectors (..., dim).

    `lengths` are that of the sequence and that of training, or None if the vectors do not depend
    on them.
    """
    device = positions.device
    if positions.numel() == 0:
        return torch.empty((*positions.shape, dim), device=device)
    lowest, count = 0, below
    if count is None:
        lowest, highest = torch.stack(positions.aminmax()).tolist()
        count = highest + 1
    if lowest < 0 or count > LARGEST_TABLE or lengths[0] is not None:
        options = _options(*lengths)
        return to_torch(encoding.absolute(positions.cpu().numpy(), dim, **options), device)
    return _first_rows(count, encoding, dim, device)[positions]


def range_of(encoding: Encoding, start: int, stop: int, *sizes: Any) -> Tensor:
    """Return `_rows` of these arguments, kept where other calls will need the same."""
    dim, length, _, device = sizes
    if length is None and stop <= LARGEST_TABLE:
        return _first_rows(stop, encoding, dim, device)[None, start:stop]
    # Vectors that follow the length are kept for whole sequences only. Each step of a generation
    # has another length.
    rows = (encoding, start, stop, *sizes)
    return _rows(*rows) if start else build_once(_rows, *rows)


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
    options = _options(length, trained_length)
    return to_torch(encoding.absolute(np.arange(start, stop), dim, **options)[None], device)


def _options(length: int | None, trained_length: int | None) -> dict[str, Any]:
    return {} if length is None else {"length": length, "trained_length": trained_length}


@cached_by_length
def _first_rows(count: int, encoding: Encoding, dim: int, device: torch.device) -> Tensor:
    return to_torch(encoding.absolute(np.arange(count), dim), device)


def to_torch(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(device)


@torch.library.custom_op(
    "wavepe::absolute_vectors",
    mutates_args=(),
    schema="(str name, Tensor positions, SymInt dim, SymInt? below, SymInt? length, "
    "SymInt? trained_length) -> Tensor",
)
def _absolute_vectors(name: str, *arguments: Any) -> Tensor:
    return vectors(encoding_named(name), *arguments)


@_absolute_vectors.register_fake
def _(name: str, positions: Tensor, dim: int, *_: int | None) -> Tensor:
    return positions.new_empty((*positions.shape, dim), dtype=torch.float32)


@torch.library.custom_op(
    "wavepe::absolute_range",
    mutates_args=(),
    schema="(str name, SymInt start, SymInt stop, SymInt dim, SymInt? length, "
    "SymInt? trained_length, Device device) -> Tensor",
)
def _absolute_range(name: str, *arguments: Any) -> Tensor:
    return range_of(encoding_named(name), *arguments).clone()  # a compiler may write to the result


@_absolute_range.register_fake
def _(name: str, start: int, stop: int, dim: int, *lengths: Any) -> Tensor:
    return torch.empty((1, stop - start, dim), dtype=torch.float32, device=lengths[-1])


# ---- in a compiler's graph ----------------------------------------------------------------------


def graph_vectors(name: str, *arguments: Any) -> Tensor:
    """Return `vectors` of the encoding of that name."""
    return traced(torch.ops.wavepe.absolute_vectors.default, _standard_vectors)(name, *arguments)


def graph_range(name: str, *arguments: Any) -> Tensor:
    """Return `range_of` of the encoding of that name."""
    return traced(torch.ops.wavepe.absolute_range.default, _standard_range)(name, *arguments)


def _constant(name: str, count: int, *sizes: Any) -> Tensor:
    return build_once(_rows, encoding_named(name), 0, count, *sizes)[0]


def _standard_vectors(
    name: str, positions: Tensor, dim: int, below: int | None, *lengths: int | None
) -> Tensor:
    most = rows_for(below, f"the vectors of {name!r}")
    # A negative index would take a row from the end. One beyond the end is an error.
    place = torch.where(positions < 0, most, positions).flatten()
    rows = _constant(name, most, dim, *lengths, positions.device)
    return rows.index_select(0, place).unflatten(0, positions.shape)


def _standard_range(name: str, start: int, stop: int, dim: int, *sizes: Any) -> Tensor:
    length = sizes[0]
    check(
        length is None or isinstance(length, int),
        f"the vectors of {name!r} depend on the length, so a program of standard operators cannot "
        f"hold those of every length: {FIX_LENGTH}",
    )
    rows = _constant(name, rows_for(stop, f"the vectors of {name!r}"), dim, *sizes)
    return rows.index_select(0, torch.arange(start, stop, device=rows.device))[None]
