"""Which calls of attention run the GPU's kernels, and the warning for those that cannot."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._compiler import constant_result
from .._torch_private import count_modes

# These GPUs have 99 KB of shared memory for a program; other GPUs have at least 163 KB.
_SMALL_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))


def missing_kernel(q: Tensor, v: Tensor, p: Tensor | None, size: int = 0) -> str:
    """Return why the GPU's kernels cannot run for these tensors and a table of `size`, or ""."""
    for x in (q, v, p):  # no max() with a default, which a compiler does not know
        if x is not None and x.dim() and x.shape[-1] > size:
            size = x.shape[-1]
    return _constant_reason(q.device, q.dtype, size)


@constant_result  # otherwise a compiler would trace the cached function
def _constant_reason(device: torch.device, dtype: torch.dtype, size: int) -> str:
    return _missing_kernel(device, dtype, size)


@functools.cache
def _missing_kernel(device: torch.device, dtype: torch.dtype, size: int) -> str:
    if device.type != "cuda" or torch.version.hip:
        return f"there is none for {'ROCm' if device.type == 'cuda' else device.type}"
    if dtype == torch.float64:
        return "there is none for float64"
    capability = None  # unknown: a compiler may work for the GPU of another machine
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
    largest = (256 if capability in _SMALL_MEMORY else 512) // dtype.itemsize
    if size > largest:
        return f"there is none for head sizes above {largest} in {dtype}, got {size}"
    if importlib.util.find_spec("triton") is None:
        return "it needs Triton: pip install triton"
    if capability is not None and capability < (8, 0):
        return "it needs compute capability 8.0 or higher, the GPU has {}.{}".format(*capability)
    return ""


_warned: set[str] = set()


@constant_result  # a compiler must not trace a warning
def warn_of_memory(missing: str) -> None:
    """Warn that attention holds all scores in memory, once for each reason."""
    if missing in _warned:
        return
    _warned.add(missing)
    warnings.warn(
        f"wavepe.ops.attention runs without its fused kernel ({missing}): it uses PyTorch's "
        "operators, which hold a tensor of all scores (B, H, m, n)",
        stacklevel=4,
    )


def serves(x: Tensor) -> bool:
    """Tell whether `attend` may take a call past the dispatcher: no mode or tracer looks on."""
    return x.is_cuda and not (count_modes() or torch.jit.is_tracing())  # type: ignore[attr-defined]


def attend(role: str, arguments: Sequence[Any]) -> Any:
    """Return the forward or backward, or None for tensors that only the operator can read."""
    from . import plans  # the first call imports Triton

    return plans.attend(role, arguments, missing_kernel)


def _operator(role: str, *arguments: Any) -> Any:
    # An operator returns tensors, and none of them twice.
    return [arguments[0].new_empty((0,)) if x is None else x for x in attend(role, arguments)]


for _role in ("forward", "backward"):
    torch.library.impl(f"wavepe::attention_{_role}", "cuda", functools.partial(_operator, _role))
