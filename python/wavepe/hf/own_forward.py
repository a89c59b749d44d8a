"""Another `apply_rotary_pos_emb` for some attention layers, and not for their whole family.

An attention layer of transformers calls a global of its modelling file: replaced there, every model
of the family would change. A layer gets its class's forward with other globals instead, as an
attribute of its own. A copy by `copy.deepcopy` has it too; pickle brings back the class's forward.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import nn

APPLY = "apply_rotary_pos_emb"
MARK = "__wavepe_rotation__"
_numbers = itertools.count()

# Of the family's function: the one to be called instead.
Replacement = Callable[[Callable[..., Any]], Callable[..., Any]]


def names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """The globals and attributes that the forward of the module's class names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def calls_apply(module: nn.Module) -> bool:
    """Whether the module's class calls `apply_rotary_pos_emb`."""
    return APPLY in names_in_forward(module)


def has_own(module: nn.Module) -> bool:
    """Whether the module has a forward that is not its class's (hooks of accelerate make one)."""
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def replacement_of(module: nn.Module) -> Replacement | None:
    """What `give` was given for the module."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    return getattr(function, "__globals__", {}).get(MARK)


def made(module: nn.Module, replacement: Replacement) -> types.MethodType:
    """The forward of the module's class, in which the family's function is replaced."""
    stock: Any = inspect.unwrap(type(module).forward)
    scope = _scope(stock.__module__, stock.__globals__[APPLY], replacement)
    function = types.FunctionType(
        stock.__code__, scope, stock.__name__, stock.__defaults__, stock.__closure__
    )
    for name in ("__kwdefaults__", "__annotations__", "__doc__", "__module__", "__qualname__"):
        setattr(function, name, getattr(stock, name))
    return types.MethodType(function, module)


def give(module: nn.Module, forward: types.MethodType) -> None:
    """Let the module use what `made` returned."""
    module.__dict__["forward"] = forward


def take_back(module: nn.Module, replacement: Replacement) -> None:
    """Undo `give`, where it was done with this replacement."""
    if replacement_of(module) is replacement:
        del module.__dict__["forward"]


@functools.cache
def _scope(module_name: str, apply: Callable[..., Any], replacement: Replacement) -> dict[str, Any]:
    """The globals of a modelling file, with another `apply_rotary_pos_emb`.

    They belong to a module of their own that can be imported: torch.compile reads the globals of a
    function from the module that they name.
    """
    name = f"wavepe_rotation_{next(_numbers)}"
    scope = types.ModuleType(name, f"{module_name} with another {APPLY}")
    other = replacement(apply)
    scope.__dict__.update(sys.modules[module_name].__dict__)
    scope.__dict__.update({"__name__": name, MARK: replacement, APPLY: other})
    sys.modules[name] = scope
    return scope.__dict__
