"""wavelet_table for torch [W]."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from ..arrays.wavelet import KINDS, check_kind, sampled_table
from ..arrays.wavelet_registered import registered, table_gradients
from ._common import (
    INTEGERS,
    axis_first,
    check,
    check_choice,
    check_device,
    check_dtype,
    check_tensors,
    not_differentiable,
    reduce_angles,
    register_autograd,
    register_standard,
    report_out_of_memory,
    run_check,
    wide,
)
from ._compiler import is_compiling, traced
from ._torch_private import holds, transformed

_ops = torch.ops.wavepe
_NO_SECOND = "wavelet_table has no second derivative; detach its gradients"


@report_out_of_memory("wavelet_table")
def wavelet_table(
    offsets: int | Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    kind: str = "ricker",
    mirrored: bool | None = None,
) -> Tensor:
    """Return a table of wavelets at integer distances, as `wavepe.wavelet_table`, differentiable.

    Parameters
    ----------
    offsets : int or integer Tensor (w,)
        The distance of each row. A number w stands for 0, 1, ... w-1.
    scale, shift : Tensor (d,), float32, float64, bfloat16 or float16
        The scale and shift of each column, as `wavepe.wavelet_grid` returns them.
    kind, mirrored
        As in `wavepe.wavelet_table`.

    Returns
    -------
    p : Tensor (w, d), scale's dtype
        Computed in float64 and rounded once. Differentiable once in scale and shift, in reverse
        mode. The gradients of haar are zero. A registered wavelet needs a derivative, and a wavelet
        of PyWavelets has none.

    Raises
    ------
    RuntimeError
        If a shape, dtype, device or value is wrong, or if a gradient is asked of a wavelet without
        derivative.

    Notes
    -----
    Registered wavelets and those of PyWavelets are computed by NumPy, also for tensors on a device,
    for which the call waits.
    """
    check_tensors(scale=scale, shift=shift)
    if not isinstance(kind, str):
        check(False, f"kind must be a string, got {kind!r}")
    if not isinstance(offsets, Tensor):
        number = isinstance(offsets, (int, torch.SymInt)) and not isinstance(offsets, bool)
        # The message is made only here: with it, a compiler would fix a traced length.
        if not number or not holds(offsets >= 0):
            check(False, f"offsets must be an int from 0 or a Tensor, got {offsets!r}")
        offsets = torch.arange(offsets, device=scale.device)
    compiling = is_compiling()
    sampled = kind not in KINDS
    op: Any = _ops.sampled_wavelet_table if sampled else _ops.wavelet_table
    if transformed():
        op = (_SampledTable if sampled else _Table).apply
    elif compiling:
        op = traced(op, _standard)
    return op(offsets, scale, shift, kind, mirrored)


def _check_arguments(offsets: Tensor, scale: Tensor, shift: Tensor) -> None:
    check_tensors(offsets=offsets, scale=scale, shift=shift)
    check_device(offsets=offsets, scale=scale, shift=shift)
    check_dtype("offsets", offsets, INTEGERS)
    check_dtype("scale", scale)
    check_dtype("shift", shift)
    check(offsets.dim() == 1, f"offsets must be 1-D, got {tuple(offsets.shape)}")
    check(
        scale.dim() == shift.dim() == 1 and holds(scale.shape[0] == shift.shape[0]),
        f"scale and shift must be 1-D and of one size, got {tuple(scale.shape)} and "
        f"{tuple(shift.shape)}",
    )


# ------------------------------------------------------------------ the kinds of the C core


@torch.library.register_fake("wavepe::wavelet_table")
def _fake(
    offsets: Tensor, scale: Tensor, shift: Tensor, kind: str = "ricker", *_: bool | None
) -> Tensor:
    _check_arguments(offsets, scale, shift)
    check_choice("kind", kind, KINDS)
    return scale.new_empty((offsets.shape[0], scale.shape[0]))


@torch.library.register_fake("wavepe::wavelet_table_backward")
def _fake_backward(
    grad: Tensor, offsets: Tensor, scale: Tensor, shift: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return scale.new_empty(scale.shape), shift.new_empty(shift.shape)


def _setup_wavelet(ctx: Any, inputs: tuple, output: Any) -> None:
    *tensors, ctx.kind, ctx.mirrored = inputs
    ctx.save_for_backward(*tensors)


def _backward_by(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward whose gradients of scale and shift the function computes."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = gradients(grad, *ctx.saved_tensors, ctx.kind, ctx.mirrored)
        return None, *grads, None, None

    return backward


def _standard(offsets: Tensor, scale: Tensor, shift: Tensor, *options: Any) -> Tensor:
    """Return the table of a kind of the C core in operators of torch, as csrc/kernels/psi.h."""
    options += ("ricker", None)[len(options) :]  # torch drops defaults
    kind, mirrored = options
    check(
        kind in KINDS,
        f"NumPy computes the wavelet {kind!r}, so a program of standard operators cannot hold it "
        "with scales and shifts that are learned",
    )
    _fake(offsets, scale, shift, kind, mirrored)  # checks
    t = offsets.double()[:, None]
    negated = mirrored or (mirrored is None and kind == "haar")
    distance = (-t if negated else t) - shift.double()
    u = distance / scale.double()
    if kind == "haar":
        u = u if scale.dtype == torch.float64 else u.float()
        value = torch.where(u < -0.5, -1.0, 1.0)
        value = torch.where((u >= -1) & (u < 0), value, 0.0)
    elif kind == "ricker":
        value = (1 - u) * (1 + u) * torch.exp(-0.5 * u * u)
    else:
        value = torch.exp(-u * u)
    if kind == "morlet":
        value = value * torch.cos(reduce_angles(distance).to(wide(scale)))
    value = torch.where(u.abs() > 38, 0.0, value)
    return torch.where(scale == 0, math.nan, value).to(scale.dtype)


register_standard("wavelet_table", _standard, double=True)
register_standard("wavelet_table_backward", None)
register_autograd("wavelet_table", _backward_by(_ops.wavelet_table_backward), _setup_wavelet)
not_differentiable("wavelet_table_backward", _NO_SECOND)


# ------------------------------------------------------------------ the kinds that NumPy computes


@torch.library.custom_op("wavepe::sampled_wavelet_table", mutates_args=())
def _sampled(
    offsets: Tensor, scale: Tensor, shift: Tensor, kind: str, mirrored: bool | None
) -> Tensor:
    _check_sampled(offsets, scale, shift, kind)
    arrays = run_check(_arrays, offsets, scale, shift, mirrored)
    return _like(scale, run_check(sampled_table, kind, *arrays))


@_sampled.register_fake
def _(offsets: Tensor, scale: Tensor, shift: Tensor, kind: str, mirrored: bool | None) -> Tensor:
    _check_sampled(offsets, scale, shift, kind)
    return scale.new_empty((offsets.shape[0], scale.shape[0]))


@torch.library.custom_op("wavepe::sampled_wavelet_table_backward", mutates_args=())
def _sampled_backward(
    grad: Tensor, offsets: Tensor, scale: Tensor, shift: Tensor, kind: str, mirrored: bool | None
) -> tuple[Tensor, Tensor]:
    check_tensors(grad=grad)
    _check_arguments(offsets, scale, shift)
    shape = (offsets.shape[0], scale.shape[0])
    check(grad.shape == shape, f"grad must be {shape}, got {tuple(grad.shape)}")
    wavelet = registered(kind)
    if wavelet is None:
        check(False, f"kind {kind!r} must be a registered wavelet, but is none (any more)")

    def gradients() -> tuple[np.ndarray, np.ndarray]:
        arrays = (*_float64(grad), *_arrays(offsets, scale, shift, mirrored))
        return table_gradients(cast(Any, wavelet), *arrays)

    grad_scale, grad_shift = run_check(gradients)
    return _like(scale, grad_scale), _like(shift, grad_shift)


_sampled_backward.register_fake(_fake_backward)


def _check_sampled(offsets: Tensor, scale: Tensor, shift: Tensor, kind: str) -> None:
    _check_arguments(offsets, scale, shift)
    run_check(check_kind, "kind", kind)


def _arrays(
    offsets: Tensor, scale: Tensor, shift: Tensor, mirrored: bool | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return t, scale and shift in float64."""
    t, a, b = _float64(offsets, scale, shift)
    return (-t if mirrored else t), a, b


