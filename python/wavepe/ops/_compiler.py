"""Marks for torch's compiler, set when it first traces a function of wavepe.

``torch.compiler.disable`` and ``torch.compiler.assume_constant_result`` import the whole compiler,
which takes twice as long as torch itself. So the decorators of this module wait for a trace.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ._marks import add_mark

F = TypeVar("F", bound=Callable[..., Any])


def is_compiling() -> bool:
    """Tell whether a compiler traces this call, and set the marks before its first trace.

    Traced code must call this before a function marked with `constant_result`.
    """
    if torch.compiler.is_compiling():
        from . import _set_marks  # noqa: F401 - the compiler runs an import while it traces

        return True
    return False


def constant_result(function: F) -> F:
    """Mark a function that a compiler calls while it traces, to take the result as a constant."""
    add_mark(lambda: torch.compiler.assume_constant_result(function))
    return function


STANDARD = False  # transformers' exporters set it meanwhile (wavepe.hf)
_exporting = threading.local()


@contextlib.contextmanager
def standard_operators() -> Iterator[None]:
    """Let programs that are exported in this context hold operators of torch alone.

    Otherwise they hold operators of wavepe, which are faster, and which only processes with wavepe
    know. `torch.onnx.export` and the exporters of transformers for ONNX, OpenVINO and ExecuTorch
    need no such context. Constant tables become constants of the program. They have rows up to the
    bound of a length that ``torch.export.Dim("length", max=...)`` gives.

    Examples
    --------
    >>> import torch
    >>> from wavepe import nn, ops
    >>> layer, x = nn.SelfAttention(16, 2, encoding="alibi").eval(), torch.randn(2, 5, 16)
    >>> length = {1: torch.export.Dim("length", max=100)}
    >>> with ops.standard_operators():
    ...     program = torch.export.export(layer, (x,), dynamic_shapes=(length,))
    >>> any("wavepe" in str(node.target) for node in program.graph.nodes)
    False
    """
    before = getattr(_exporting, "standard", False)
    _exporting.standard = True
    try:
        yield
    finally:
        _exporting.standard = before


@constant_result
def wants_standard() -> bool:
    """Tell whether this is the trace of a program that must hold operators of torch alone."""
    return torch.compiler.is_exporting() and (
        STANDARD or getattr(_exporting, "standard", False) or torch.onnx.is_in_onnx_export()
    )


def traced(op: Any, standard: F) -> F:
    """Return an operator, or where the graph cannot hold it the same in operators of torch."""
    return standard if wants_standard() else op


def disable(reason: str) -> Callable[[F], F]:
    """Decorate a function that a compiler must not trace, but call."""

    def decorate(function: F) -> F:
        current: list[Callable[..., Any]] = [function]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_compiling()
            return current[0](*args, **kwargs)

        def mark() -> None:
            current[0] = torch.compiler.disable(function, reason=reason)

        add_mark(mark)
        return call  # type: ignore[return-value]

    return decorate
