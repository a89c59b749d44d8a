"""Checks of arguments and registration of autograd, for all operators."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch.autograd import forward_ad

from ..arrays.relative_bias import Bias, Table, ranged
from ..common import checks
from ..common.errors import out_of_memory
from ._torch_private import holds, under_transforms

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64,
            torch.uint8, torch.uint16, torch.uint32, torch.uint64)  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_OWN_KERNELS = ("cpu", "meta") if torch.version.hip else ("cpu", "meta", "cuda")
_SYMBOLS: Any = (torch.SymInt, torch.SymFloat, torch.SymBool)  # a compiler's symbolic numbers


def report_out_of_memory(name: str) -> Callable[[F], F]:
    """Decorate a function so that its out-of-memory errors are RuntimeErrors with `name`."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except torch.OutOfMemoryError:  # a GPU's, which programs catch by this type
                raise
            except (MemoryError, RuntimeError) as error:
                message = None if str(error).startswith("wavepe: ") else out_of_memory(error)
                if message is None:
                    raise
                raise RuntimeError(f"wavepe: {name}: {message}") from error

        return named  # type: ignore[return-value]

    return decorate


def wide(x: torch.Tensor) -> torch.dtype:
    """Return the dtype for x's scores, sums and angles: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def reduce_angles(angles: torch.Tensor) -> torch.Tensor:
    """Return angles of float64 less whole turns, at most pi in size, in a form that ONNX has.

    Few runtimes have a cosine of float64. In a program a turn is a tensor, because ONNX makes
    numbers float32; elsewhere that would be a copy to the device.
    """
    turn: Any = 2 * math.pi
    if torch.compiler.is_compiling():
        turn = torch.tensor(turn, dtype=torch.float64, device=angles.device)
    return angles - turn * torch.round(angles / turn)


def has_autocast(kind: str) -> bool:
    """Tell whether devices of this kind have an autocast; torch 2.10 cannot compile its own way."""
    return kind != "meta"


def full_precision(kind: str) -> contextlib.AbstractContextManager:
    """Switch autocast off on devices of this kind, so that products stay float32."""
    if has_autocast(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def check(condition: Any, message: str) -> None:
    """Raise RuntimeError with `message` unless the condition holds."""
    if not holds(condition):
        raise RuntimeError(f"wavepe: {message}")


def check_tensors(**tensors: torch.Tensor) -> None:
    """Raise RuntimeError unless all values are tensors, no DTensors and not nested."""
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            check(False, f"{name} must be a torch.Tensor, got {type(value).__name__}")
        if hasattr(value, "placements"):
            advice = f"give {name}.to_local(), which must hold whole heads and all tokens"
            check(False, f"{name} must be a plain tensor, got a DTensor: {advice}")
        if value.is_nested:  # it has no shape to compare
            advice = "pad it; in attention, key_mask hides the padding"
            check(False, f"{name} must be dense, got a nested tensor: {advice}")


def with_range(
    name: str,
    table: Any,
    first: Any,
    beyond: Any,
    like: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, Any, Any]:
    """Return rows, first and beyond of a `Table` or `Bias`; NumPy rows become a tensor."""
    kind = Table if name == "p" else Bias
    if not isinstance(table, kind):
        got = type(table).__name__
        check(False, f"{name} must be a torch.Tensor, got {got}; pass {kind.__name__}(*{name})")
    rows, first, beyond = run_check(ranged, name, table, first, beyond)
    if like is not None and isinstance(rows, np.ndarray):
        rows = torch.from_numpy(rows).to(like.device, dtype)
    return rows, first, beyond


def check_dtype(name: str, x: torch.Tensor, known: Collection[torch.dtype] = FLOATS) -> None:
    names = ", ".join(str(d).removeprefix("torch.") for d in known)
    got = str(x.dtype).removeprefix("torch.")
    check(x.dtype in known, f"{name} must be one of {names}; got {got}")


def check_device(**tensors: torch.Tensor) -> None:
    devices = {name: str(x.device) for name, x in tensors.items()}
    check(len(set(devices.values())) == 1, f"all tensors must be on one device, got {devices}")


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    known = tuple(known)
    good = isinstance(value, str) and value in known  # `in` alone would compare an array
    check(good, f"unknown {name} {value!r}; known: {', '.join(known)}")


def flag(name: str, value: Any) -> bool:
    """Return `value` as a bool. None is refused here; the schema would take it for False."""
    return _checked(checks.flag, name, value)


def integer(name: str, value: Any) -> int:
    """Return `value` as an int; NumPy integers are accepted."""
    return value if type(value) is int else _checked(checks.integer, name, value)


def number(name: str, value: Any) -> float:
    """Return `value` as a finite float. A tensor is refused."""
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, torch.Tensor):
        advice = "; for a differentiable scale, multiply q by it" if name == "scale" else ""
        check(False, f"{name} must be a plain number, got a tensor{advice}")
    return _checked(checks.finite, name, value)


def _checked(check_plain: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    """Return the value that a check returns, but a compiler's symbol as it is."""
    return value if isinstance(value, _SYMBOLS) else run_check(check_plain, name, value)


