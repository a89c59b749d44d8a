"""Constant tables of relative encodings, computed by NumPy once per needed length.

All layers and models of one encoding and head size share them; what a user registers anew under a
known name makes new ones. A compiler must not trace into NumPy: in its graph an operator stands for
the table (here and in compiled.py), so that one graph serves every length.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._wavelet_registered import registrations
from ..encodings import Encoding
from ..encodings import encoding as read_encoding
from ..ops._relative_table import RelativeTable, relative_table

FIRST_CAPACITY = 128
# Rows of more positions are made for the call and not kept: 64 MiB at head size 128.
LARGEST_TABLE = 1 << 17

_BOTH_SIDES = " (both sides)"
_named: dict[str, Encoding] = {}


def capacity_for(keys: int) -> int:
    """A power of two: the same keys meet the same table, whatever was computed before."""
    capacity = FIRST_CAPACITY
    while capacity < keys:
        capacity *= 2
    return capacity


def constant_table(encoding: Encoding, head_dim: int, keys: int, causal: bool) -> RelativeTable:
    """A table with a row for every distance among `keys` tokens; not for a compiler's graph."""
    try:
        return _kept(encoding, head_dim, capacity_for(keys), causal, registrations())
    except ValueError:  # an encoding of one's own may end before the capacity
        return _kept(encoding, head_dim, keys, causal, registrations())


@functools.lru_cache(maxsize=32)
def _kept(
    encoding: Encoding, head_dim: int, length: int, causal: bool, definitions: int
) -> RelativeTable:
    return relative_table(*encoding.table(length, head_dim, causal=causal))


# ---- for compilers, whose operators take no objects ---------------------------------------------


def name_of(encoding: Encoding, causal: bool) -> str:
    """A text that `table_named` knows: the spec, and whether there are rows on both sides."""
    name = f"{encoding}{'' if causal else _BOTH_SIDES}"
    if _named.setdefault(name, encoding) != encoding:
        raise ValueError(f"two encodings are called '{encoding}': a compiler needs other names")
    return name


def table_named(name: str, head_dim: int, keys: int) -> RelativeTable:
    """The constant table of what was named so, in this process or where a graph was exported."""
    spec = name.removesuffix(_BOTH_SIDES)
    encoding = _named[name] if name in _named else read_encoding(spec)
    return constant_table(encoding, head_dim, keys, causal=name == spec)


def rows_named(name: str, keys: int, query: Tensor) -> tuple[Tensor, int]:
    """Rows of a table for every distance among `keys` tokens, and the first distance.

    Parameters
    ----------
    name : str
        As `name_of` gives it.
    keys : int
    query : Tensor (..., head_dim)
        Gives head size, dtype and device.

    Returns
    -------
    p : Tensor (keys, head_dim), with rows on both sides (2 keys - 1, head_dim), of q's dtype
    first : int
    """
    first = 1 - keys if name.endswith(_BOTH_SIDES) else 0
    given = name, first, keys, query.shape[-1], query.dtype, query.device
    return torch.ops.wavepe_nn.constant_rows(*given), first


@torch.library.custom_op("wavepe_nn::constant_rows", mutates_args=())
def _constant_rows(
    name: str, first: int, keys: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    table = table_named(name, head_dim, keys)
    p, start, _ = table.tensors(dtype, device)
    row = torch.arange(first, keys, device=device) - start
    rows = p[row.clamp(0, max(len(p) - 1, 0))] if len(p) else p.new_zeros((len(row), head_dim))
    outside = (row < 0) | (row >= len(p))
    return rows if table.beyond == "edge" else rows.masked_fill(outside[:, None], 0)


@_constant_rows.register_fake
def _(
    name: str, first: int, keys: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty((keys - first, head_dim), dtype=dtype, device=device)
