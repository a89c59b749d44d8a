"""Fused attention on a GPU: how the kernels are launched."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from .tiles import LEAST


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    if all(grid):
        kernel[grid](*arguments, **options)


# By compute capability and tile's width: queries, warps and stages of a program. To a width of 128
# next to nothing spills (docs/internals/attention-gpu.md), at 256 the backward does.
# Others than 9 and 10 are as 8.
_TUNING = {
    9: {
        "forward": {64: (128, 8, 2), 128: (128, 8, 2), 256: (32, 8, 2)},
        "queries": {64: (64, 8, 3), 128: (64, 8, 2), 256: (64, 8, 1)},
        "keys": {64: (64, 8, 2), 128: (32, 8, 3), 256: (32, 8, 2)},
    },
    10: {
        "forward": {64: (128, 8, 2), 128: (128, 8, 2), 256: (32, 8, 2)},
        "queries": {64: (64, 8, 2), 128: (64, 8, 2), 256: (64, 8, 1)},
        "keys": {64: (64, 8, 2), 128: (64, 8, 2), 256: (32, 8, 1)},
    },
    8: {
        "forward": {64: (64, 4, 2), 128: (64, 8, 2), 256: (32, 8, 2)},
        "queries": {64: (32, 8, 2), 128: (32, 8, 2), 256: (64, 8, 1)},
        "keys": {64: (32, 8, 3), 128: (32, 8, 2), 256: (32, 8, 2)},
    },
}
_FLOAT32 = {64: (32, 8, 1), 128: (16, 8, 1)}


@functools.cache
def capability(device: torch.device) -> int:
    """Compute capability of the kind of GPU that a device is tuned as."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    return major if major in _TUNING else 8


def tuning(role: str, q: Tensor, width: int) -> dict[str, int]:
    """What a kernel is launched with; `width` is the power of two at the head size or above."""
    size = max(64, width)
    full = q.dtype == torch.float32
    if role in ("forward", "queries", "keys"):
        rows, warps, stages = (_FLOAT32 if full else _TUNING[capability(q.device)][role])[size]
        return {"ROWS": rows, "num_warps": warps, "num_stages": stages}
    how = {"num_warps": 4 if size == 64 else 8, "num_stages": 1}
    return how if role == "bias" else {"ROWS": 16 if full or size == 256 else 64, **how}


def width(size: int) -> int:
    """What a tile has room for: a power of two."""
    return max(triton.next_power_of_2(size), LEAST)
