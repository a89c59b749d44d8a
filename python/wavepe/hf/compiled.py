"""Attention with a constant table as one operator, for compilers.

The table that a length needs, and the low-rank zones that make it fast, are found in Python, which
a compiler must not trace: their shapes follow the table's values. Inside of one operator they stay
out of the graph, and one graph serves every length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .tables import constant_table


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str,
    *,
    causal: bool,
    scale: float,
    offset: int | Tensor | None,
    key_mask: Tensor | None,
    segments: Tensor | None,
    mask: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """`wavepe.ops.attention` with the constant table of the encoding `spec`."""
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if not isinstance(offset, Tensor):
        offset = k.shape[2] - q.shape[2] if offset is None else offset
        offset = torch.full((), offset, dtype=torch.int64, device=q.device)
    seed = torch.randint(2**62, (), device=q.device) if dropout_p > 0 else None
    out, _ = torch.ops.wavepe_hf.attention_forward(
        q, k, v, spec, causal, scale, offset, key_mask, segments, mask, dropout_p, seed
    )
    return out


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str,
    causal: bool,
    scale: float,
    offset: Tensor,
    key_mask: Tensor | None,
    segments: Tensor | None,
    mask: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Any, ...]:
    """Of torch.ops.wavepe.attention_forward."""
    table = constant_table(spec, q.shape[-1], k.shape[2])
    p, first, zones = table.tensors(q.dtype, q.device)
    hidden = (offset, key_mask, segments, mask)
    return (
        *(q, k, v, p, first, table.beyond, None, None, causal, None, None, scale),
        *(*hidden, dropout_p, seed, zones or None),
    )


@torch.library.custom_op("wavepe_hf::attention_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str,
    causal: bool,
    scale: float,
    offset: Tensor,
    key_mask: Tensor | None,
    segments: Tensor | None,
    mask: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    hidden = (offset, key_mask, segments, mask)
    arguments = _arguments(q, k, v, spec, causal, scale, *hidden, dropout_p, seed)
    return torch.ops.wavepe.attention_forward(*arguments)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.ops.wavepe.attention_forward(q, k, v)


@torch.library.custom_op("wavepe_hf::attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str,
    causal: bool,
    scale: float,
    offset: Tensor,
    key_mask: Tensor | None,
    segments: Tensor | None,
    mask: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = (offset, key_mask, segments, mask)
    arguments = _arguments(q, k, v, spec, causal, scale, *hidden, dropout_p, seed)
    done = torch.ops.wavepe.attention_backward(grad_out, grad_lse, out, lse, *arguments, False)
    return done[0], done[1], done[2]


@_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv, _dp, _dr = torch.ops.wavepe.attention_backward(
        grad_out, grad_lse, out, lse, q, k, v
    )
    return dq, dk, dv


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.plain = tuple(None if isinstance(x, Tensor) else x for x in inputs)
    ctx.places = tuple(i for i, x in enumerate(inputs) if isinstance(x, Tensor))
    ctx.save_for_backward(*(inputs[i] for i in ctx.places), *output)


def _gradient(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    *saved, out, lse = ctx.saved_tensors
    inputs = list(ctx.plain)
    for i, x in zip(ctx.places, saved, strict=True):
        inputs[i] = x
    grads = torch.ops.wavepe_hf.attention_backward(grad_out, grad_lse, out, lse, *inputs)
    return (*grads, *[None] * (len(inputs) - 3))


_forward.register_autograd(_gradient, setup_context=_setup)