def run_check(check_plain: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a function for NumPy; its errors become RuntimeErrors, as torch's."""
    try:
        return check_plain(*arguments)
    except (TypeError, ValueError, MemoryError) as error:
        raise RuntimeError(f"wavepe: {error}") from error


def recorded(*tensors: torch.Tensor | None) -> bool:
    """Tell whether autograd records a call with these arguments."""
    if torch.is_grad_enabled():
        for x in tensors:  # any() would take three times as long
            if x is not None and x.requires_grad:
                return True
    return False


def autocast_enabled(kind: str) -> bool:
    """Tell whether autocast is on for devices of this kind."""
    return has_autocast(kind) and torch.is_autocast_enabled(kind)


def in_new_thread(function: Callable[[], T]) -> T:
    """Call `function` in a new thread, which has no inference mode, fakes, tracer or torch.func."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def axis_first(x: torch.Tensor, axis: int | None, size: int) -> torch.Tensor:
    """Return x with vmap's axis first; without such an axis x is repeated `size` times."""
    return x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)


class _Library(torch.library.Library):
    """A library whose kernels raise if forward mode would lose a tangent."""

    def impl(self, op_name: Any, fn: Callable[..., Any], *args: Any, **options: Any) -> None:
        def guarded(*arguments: Any, **named: Any) -> Any:
            if under_transforms():
                check(
                    not any(map(_has_tangent, arguments)),
                    f"torch.ops.wavepe.{op_name} has no forward mode: call the function of "
                    "wavepe.ops, which has one for differentiable arguments",
                )
            return fn(*arguments, **named)

        super().impl(op_name, guarded, *args, **options)


library = torch.library.Library("wavepe", "FRAGMENT")
_guarded_library = _Library("wavepe", "FRAGMENT")


def register_autograd(
    op: str, backward: Callable[..., Any], setup_context: Callable[..., Any] | None = None
) -> None:
    """Call torch.library's function; in forward mode the operator raises, and drops no tangent."""
    name = f"wavepe::{op}"
    torch.library.register_autograd(
        name, backward, setup_context=setup_context, lib=_guarded_library
    )


def register_standard(op: str, function: Callable[..., Any] | None, double: bool = False) -> None:
    """Let `function` compute an operator on devices without a kernel of wavepe; None: let the CPU.

    `double`: the function needs float64. Where a device lacks it, the CPU computes, too.
    """

    def kernel(*arguments: Any) -> Any:
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        layouts = {str(x.layout) for x in tensors}
        device = tensors[0].device
        dense = layouts == {"torch.strided"} and device.type not in _OWN_KERNELS
        check(dense, f"{op} takes plain dense tensors, got {', '.join(sorted(layouts))}")
        if function is not None and (not double or has_float64(device)):
            return function(*arguments)
        there = [x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments]
        results = getattr(torch.ops.wavepe, op)(*there)
        several = isinstance(results, tuple)
        return tuple(x.to(device) for x in results) if several else results.to(device)

    library.impl(op, kernel, "CompositeExplicitAutograd")
    if torch.version.hip:  # ROCm's devices are called "cuda"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            library.impl(op, kernel, "CUDA", allow_override=True)


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Tell whether a device computes in float64: Apple's do not, and few of Intel's."""
    try:
        return torch.ones(1, device=device).double().add(1).dtype == torch.float64
    except (RuntimeError, TypeError):
        return False


def _has_tangent(x: Any) -> bool:
    if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
        return False
    # The view shows the tangent, except inside an autograd.Function, which handles it itself.
    return forward_ad.unpack_dual(x.view_as(x)).tangent is not None


def not_differentiable(op: str, message: str) -> None:
    """Let the backward of an operator raise; torch alone would go on without the gradient."""

    def refuse(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError(f"wavepe: {message}")

    torch.library.register_autograd(f"wavepe::{op}", refuse)
