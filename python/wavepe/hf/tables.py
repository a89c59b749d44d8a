"""Arrays of an encoding as torch tensors, computed by NumPy once per needed length.

The tables grow by doubling, and every layer and model of one spec, size and device shares them;
what a user registers anew under a known name makes new ones.
A compiler must not trace into NumPy: under torch.compile and torch.export the same functions run
as custom ops `wavepe_hf::*`, so that one graph serves every length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._wavelet_registered import registrations
from ..encodings import encoding

FIRST_CAPACITY = 128
# Positions beyond this are computed one by one: a table up to them would be mostly unused.
LARGEST_TABLE = 1 << 17


class _Rows:
    """Rows 0, 1, 2, ... of one table, as many as were asked for so far."""

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
            array = np.ascontiguousarray(array, dtype=np.float32)
            # Kept for the next caller, who may train: an inference tensor could not be saved there.
            with torch.inference_mode(False):
                rows = self.rows = torch.from_numpy(array).to(self.device)
        return rows[:count]


@functools.lru_cache(maxsize=16)
def _relative_rows(spec: str, head_dim: int, device: torch.device, definitions: int) -> _Rows:
    def compute(length: int) -> np.ndarray:
        table, first, beyond = encoding(spec).table(length, head_dim)
        if first != 0:
            raise ValueError(f"{spec}: a causal table starts at delta 0, this one at {first}")
        mode: Any = "edge" if beyond == "edge" else "constant"
        return np.pad(table, ((0, max(length - len(table), 0)), (0, 0)), mode)

    return _Rows(compute, device)


@functools.lru_cache(maxsize=16)
def _absolute_rows(spec: str, dim: int, device: torch.device, definitions: int) -> _Rows:
    return _Rows(lambda length: encoding(spec).absolute(np.arange(length), dim), device)


def relative_table(spec: str, length: int, query: Tensor) -> Tensor:
    """Rows p_delta for delta = 0..length-1 of a relative encoding.

    Parameters
    ----------
    spec : str
        The encoding.
    length : int
        Number of keys.
    query : Tensor (..., head_dim)
        Gives head size and device.

    Returns
    -------
    Tensor, float32 (length, head_dim)
    """
    if torch.compiler.is_compiling():
        return torch.ops.wavepe_hf.relative_table(spec, length, query.shape[-1], query.device)
    return _relative_rows(spec, query.shape[-1], query.device, registrations()).first(length)


def absolute_vectors(spec: str, positions: Tensor, dim: int) -> Tensor:
    """Vectors of an absolute encoding that does not depend on the sequence's length.

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
        return torch.ops.wavepe_hf.absolute_vectors(spec, positions, dim)
    if positions.numel() == 0:
        return positions.new_empty((*positions.shape, dim), dtype=torch.float32)
    lowest, highest = (int(value) for value in positions.aminmax())
    if lowest < 0 or highest >= LARGEST_TABLE:
        return to_torch(encoding(spec).absolute(positions.cpu().numpy(), dim), positions.device)
    return _absolute_rows(spec, dim, positions.device, registrations()).first(highest + 1)[
        positions
    ]


def to_torch(array: np.ndarray, device: torch.device) -> Tensor:
    """A float32 tensor of the array's values."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(device)


# A custom op may not return a view of what it keeps: the compiler may write into the result.
@torch.library.custom_op("wavepe_hf::relative_table", mutates_args=())
def _relative_table(spec: str, length: int, head_dim: int, device: torch.device) -> Tensor:
    return _relative_rows(spec, head_dim, device, registrations()).first(length).clone()


@_relative_table.register_fake
def _(spec: str, length: int, head_dim: int, device: torch.device) -> Tensor:
    return torch.empty((length, head_dim), dtype=torch.float32, device=device)


@torch.library.custom_op("wavepe_hf::absolute_vectors", mutates_args=())
def _absolute_vectors(spec: str, positions: Tensor, dim: int) -> Tensor:
    return absolute_vectors(spec, positions, dim)


@_absolute_vectors.register_fake
def _(spec: str, positions: Tensor, dim: int) -> Tensor:
    return positions.new_empty((*positions.shape, dim), dtype=torch.float32)
