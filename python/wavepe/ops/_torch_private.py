"""The private names of PyTorch that wavepe uses: all of them, and what replaces each one.

A private name may go with any release, and PyTorch has no public name for these purposes. So this
module is the only one that reads them (tests/test_ops_private_names.py checks it), it imports with
any of them missing, and the replacement gives the same results more slowly.

torch._C._AutoDispatchBelowADInplaceOrView
    `below_autograd`: the autograd that torch.library makes costs 6 microseconds a call where it
    records nothing, twice the time of rotating one token. Without it no call goes past autograd,
    and only the raw operator ``torch.ops.wavepe.rope_`` lacks its checks.
torch._ops.OpOverload._op
    `direct`: 0.2 microseconds of the 3.3 that rotating one token takes. Without it the operator is
    called.
torch._C._functorch.get_interpreter_stack, torch.autograd.forward_ad._current_level
    `transformed` and `under_transforms`: torch.library's autograd ignores torch.func and drops the
    tangents of forward mode. Without them we try what torch refuses there.
torch._assert_async
    `assert_async`, which a compiler keeps in its graph. Without it an `if` splits the graph.
torch.Tensor._version
    `version`. Without it every tensor counts as changed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", contextlib.nullcontext)
CAN_GO_BELOW_AUTOGRAD = below_autograd is not contextlib.nullcontext


def direct(op: Any) -> Any:
    """Return what ``op(*args)`` calls."""
    return getattr(op, "_op", op)


_stack: Any = getattr(getattr(torch._C, "_functorch", None), "get_interpreter_stack", None)


@torch.compiler.assume_constant_result
def under_transforms() -> bool:
    """Inside any transform of torch.func, or forward mode.

    A compiler asks while it traces, and guards the answer by itself.
    """
    return forward_ad._current_level >= 0 or _stack() is not None


@torch.compiler.assume_constant_result
def transformed() -> bool:
    """Inside a derivative of torch.func or forward mode, which `register_autograd` does not know.

    vmap alone is none: the operators have rules of their own.
    """
    if forward_ad._current_level >= 0:
        return True
    levels = _stack()
    return levels is not None and any(level.key().name != "Vmap" for level in levels)


if _stack is None or not hasattr(forward_ad, "_current_level"):

    class _NotForTransforms(torch.autograd.Function):
        """A Function without setup_context, which torch refuses inside of torch.func."""

        @staticmethod
        def forward(ctx: Any) -> None:
            return None

    @torch.compiler.assume_constant_result
    def under_transforms() -> bool:
        """Inside any transform of torch.func, or forward mode, of which torch refuses a second."""
        try:
            _NotForTransforms.apply()
            with forward_ad.dual_level():
                return False
        except RuntimeError:
            return True

    transformed = under_transforms  # vmap alone, too, may go where derivatives must go


def _assert_now(condition: Tensor, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


assert_async: Any = getattr(torch, "_assert_async", _assert_now)


def version(x: Tensor) -> object:
    """Return what changes whenever the values of `x` are written to; x is no inference tensor."""
    return getattr(x, "_version", object())
