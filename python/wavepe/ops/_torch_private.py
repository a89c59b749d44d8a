"""All private names of PyTorch that wavepe uses.

PyTorch has no public names for these purposes, and any release may remove a private one. So this
module is the only one that reads them: a torch without one fails here, at import.

torch._C._AutoDispatchBelowADInplaceOrView
    For `below_autograd`, which skips autograd. The autograd of torch.library costs 6 microseconds a
    call even if it records nothing: twice the time of rotating one token.
torch._C._functorch.get_interpreter_stack, torch.autograd.forward_ad._current_level
    For `transformed` and `under_transforms`: torch.library's autograd ignores torch.func and drops
    the tangents of forward mode.
torch._assert_async
    For `assert_async`, which stays in a compiler's graph, where an `if` would split it.
torch._check
    For `holds`, with sizes of a program that only its values tell.
torch._C._len_torch_dispatch_stack, torch.utils._python_dispatch.TorchDispatchMode
    For attention on GPUs.
torch.SymInt.node
    For `largest`. If the name is missing, no length in an exported program has a bound.
torch.Tensor._version
    For `stamps`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._python_dispatch
from torch import Tensor
from torch.autograd import forward_ad

from ._compiler import constant_result

below_autograd: Any = torch._C._AutoDispatchBelowADInplaceOrView
assert_async: Any = torch._assert_async
DispatchMode: Any = torch.utils._python_dispatch.TorchDispatchMode
count_modes: Any = torch._C._len_torch_dispatch_stack  # that see calls
_stack: Any = torch._C._functorch.get_interpreter_stack


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


def holds(*conditions: Any) -> bool:
    """Tell whether one of the conditions holds; a program asserts what only its values tell."""
    if conditions and conditions[0] is True and not torch.compiler.is_compiling():
        return True  # in an eager call, at once
    if is_known(*conditions):
        return True
    condition = functools.reduce(operator.or_, conditions, False)
    if _decided(condition, "guard_or_true"):
        torch._check(condition)
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

    return getattr(symbolic_shapes, decide)(condition)


def stamps(tensors: Iterable[Tensor]) -> list[object] | None:
    """Return addresses and versions, which change with the values; None without them."""
    result: list[object] = []
    for x in tensors:
        if type(x) is not torch.nn.Parameter or x.is_inference():
            return None
        result += (x.data_ptr(), x._version)
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
