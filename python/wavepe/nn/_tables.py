"""Constant tables of relative encodings, made when a length first asks for them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .._wavelet_registered import registrations
from ..encodings import Encoding
from ..ops._relative_table import RelativeTable, relative_table

FIRST_CAPACITY = 128
# Rows of more positions are made for the call and not kept: 64 MiB at head size 128.
LARGEST_TABLE = 1 << 17


def capacity_for(keys: int) -> int:
    """A power of two: the same keys meet the same table, whatever was computed before."""
    capacity = FIRST_CAPACITY
    while capacity < keys:
        capacity *= 2
    return capacity


class ConstantTables:
    """The tables of one encoding.

    A compiled graph is good for all lengths up to its table's capacity.
    """

    def __init__(self, encoding: Encoding, head_dim: int, causal: bool) -> None:
        self.encoding, self.head_dim, self.causal = encoding, head_dim, causal

    def reaching(self, keys: int) -> RelativeTable:
        """A table with a row for every distance among `keys` tokens."""
        if torch.compiler.is_compiling():
            name = self._named(capacity_for(keys))
            return getattr(self, self._named_exactly(keys) if name is None else name)
        try:
            return self._kept(capacity_for(keys))
        except ValueError:  # an encoding of one's own may end before the capacity
            return self._kept(keys)

    def _kept(self, length: int) -> RelativeTable:
        return _kept_table(self.encoding, self.head_dim, self.causal, length, registrations())

    # A compiler calls these while it traces, and then reads the attribute as it reads any other.
    @torch.compiler.assume_constant_result
    def _named(self, length: int) -> str | None:
        try:
            return self._named_exactly(length)
        except ValueError:
            return None

    @torch.compiler.assume_constant_result
    def _named_exactly(self, length: int) -> str:
        name = f"_table_{length}_{registrations()}"
        self.__dict__.setdefault(name, self._kept(length))
        return name

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in self.__dict__.items() if not name.startswith("_table_")}


# The modules of all layers share them. A wavelet that is registered anew makes new ones.
@functools.lru_cache(maxsize=32)
def _kept_table(
    encoding: Encoding, head_dim: int, causal: bool, length: int, definitions: int
) -> RelativeTable:
    return relative_table(*encoding.table(length, head_dim, causal=causal))
