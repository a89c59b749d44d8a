"""The buckets of T5 as numbers in a compiler's graph."""

from __future__ import annotations

import torch

from .t5 import T5


@torch.compiler.assume_constant_result  # a compiler must not trace into NumPy
def buckets_by_delta(buckets: int, max_distance: int, causal: bool) -> tuple[int, tuple[int, ...]]:
    """Return the first delta, and the bucket of each from there on."""
    first, index = T5(buckets=buckets, max_distance=max_distance)._buckets_by_delta(causal)
    return first, tuple(index.tolist())
