"""Checks that fake kernels repeat, so that a traced call fails as the real one would."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"wavepe: {message}")


def check_tensors(**tensors: torch.Tensor) -> None:
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            check(False, f"{name} must be a torch.Tensor, got {type(value).__name__}")


def check_dtype(name: str, x: torch.Tensor, known: Collection[torch.dtype] = FLOATS) -> None:
    names = ", ".join(str(d).removeprefix("torch.") for d in known)
    given = str(x.dtype).removeprefix("torch.")
    check(x.dtype in known, f"{name} must be one of {names}; got {given}")


def check_device(**tensors: torch.Tensor) -> None:
    devices = {name: str(x.device) for name, x in tensors.items()}
    check(len(set(devices.values())) == 1, f"all tensors must be on one device, got {devices}")


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    check(value in known, f"unknown {name} {value!r}; known: {', '.join(known)}")


def transformed() -> bool:
    """Inside torch.func's transforms or forward mode, which `register_autograd` does not know."""
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )


def not_differentiable(op: str, arguments: str) -> None:
    """Let backward raise, where torch would go on without the gradient and warn at most."""

    def refuse(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError(f"wavepe: {op} has no gradient to {arguments}; detach them")

    torch.library.register_autograd(f"wavepe::{op}", refuse)
