"""A decay that the input decides [G], as more columns of queries and keys.

The kernels know no bias of single keys. A product of two columns is one: sums of the decay stand in
columns of the keys, beside a 1 in the query. Each number is split into parts, so that the sums are
as exact as those of float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

# How many numbers of a dtype hold a float32, and how many hold a sum of many.
_PARTS = {torch.bfloat16: 3, torch.float16: 3}
_PARTS_OF_SUMS = {torch.bfloat16: 3, torch.float32: 2}


def _split(x: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Return `count` numbers (..., 1) of the dtype whose sum is x, the largest first."""
    parts = []
    for _ in range(count):
        parts.append(x.to(dtype)[..., None])
        x = x - parts[-1][..., 0].to(x.dtype)
    return parts


def _of_key_heads(columns: Tensor, k: Tensor) -> Tensor:
    """Return columns (B, H, n, c) as (B, Hk, n, H / Hk * c), those of each group of query heads."""
    group = columns.shape[1] // k.shape[1]
    return columns.unflatten(1, (k.shape[1], group)).transpose(2, 3).flatten(3)


def as_columns(decay: Tensor, k: Tensor) -> Tensor:
    """Return the decay (B, H, n) as columns (B, Hk, n, H / Hk * parts) of keys (B, Hk, n, d)."""
    return _of_key_heads(torch.cat(_split(decay, k.dtype, _PARTS.get(k.dtype, 1)), -1), k)


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
    place = queries.clamp(max=k.shape[2] - 1).clamp(min=0)[:, None].expand(batch, heads, -1)
    at_queries = total.gather(-1, place)
    # Only differences matter. Counted from the first query, no output depends on later tokens, not
    # even by rounding. Gradients are those of a count from the mean: they sum to 0.
    first = at_queries[..., :1].sum(-1, keepdim=True)  # 0 without queries
    mean = at_queries.mean(-1, keepdim=True)
    first = first.detach() + (mean - mean.detach()).nan_to_num()
    # A query reads the columns of its own head, among those of its key head.
    selection = torch.eye(heads // k.shape[1], dtype=q.dtype, device=q.device).repeat(k.shape[1], 1)
    selection = selection[None, :, None].expand(batch, -1, rows, -1)
    one = k.new_ones(()).expand(*k.shape[:3], 1)
    count = _PARTS_OF_SUMS.get(q.dtype, 1)
    of_queries, of_keys = (_split(x, q.dtype, count) for x in (at_queries - first, first - total))
    # The kernels add products in order, so near tokens cancel before smaller numbers are added.
    of_queries = [x for part in of_queries for x in (selection, part)]
    of_keys = [x for part in of_keys for x in (_of_key_heads(part, k), one)]
    return torch.cat([*of_queries, q], -1), torch.cat([*of_keys, k], -1)
