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
from ..ops._common import in_new_thread, wide
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


def constant_bias(
    encoding: Encoding,
    heads: int,
    keys: int,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, int, str]:
    """A bias (heads, w) with a number for every distance among `keys` tokens, its first delta, and
    what lies beyond; not for a compiler's graph."""
    given = encoding, heads, capacity_for(keys), causal, dtype, device
    try:
        return _kept_bias(*given, registrations())
    except ValueError:  # an encoding of one's own may end before the capacity
        return _kept_bias(encoding, heads, keys, *given[3:], registrations())


@functools.lru_cache(maxsize=32)
def _kept_bias(
    encoding: Encoding,
    heads: int,
    length: int,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
    definitions: int,
) -> tuple[Tensor, int, str]:
    bias, first, beyond = encoding.bias(length, heads, causal=causal)
    # For every later call, whatever this one is part of: inference, a tracer.
    return in_new_thread(lambda: torch.from_numpy(bias).to(device, dtype)), first, beyond


# ---- for compilers, whose operators take no objects ---------------------------------------------


def name_of(encoding: Encoding, causal: bool) -> str:
    """A text that `table_named` knows: the spec, and whether there are rows on both sides.

    A class that is registered anew has the spec of the former one: then a number tells them apart.
    """
    spec, end = str(encoding), "" if causal else _BOTH_SIDES
    name, number = spec + end, 1
    while _named.setdefault(name, encoding) != encoding:
        number += 1
        name = f"{spec} #{number}{end}"
    return name


def _of_name(name: str) -> tuple[Encoding, bool]:
    """What was named so, in this process or where a graph was exported."""
    spec = name.removesuffix(_BOTH_SIDES)
    return _named[name] if name in _named else read_encoding(spec), name == spec


def table_named(name: str, head_dim: int, keys: int) -> RelativeTable:
    """`constant_table` of what has this name."""
    encoding, causal = _of_name(name)
    return constant_table(encoding, head_dim, keys, causal)


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
    return _between(p, start, table.beyond, first, keys)


@_constant_rows.register_fake
def _(
    name: str, first: int, keys: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty((keys - first, head_dim), dtype=dtype, device=device)


def biases_named(name: str, heads: int, keys: int, query: Tensor) -> tuple[Tensor, int]:
    """A bias (heads, w) for every distance among `keys` tokens, and the first distance.

    `name` is as `name_of` gives it; the query gives dtype and device.
    """
    first = 1 - keys if name.endswith(_BOTH_SIDES) else 0
    given = name, first, keys, heads, wide(query), query.device
    return torch.ops.wavepe_nn.constant_biases(*given), first


@torch.library.custom_op("wavepe_nn::constant_biases", mutates_args=())
def _constant_biases(
    name: str, first: int, keys: int, heads: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    encoding, causal = _of_name(name)
    bias, start, beyond = constant_bias(encoding, heads, keys, causal, dtype, device)
    return _between(bias.T, start, beyond, first, keys).T.contiguous()


@_constant_biases.register_fake
def _(
    name: str, first: int, keys: int, heads: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty((heads, keys - first), dtype=dtype, device=device)


def _between(rows: Tensor, start: int, beyond: str, first: int, last: int) -> Tensor:
    """Of rows (w, ...) for delta = start.., those for delta = first..last-1, in new memory."""
    row = torch.arange(first, last, device=rows.device) - start
    if not len(rows):
        return rows.new_zeros((len(row), *rows.shape[1:]))
    found = rows[row.clamp(0, len(rows) - 1)]
    outside = (row < 0) | (row >= len(rows))
    return found if beyond == "edge" else found.masked_fill(outside[:, None], 0)
