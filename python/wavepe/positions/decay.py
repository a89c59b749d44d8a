"""A decay that the input decides [G], as more columns of queries and keys.

The kernels know no bias of single keys. A product of two columns is one: sums of the decay stand in
columns of the keys, beside a 1 in the query. Narrow dtypes split each number into parts, so that
the sums are as exact as float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

# How many numbers of a dtype hold a float32.
_PARTS = {torch.bfloat16: 3, torch.float16: 3}


def as_columns(x: Tensor, like: Tensor) -> Tensor:
    """Return numbers (B, H, n) as columns (B, heads, n, H / heads * parts) for `like`.

    `like` is (B, heads, n, d): keys or queries. Each of its heads has the numbers of its group of
    query heads.
    """
    parts = []
    for _ in range(_PARTS.get(like.dtype, 1)):
        parts.append(x.to(like.dtype))
        x = x - parts[-1].to(x.dtype)
    return torch.stack(parts, -1).unflatten(1, (like.shape[1], -1)).transpose(2, 3).flatten(3)


def from_columns(columns: Tensor, k: Tensor, heads: int) -> Tensor:
    """Return the numbers (B, heads, n), float64, of the columns of keys."""
    group = heads // k.shape[1]
    x = columns.double().unflatten(-1, (group, columns.shape[-1] // group)).sum(-1)
    return x.transpose(2, 3).flatten(1, 2)


def with_sums(
    q: Tensor, k: Tensor, decay: Tensor, queries: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """Return q and k with columns whose products, times `factor`, are the sums of the decay.

    q is (B, H, m, d), k (B, Hk, n, d) and decay (B, H, n). The sum over the tokens j+1..i is a
    number of query i less one of key j. `queries` (B|1, m) are the indices of the keys at the
    places of the queries.
    """
    batch, heads, rows, _ = q.shape
    total = decay.cumsum(-1) / factor
    place = queries.clamp(0, max(k.shape[2] - 1, 0))[:, None].expand(batch, heads, -1)
    # Only differences matter. Counted from the middle query, the numbers are smaller, so exacter.
    if rows:
        total = total - total.gather(-1, place[..., rows // 2, None])
    of_query, of_keys = as_columns(total.gather(-1, place), q), as_columns(-total, k)
    parts = of_query.shape[-1]
    # A query reads the columns of its own head, among those of its key head.
    selection = torch.eye(heads // k.shape[1], dtype=q.dtype, device=q.device).repeat(k.shape[1], 1)
    selection = selection.repeat_interleave(parts, 1)[None, :, None].expand(batch, -1, rows, -1)
    ones = k.new_ones(()).expand(*k.shape[:3], parts)
    return torch.cat([q, selection, of_query], -1), torch.cat([k, of_keys, ones], -1)
