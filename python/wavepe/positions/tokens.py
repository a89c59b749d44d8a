"""Positions and indices of tokens, by steps that exporters take, those of ONNX, too."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops._compiler import wants_standard
from ..ops._torch_private import holds
from .requests import Requests


class TokenIndices(NamedTuple):
    """Where queries and keys stand."""

    offset: int | Tensor | None = None  # index of the first query's key, () or (B,); None: last
    positions: Tensor | None = None  # of the queries, (m,) or (B|1, m); None: their places
    key_mask: Tensor | None = None  # (B|1, n), False for tokens that no query sees
    requests: Requests | None = None  # sequences in the only row; the queries of each come last

    def queries(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the indices of the keys at the places of the queries, int64 (B|1, m)."""
        first: Any = k.shape[2] - q.shape[2] if self.offset is None else self.offset
        if isinstance(first, Tensor):
            first = first.to(q.device).reshape(-1, 1)
        return torch.arange(q.shape[2], device=q.device)[None] + first

    def index_pairs(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers of queries and keys whose differences are the distances."""
        if self.requests is not None:
            return self.requests.indices(q.device)
        return self.queries(q, k), torch.arange(k.shape[2], device=k.device)[None]

    def absolute(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys, these counted back from real queries."""
        places, keys = self.index_pairs(q, k)
        if self.positions is None:
            return places, keys
        positions = self.positions.to(q.device)
        positions = positions if positions.dim() == 2 else positions[None]
        if self.requests is not None:
            return positions, self.requests.key_positions(positions)
        if q.shape[2] == k.shape[2]:
            return positions, positions
        shift = positions - places
        if self.key_mask is None:
            return positions, keys + shift[:, -1:]
        seen = self.key_mask.to(q.device)
        rows = torch.broadcast_shapes(seen.shape[:1], places.shape[:1])[0]
        place = places.clamp(max=k.shape[2] - 1).clamp(min=0).expand(rows, -1)
        shift = torch.where(seen.expand(rows, -1).gather(1, place), shift, -(1 << 32))
        return positions, keys + shift.amax(1, keepdim=True)


LAST_QUERIES = TokenIndices()


def token_positions(real: Tensor, segments: Tensor | None = None) -> Tensor:
    """Return positions (B, n) that count `real` tokens, anew in each of `segments` (B|1, n)."""
    counted = real.long().cumsum(-1)
    if segments is not None:
        begins = segments != value_before(segments, segments[:, :1] + 1)
        counted = counted - largest_so_far(torch.where(begins, counted - real.long(), 0))
    return (counted - 1).clamp(min=0)


def value_before(x: Tensor, first: Tensor | int) -> Tensor:
    """Return (B, n): the value of the token before each one, and `first` before the first."""
    # To slice n - 1 tokens would tell an exporter that n is not 2.
    before = torch.nn.functional.pad(x, (1, 0))[:, : x.shape[1]]
    return torch.where(torch.arange(x.shape[1], device=x.device) == 0, first, before)


def largest_so_far(x: Tensor) -> Tensor:
    """Return (..., n): the largest of x (..., n) up to each place, at least -1."""
    if not wants_standard():
        holds(x.numel() != 0)  # cummax asks
        return x.cummax(-1).values
    n = x.shape[-1]  # ONNX has no cummax
    place = torch.arange(n, device=x.device)
    return torch.where(place <= place[:, None], x[..., None, :], -1).amax(-1)
