"""What the operators share: the checks that fake kernels repeat, and registering autograd."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

import torch
from torch.autograd import forward_ad

from .. import _checks
from ._torch_private import under_transforms

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


F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_SYMBOLS: Any = (torch.SymInt, torch.SymFloat, torch.SymBool)  # of a compiler
_PLAIN = 1 << 53  # numbers below it need no further look, and most are
# What torch says on the CPU, of a size that no memory holds or no 64 bits.
_OUT_OF_MEMORY = re.compile(
    r"tried to allocate \d+ bytes|Storage size calculation overflowed.*|.*multiplication overflow.*"
    r"|std::bad_alloc"
)


def names_memory(name: str) -> Callable[[F], F]:
    """Where torch or NumPy allocates in vain in the decorated function, the error gives `name`."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except MemoryError as error:
                raise RuntimeError(f"wavepe: {name}: out of memory: {error}") from error
            except RuntimeError as error:
                found = _OUT_OF_MEMORY.search(str(error))
                if found is None or str(error).startswith("wavepe: "):
                    raise
                size = "" if found[0] == "std::bad_alloc" else f": {found[0]}"
                raise RuntimeError(f"wavepe: {name}: out of memory{size}") from error

        return named  # type: ignore[return-value]

    return decorate


def wide(x: torch.Tensor) -> torch.dtype:
    """The dtype of x's scores, sums and angles: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def full_precision(kind: str) -> contextlib.AbstractContextManager:
    """Switch autocast off on devices of this kind: products stay float32."""
    if torch.amp.is_autocast_available(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


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
    known = tuple(known)
    good = isinstance(value, str) and value in known  # an array has no one truth value
    check(good, f"unknown {name} {value!r}; known: {', '.join(known)}")


def flag(name: str, value: Any) -> bool:
    """Return value as a bool. The schema takes None for False."""
    return _checked(_checks.flag, name, value)


def integer(name: str, value: Any) -> int:
    """Return value as an int of 64 bits; NumPy's too."""
    # A compiler's may have no value yet.
    if type(value) is int and (torch.compiler.is_compiling() or -_PLAIN < value < _PLAIN):
        return value
    whole = _checked(_checks.integer, name, value)
    if type(whole) is int and not -(2**63) <= whole < 2**63:
        check(False, f"{name} must fit into 64 bits, got {whole}")
    return whole


def number(name: str, value: Any) -> float:
    """Return value as a finite float; no tensor."""
    if type(value) is float and -_PLAIN < value < _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        instead = "; it is not differentiable: multiply q" if name == "scale" else ""
        check(False, f"{name} must be a plain number, got a tensor{instead}")
    return _checked(_checks.finite, name, value)


def _checked(check_plain: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    """Return what a check of the NumPy side gives, or a compiler's symbol as it is."""
    if isinstance(value, _SYMBOLS):
        return value
    try:
        return check_plain(name, value)
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"wavepe: {error}") from None


def recorded(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd has a call of these arguments to record, or a compiler to trace."""
    if torch.is_grad_enabled():
        for x in tensors:  # any() takes three times as long
            if x is not None and x.requires_grad:
                return True
    return torch.compiler.is_compiling()


def in_new_thread(function: Callable[[], T]) -> T:
    """Call `function` outside of inference mode, fake tensors, tracers and torch.func.

    All of them are a thread's own, so a new thread has none.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def axis_first(x: torch.Tensor, axis: int | None, size: int) -> torch.Tensor:
    """For vmap rules: x with the new axis first, repeated `size` times where it has none."""
    return x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)


class _Library(torch.library.Library):
    """Kernels that raise where forward mode would lose a tangent."""

    def impl(self, op_name: Any, fn: Callable[..., Any], *args: Any, **options: Any) -> None:
        def guarded(*given: Any, **named: Any) -> Any:
            if under_transforms():
                check(
                    not any(map(_has_tangent, given)),
                    f"torch.ops.wavepe.{op_name} has no forward mode; wavepe.ops has, for what is "
                    "differentiable",
                )
            return fn(*given, **named)

        super().impl(op_name, guarded, *args, **options)


library = torch.library.Library("wavepe", "FRAGMENT")
_guarded_library = _Library("wavepe", "FRAGMENT")


def register_autograd(
    op: str, backward: Callable[..., Any], setup_context: Callable[..., Any] | None = None
) -> None:
    """`torch.library.register_autograd`, which drops tangents of forward mode; this raises."""
    name = f"wavepe::{op}"
    torch.library.register_autograd(
        name, backward, setup_context=setup_context, lib=_guarded_library
    )


def save_call(ctx: Any, inputs: Iterable[Any], *outputs: torch.Tensor) -> None:
    """Keep an operator's inputs, tensors or not, and its outputs for its backward."""
    inputs = tuple(inputs)
    tensors = [isinstance(x, torch.Tensor) for x in inputs]
    ctx.call = tuple(x if not own else None for x, own in zip(inputs, tensors, strict=True))
    ctx.tensors = tuple(i for i, own in enumerate(tensors) if own)
    ctx.save_for_backward(*(inputs[i] for i in ctx.tensors), *outputs)


def saved_call(ctx: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """The inputs and the outputs that `save_call` kept."""
    inputs, saved, count = list(ctx.call), ctx.saved_tensors, len(ctx.tensors)
    for i, x in zip(ctx.tensors, saved[:count], strict=True):
        inputs[i] = x
    return inputs, list(saved[count:])


def _has_tangent(x: Any) -> bool:
    if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
        return False
    # A view has the tangent but inside of an autograd.Function, which sees to it itself.
    return forward_ad.unpack_dual(x.view_as(x)).tangent is not None


def not_differentiable(op: str, arguments: str) -> None:
    """Let backward raise, where torch would go on without the gradient and warn at most."""

    def refuse(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError(f"wavepe: {op} has no gradient to {arguments}; detach them")

    torch.library.register_autograd(f"wavepe::{op}", refuse)