def _float64(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.detach().cpu().double().numpy() for tensor in tensors]


def _like(tensor: Tensor, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(tensor.device, tensor.dtype)


def _setup_sampled(ctx: Any, inputs: tuple, output: Any) -> None:
    kind = inputs[3]
    if any(ctx.needs_input_grad):
        wavelet = registered(kind)
        check(
            wavelet is not None and wavelet.derivative is not None,
            f"wavelet_table of kind {kind!r} is not differentiable in scale and shift: detach them"
            + (", or register it with derivative=" if wavelet else " (levels and integers)"),
        )
    _setup_wavelet(ctx, inputs, output)


_sampled.register_autograd(_backward_by(_sampled_backward), setup_context=_setup_sampled)
not_differentiable("sampled_wavelet_table_backward", _NO_SECOND)


# ------------------------------------------------------------------ torch.func
# The autograd of torch.library ignores torch.func, and does not raise in forward mode, for which
# there is no formula here. These Functions do both.


class _Gradients(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(lambda op, *args: op(*args))
    setup_context = staticmethod(lambda ctx, inputs, output: None)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError(f"wavepe: {_NO_SECOND}")


def _once(gradients: Any) -> Callable[..., Any]:
    return _backward_by(functools.partial(_Gradients.apply, gradients))


class _Table(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(_ops.wavelet_table.default)
    setup_context = staticmethod(_setup_wavelet)
    backward = staticmethod(_once(_ops.wavelet_table_backward))


class _SampledTable(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(_ops.sampled_wavelet_table.default)
    setup_context = staticmethod(_setup_sampled)
    backward = staticmethod(_once(_ops.sampled_wavelet_table_backward))


def _joins_columns(op: Any) -> Callable:
    """Return the vmap rule of an operator on (grad,) offsets, scale and shift.

    Columns are independent, so vmap's axis joins the columns. Offsets that differ along that axis
    need a call each.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple:
        size = info.batch_size
        tensors = [x for x in args if isinstance(x, Tensor)]
        axes, options = in_dims[: len(tensors)], args[len(tensors) :]
        stacked = [axis_first(x, axis, size) for x, axis in zip(tensors, axes, strict=True)]
        if axes[-3] is not None:
            results = [op(*(x[i] for x in stacked), *options) for i in range(size)]
            if isinstance(results[0], tuple):
                return tuple(map(torch.stack, zip(*results, strict=True))), (0, 0)
            return torch.stack(results), 0
        *grad, _, scale, shift = stacked
        grad = [g.transpose(0, 1).flatten(1) for g in grad]
        out = op(*grad, tensors[-3], scale.flatten(), shift.flatten(), *options)
        if isinstance(out, tuple):
            return tuple(x.unflatten(0, scale.shape) for x in out), (0, 0)
        return out.unflatten(1, scale.shape), 1

    return rule


for _name in ("wavelet_table", "sampled_wavelet_table"):
    for _op in (getattr(_ops, _name), getattr(_ops, f"{_name}_backward")):
        torch.library.register_vmap(_op.default, _joins_columns(_op.default))
