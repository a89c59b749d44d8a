"""Fused attention on a GPU: launches of the kernels, and the sizes of their tiles.

Triton has no public way to launch a kernel that is compiled. This module alone uses its private one
(`bound`), and with a Triton that it does not know every launch is ``kernel[grid]``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from .tiles import LEAST

_KNOWN = triton.__version__.startswith(("3.5.", "3.6.", "3.7.", "3.8.", "3.9."))  # one launcher
maker = threading.local()  # whose `make`, if it has one, makes the launches of this thread


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel, unless the grid is empty."""
    if all(grid):
        make = getattr(maker, "make", None)
        make(kernel, grid, arguments, options) if make else kernel[grid](*arguments, **options)


def bound(
    kernel: Any, grid: tuple[int, ...], count: int, options: dict[str, Any], compiled: Any
) -> tuple[Callable[..., None], list[Any]] | None:
    """Return a function that launches what ``kernel[grid]`` compiled, and its last arguments.

    They follow `count` others, in which tensors are addresses. None: this Triton is not known.
    """
    if compiled is None or not _KNOWN:
        return None
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream, device = driver.active.get_current_stream, driver.active.get_current_device()
    at = (*grid, 1, 1)[:3]

    def launch(*arguments: Any) -> None:
        run(*at, stream(device), function, metadata, None, None, None, *arguments)

    return launch, [options[name] for name in list(kernel.signature.parameters)[count:]]


# Queries, keys, warps and stages of a tile, by compute capability and width of a tile. Other
# capabilities use those of 8. Those of 9 up to a width of 128 were the fastest of 52 on an H200.
# The others were chosen so that few registers spill (docs/internals/attention-gpu.md).
_TUNING = {
    9: {
        "forward": {64: (128, 64, 8, 4), 128: (128, 64, 8, 3), 256: (32, 64, 8, 2)},
        "queries": {64: (64, 64, 4, 1), 128: (64, 64, 4, 3), 256: (64, 64, 8, 1)},
        "keys": {64: (64, 64, 4, 2), 128: (32, 64, 4, 3), 256: (32, 64, 8, 2)},
    },
    10: {
        "forward": {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (32, 64, 8, 2)},
        "queries": {64: (64, 64, 8, 2), 128: (64, 64, 8, 2), 256: (64, 64, 8, 1)},
        "keys": {64: (64, 64, 8, 2), 128: (64, 64, 8, 2), 256: (32, 64, 8, 1)},
    },
    8: {
        "forward": {64: (64, 64, 4, 2), 128: (64, 64, 8, 2), 256: (32, 64, 8, 2)},
        "queries": {64: (32, 64, 8, 2), 128: (32, 64, 8, 2), 256: (64, 64, 8, 1)},
        "keys": {64: (32, 64, 8, 3), 128: (32, 64, 8, 2), 256: (32, 64, 8, 2)},
    },
}
_FLOAT32 = {64: (32, 64, 8, 1), 128: (16, 64, 8, 1)}


@functools.cache
def capability(device: torch.device) -> int:
    """Return the compute capability whose tuning a device uses; without a GPU it is 9."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    return major if major in _TUNING else 8


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; without a GPU it is 4, so that an interpreter ends."""
    there = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if there else 4


def tuning(role: str, q: Tensor, width: int, tiles: bool) -> dict[str, int]:
    """Return the options for launching a kernel of this role.

    `width` is that of a tile. `tiles` says that a mask or a bias is loaded for each score: more
    than two stages of them do not fit into shared memory.
    """
    size = max(64, width)
    full = q.dtype == torch.float32
    if role in ("forward", "queries", "keys"):
        by_size = _FLOAT32 if full else _TUNING[capability(q.device)][role]
        rows, keys, warps, stages = by_size[size]
        stages = min(stages, 2) if tiles else stages
        return {"ROWS": rows, "KEYS": keys, "num_warps": warps, "num_stages": stages}
    options = {"num_warps": 4 if size == 64 else 8, "num_stages": 1}
    return options if role == "bias" else {"ROWS": 16 if full or size == 256 else 64, **options}


def width(size: int) -> int:
    """Return the width of a tile for a head size: the next power of two, at least `LEAST`."""
    return max(1 << (size - 1).bit_length(), LEAST)
