"""Marks for torch's compiler, set when it first traces a function of wavepe.

``torch.compiler.disable`` and ``torch.compiler.assume_constant_result`` import the whole compiler,
which takes twice as long as torch itself. So the decorators of this module wait for a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ._marks import add_mark

F = TypeVar("F", bound=Callable[..., Any])


def is_compiling() -> bool:
    """Tell whether a compiler traces this call, and set the marks before its first trace.

    Traced code must call this, or `before_marked`, before a function marked with `constant_result`.
    """
    if torch.compiler.is_compiling():
        from . import _set_marks  # noqa: F401 - the compiler runs an import while it traces

        return True
    return False


def before_marked() -> None:
    """Set the marks if a compiler traces this call."""
    is_compiling()


def constant_result(function: F) -> F:
    """Mark a function that a compiler calls while it traces, to take the result as a constant."""
    add_mark(lambda: torch.compiler.assume_constant_result(function))
    return function


def disable(reason: str) -> Callable[[F], F]:
    """Decorate a function that a compiler must not trace, but call."""

    def decorate(function: F) -> F:
        current: list[Callable[..., Any]] = [function]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before_marked()
            return current[0](*args, **kwargs)

        def mark() -> None:
            current[0] = torch.compiler.disable(function, reason=reason)

        add_mark(mark)
        return call  # type: ignore[return-value]

    return decorate
