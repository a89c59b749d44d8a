"""All private names of PyTorch that wavepe uses, each with a replacement.

PyTorch has no public names for these purposes, and any release may remove a private one. So this
module is the only one that reads them, and it can be imported if any of them is missing. The
replacement gives the same results more slowly. tests/test_ops_private_names.py checks both.

torch._C._AutoDispatchBelowADInplaceOrView
    For `below_autograd`, which skips autograd. The autograd of torch.library costs 6 microseconds a
    call even if it records nothing: twice the time of rotating one token. If the name is missing,
    no call skips autograd, and only the raw operator ``torch.ops.wavepe.rope_`` loses its checks.
torch._C._functorch.get_interpreter_stack, torch.autograd.forward_ad._current_level
    For `transformed` and `under_transforms`: torch.library's autograd ignores torch.func and drops
    the tangents of forward mode. If a name is missing, we try a call that torch refuses there.
torch._assert_async
    For `assert_async`, which stays in a compiler's graph. If the name is missing, an `if` splits
    the graph.
torch._check
    For `holds`. If the name is missing, a program has no sizes that only its values tell.
torch._C._len_torch_dispatch_stack, torch.utils._python_dispatch.TorchDispatchMode
    For attention on GPUs. If a name is missing, calls pass the dispatcher, or are planned anew.
torch.SymInt.node
    For `largest`. If the name is missing, no length in an exported program has a bound.
torch.Tensor._version
    For `stamps`. If the name is missing, every tensor counts as changed.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._python_dispatch as _python_dispatch
from torch import Tensor
from torch.autograd import forward_ad

from ._compiler import constant_result

below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", contextlib.nullcontext)
CAN_GO_BELOW_AUTOGRAD = below_autograd is not contextlib.nullcontext


_stack: Any = getattr(getattr(torch._C, "_functorch", None), "get_interpreter_stack", None)


@constant_result
def under_transforms() -> bool:
    """Tell whether torch.func or forward mode is active; a compiler guards the answer."""
    return forward_ad._current_level >= 0 or _stack() is not None


@constant_result
def transformed() -> bool:
    """Tell whether a derivative of torch.func, or forward mode, is active.

    `register_autograd` does not serve these. vmap alone does not count, because the operators have
    their own rules for it.
    """
    if forward_ad._current_level >= 0:
        return True
    levels = _stack()
    return levels is not None and any(level.key().name != "Vmap" for level in levels)


if _stack is None or not hasattr(forward_ad, "_current_level"):

    class _NotForTransforms(torch.autograd.Function):
        """A Function without setup_context, which torch refuses inside torch.func."""

        @staticmethod
        def forward(ctx: Any) -> None:
            return None

    @constant_result
    def under_transforms() -> bool:
        """Try what torch refuses: this Function in torch.func, a second level of forward mode."""
        try:
            _NotForTransforms.apply()
            with forward_ad.dual_level():
                return False
        except RuntimeError:
            return True

    transformed = under_transforms  # here vmap counts, too: the way of derivatives serves it


def _assert_now(condition: Tensor, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


assert_async: Any = getattr(torch, "_assert_async", _assert_now)


_check: Any = getattr(torch, "_check", bool)


def holds(*conditions: Any) -> bool:
    """Tell whether one of the conditions holds; a program asserts what only its values tell."""
    if conditions and conditions[0] is True and not torch.compiler.is_compiling():
        return True  # in an eager call, at once
    if is_known(*conditions):
        return True
    condition = functools.reduce(operator.or_, conditions, False)
    if _decided(condition, "guard_or_true"):
        _check(condition)
        return True
    return False


def has_shape(x: Tensor, shape: Iterable[int]) -> Any:
    """Return the condition, for `holds`, that a tensor has this shape of as many dims."""
    return functools.reduce(operator.and_, map(operator.eq, x.shape, shape), True)


def is_known(*conditions: Any) -> bool:
    """Tell whether one of the conditions holds; False where only values of a program tell."""
    return any(_decided(condition, "guard_or_false") for condition in conditions)


def _decided(condition: Any, decide: str) -> bool:
    if not (isinstance(condition, torch.SymBool) or torch.compiler.is_compiling()):
        return bool(condition)  # of torch.jit.trace's sizes, which are tensors
    from torch.fx.experimental import symbolic_shapes  # importing sympy takes long

    return getattr(symbolic_shapes, decide, bool)(condition)


DispatchMode: Any = getattr(_python_dispatch, "TorchDispatchMode", None)
count_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)  # that see calls


def stamps(tensors: Iterable[Tensor]) -> list[object] | None:
    """Return addresses and versions, which change with the values; None without a version."""
    result: list[object] = []
    for x in tensors:
        if type(x) is not torch.nn.Parameter or x.is_inference():
            return None
        result += (x.data_ptr(), getattr(x, "_version", object()))
    return result


def largest(size: int) -> int | None:
    """Return the bound of a size in an exported program, or the size itself; None: no bound."""
    if isinstance(size, int):
        return size
    try:
        node: Any = size.node
        bound = node.shape_env.bound_sympy(node.expr).upper
    except AttributeError:
        return None
    return int(bound) if bound.is_Integer else None  # infinity is no Integer
