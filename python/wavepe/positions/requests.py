"""Requests of a server in one row: each has queries, more keys, and a length of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Requests(NamedTuple):
    """The requests of a row; the queries of each are its last tokens."""

    ends: Mapping[str, Tensor]  # arguments of `ops.attention`
    slices: Sequence[tuple[slice, slice]]  # the queries and the keys of each request in the row
    longest: int  # number of keys

    @classmethod
    def of(cls, query_ends: Tensor, key_ends: Tensor, last: Requests | None) -> Requests:
        """Return the requests with these ends, (requests + 1,), or `last` if it has the same."""
        if last is not None and last.ends["cu_seqlens_k"] is key_ends:
            return last
        queries, keys = query_ends.tolist(), key_ends.tolist()
        of_ends = ([slice(*pair) for pair in pairwise(ends)] for ends in (queries, keys))
        slices = list(zip(*of_ends, strict=True))
        longest = max((x.stop - x.start for _, x in slices), default=0)
        return cls({"cu_seqlens_q": query_ends, "cu_seqlens_k": key_ends}, slices, longest)

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the index in its request of each query, and of each key, (1, tokens)."""
        queries, keys = [], []
        for q, k in self.slices:
            count = k.stop - k.start
            keys.append(torch.arange(count, device=device))
            queries.append(keys[-1][count - (q.stop - q.start) :])
        return torch.cat(queries)[None], torch.cat(keys)[None]

    def key_positions(self, positions: Tensor) -> Tensor:
        """Return the positions (1, keys) of all keys, from those of the queries, (1, queries)."""
        keys = []
        for q, k in self.slices:
            before = torch.arange(k.start - k.stop + 1, 1, device=positions.device)
            keys.append(before + positions[0, q.stop - 1])
        return torch.cat(keys)[None]

    def split(self, kernel_args: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the arguments of `ops.attention` of each request: q, q_rel (1, H, m, d), k, v."""
        for queries, keys in self.slices:
            parts = dict(kernel_args)
            for name, rows in (("q", queries), ("q_rel", queries), ("k", keys), ("v", keys)):
                if parts.get(name) is not None:
                    parts[name] = parts[name][:, :, rows]
            yield parts


Lengths = Sequence[tuple[int, int]]  # of each request in a row, its tokens there and its length


class Row(threading.local):
    """The row of the pass that a thread runs: `lengths` of its requests, if it has several."""

    lengths: Lengths | None = None


current = Row()


def at_each_length(
    lengths: Lengths,
    positions: Tensor,
    of_length: Callable[[int], Any],
    compute: Callable[[Tensor, Any], Any],
) -> list[Any]:
    """Return what `compute` gives for each request of a row; if all agree, by one call."""
    values = [of_length(length) for _, length in lengths]
    if len(set(values)) == 1:
        return [compute(positions, values[0])]
    rows = positions.split([count for count, _ in lengths], 1)
    return [compute(row, value) for row, value in zip(rows, values, strict=True)]
