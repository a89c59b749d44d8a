"""Arrays of an encoding as torch tensors, computed by NumPy once per needed length.

Every layer and model of one spec, size and device shares them; what a user registers anew under a
known name makes new ones. A compiler must not trace into NumPy: under torch.compile and
torch.export the same functions run as custom ops `wavepe_hf::*`, so that one graph serves every
length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .._wavelet_registered import registrations
from ..encodings import encoding
from ..nn._tables import FIRST_CAPACITY, LARGEST_TABLE, ConstantTables
from ..ops._relative_table import RelativeTable


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
            array = np.ascontiguousarray(array, dtype=np.float32)
            # Kept for the next caller, who may train: an inference tensor could not be saved there.
            with torch.inference_mode(False):
                rows = self.rows = torch.from_numpy(array).to(self.device)
        return rows[:count]


@functools.lru_cache(maxsize=32)
def _constant_tables(spec: str, head_dim: int, definitions: int) -> ConstantTables:
    return ConstantTables(encoding(spec), head_dim, causal=True)


@functools.lru_cache(maxsize=16)
def _absolute_rows(spec: str, dim: int, device: torch.device, definitions: int) -> _Rows:
    return _Rows(lambda length: encoding(spec).absolute(np.arange(length), dim), device)


def constant_table(spec: str, head_dim: int, keys: int) -> RelativeTable:
    """The table of a relative encoding that learns nothing, for all distances among `keys` keys.

    Not under a compiler: see `relative_rows` and `compiled`.
    """
    return _constant_tables(spec, head_dim, registrations()).reaching(keys)


def table_rows(
    table: RelativeTable, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, int, str]:
    """p (w, head_dim), its first delta, and what lies beyond it ("zero" or "edge")."""
    p, first, _ = table.tensors(dtype, device)
    return p, first, table.beyond


def relative_rows(spec: str, keys: int, query: Tensor) -> Tensor:
    """Rows p_delta for delta = 0..keys-1 as an operator that a compiler need not look into.

    Parameters
    ----------
    spec : str
        The encoding.
    keys : int
    query : Tensor (..., head_dim)
        Gives head size, dtype and device.

    Returns
    -------
    Tensor (keys, head_dim) of the query's dtype
    """
    return torch.ops.wavepe_hf.relative_rows(spec, keys, query.shape[-1], query.dtype, query.device)


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


@torch.library.custom_op("wavepe_hf::relative_rows", mutates_args=())
def _relative_rows(
    spec: str, keys: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    p, first, beyond = table_rows(constant_table(spec, head_dim, keys), dtype, device)
    row = torch.arange(keys, device=device) - first
    rows = p[row.clamp(0, max(len(p) - 1, 0))] if len(p) else p.new_zeros((keys, head_dim))
    outside = (row < 0) | (row >= len(p))
    return rows if beyond == "edge" else rows.masked_fill(outside[:, None], 0)


@_relative_rows.register_fake
def _(spec: str, keys: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((keys, head_dim), dtype=dtype, device=device)


@torch.library.custom_op("wavepe_hf::absolute_vectors", mutates_args=())
def _absolute_vectors(spec: str, positions: Tensor, dim: int) -> Tensor:
    return absolute_vectors(spec, positions, dim)


@_absolute_vectors.register_fake
def _(spec: str, positions: Tensor, dim: int) -> Tensor:
    return positions.new_empty((*positions.shape, dim), dtype=torch.float32)
