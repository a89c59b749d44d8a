"""Steps of the scores of attention that its forms in torch, and positions, have in common."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

_LIMIT = 1 << 61  # beyond any key; sums of a few of these numbers do not overflow


def default_scale(q: Tensor) -> float:
    """Return 1 / sqrt(d) for queries (..., d)."""
    d = q.shape[-1]
    return 1.0 / math.sqrt(d) if d else 1.0


def clamped(number: int) -> int:
    """Return a number of rows that sums of int64 can hold."""
    return max(-_LIMIT, min(_LIMIT, number))


def distances(q: Tensor, k: Tensor, offset: Tensor | int | None) -> Tensor:
    """Return delta for each query and key, (B|1, 1, m, n) int64."""
    m, n, device = q.shape[-2], k.shape[-2], q.device
    place = torch.arange(m, device=device)[:, None] - torch.arange(n, device=device)
    if isinstance(offset, Tensor):  # int64, because unsigned integers have few operations
        return place + offset.to(torch.int64).clamp(-_LIMIT, _LIMIT).reshape(-1, 1, 1, 1)
    return (place + (n - m if offset is None else clamped(offset)))[None, None]


def visible_keys(
    delta: Tensor,
    causal: bool,
    window: int | None,
    key_mask: Tensor | None,
    segments: Tensor | None,
    mask: Tensor | None,
) -> Tensor | None:
    """Return which keys each query sees, (B|1, H|1, m, n) bool; None if all see all."""
    conditions = []
    if causal:
        conditions.append(delta >= 0)
    if window is not None:
        conditions.append(delta < window)
    if key_mask is not None:
        conditions.append(key_mask[:, None, None, :])
    if segments is not None:
        number = segments.to(torch.int64)  # the queries are the first keys
        of_queries = number[:, : delta.shape[-2], None]
        conditions.append((of_queries == number[:, None, :])[:, None])
    if mask is not None:
        conditions.append(mask)
    return functools.reduce(torch.logical_and, conditions) if conditions else None


def bias_values(bias: Tensor, delta: Tensor, first: int, beyond: str) -> Tensor:
    """Return bias[delta - first] (B|1, H|1, m, n)."""
    per_head = bias if bias.dim() == 2 else bias[None]
    per_query = per_head[None, :, None].expand(delta.shape[0], -1, delta.shape[-2], -1)
    return take_rows(per_query, delta - clamped(first), beyond)


def take_rows(products: Tensor, row: Tensor, beyond: str) -> Tensor:
    """Return products[i, row[i, j]]."""
    w = products.shape[-1]
    if w == 0:
        zeros = products.sum(-1, keepdim=True)  # with gradients of the right shapes
        return zeros.expand(*products.shape[:-1], row.shape[-1])
    index = row.clamp(0, w - 1).expand(*products.shape[:-1], row.shape[-1])
    taken = products.gather(-1, index)
    return taken if beyond == "edge" else torch.where((row >= 0) & (row < w), taken, 0.0)


def rows_at(rows: Tensor, first: int, beyond: str, deltas: Tensor) -> Tensor:
    """Return the rows (..., w', d) of these distances (w',) from rows (..., w, d)."""
    place = deltas.to(rows.device) - first
    count = rows.shape[-2]
    if count == 0:
        return rows.new_zeros((*rows.shape[:-2], len(place), rows.shape[-1]))
    nearest = rows.index_select(-2, place.clamp(0, count - 1))
    outside = (place < 0) | (place >= count)
    return nearest if beyond == "edge" else nearest.masked_fill(outside[:, None], 0)
