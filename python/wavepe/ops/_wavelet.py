"""wavelet_table for torch [W]."""

from __future__ import annotations

import torch
from torch import Tensor

from .._wavelet import KINDS
from ._common import (
    INTEGERS,
    check,
    check_choice,
    check_device,
    check_dtype,
    check_tensors,
    not_differentiable,
)

_ops = torch.ops.wavepe


def wavelet_table(
    offsets: int | Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    kind: str = "ricker",
    mirrored: bool | None = None,
) -> Tensor:
    """Table of wavelets: ``p[r, c] = psi((t - shift[c]) / scale[c])`` [W].

    Parameters
    ----------
    offsets : int or integer Tensor (w,)
        Distances query minus key; a number w means 0..w-1.
    scale, shift : Tensor (d,) of any float dtype
        As `wavepe.wavelet_grid` gives them. Differentiable once (haar: zero).
    kind : str
        ricker, gaussian, morlet or haar.
    mirrored : bool, optional
        t is -offset instead of offset. None: True for haar, else False.

    Returns
    -------
    Tensor (w, d) of scale's dtype, evaluated in float64 and rounded once.
    """
    check_tensors(scale=scale, shift=shift)
    if not isinstance(offsets, Tensor):
        number = isinstance(offsets, (int, torch.SymInt)) and not isinstance(offsets, bool)
        if not number or offsets < 0:  # a message made before would freeze a traced length
            check(False, f"offsets must be a number from 0 on or a Tensor, got {offsets!r}")
        offsets = torch.arange(offsets, device=scale.device)
    return _ops.wavelet_table(offsets, scale, shift, kind, mirrored)


@torch.library.register_fake("wavepe::wavelet_table")
def _(offsets, scale, shift, kind="ricker", mirrored=None):
    check_device(offsets=offsets, scale=scale, shift=shift)
    check_dtype("offsets", offsets, INTEGERS)
    check_dtype("scale", scale)
    check_dtype("shift", shift)
    check_choice("kind", kind, KINDS)
    check(offsets.dim() == 1, f"offsets must be 1-D, got {tuple(offsets.shape)}")
    check(
        scale.dim() == 1 and scale.shape == shift.shape,
        f"scale and shift must be 1-D and of one size, got {tuple(scale.shape)} and "
        f"{tuple(shift.shape)}",
    )
    return scale.new_empty((offsets.shape[0], scale.shape[0]))


@torch.library.register_fake("wavepe::wavelet_table_backward")
def _(grad, offsets, scale, shift, kind, mirrored):
    return scale.new_empty(scale.shape), shift.new_empty(shift.shape)


def _setup_wavelet(ctx, inputs, output):
    *tensors, ctx.kind, ctx.mirrored = inputs
    ctx.save_for_backward(*tensors)


def _wavelet_backward(ctx, grad):
    grads = _ops.wavelet_table_backward(grad, *ctx.saved_tensors, ctx.kind, ctx.mirrored)
    return None, *grads, None, None


torch.library.register_autograd(
    "wavepe::wavelet_table", _wavelet_backward, setup_context=_setup_wavelet
)
not_differentiable("wavelet_table_backward", "its inputs (a second derivative)")
