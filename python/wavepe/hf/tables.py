"""Constant tables of an encoding, computed by NumPy once per needed length.

Every layer and model of one spec and size shares them; what a user registers anew under a known
name makes new ones. A compiler must not trace into NumPy: under torch.compile and torch.export the
same function runs as a custom op `wavepe_hf::relative_rows`, so that one graph serves every length.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._wavelet_registered import registrations
from ..encodings import encoding
from ..nn._tables import ConstantTables
from ..ops._relative_table import RelativeTable


@functools.lru_cache(maxsize=32)
def _constant_tables(spec: str, head_dim: int, definitions: int) -> ConstantTables:
    return ConstantTables(encoding(spec), head_dim, causal=True)


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
