"""Attention with a constant table as one operator, for compilers.

Python computes the table of a length and its low-rank zones. A compiler must not trace that,
because the shapes depend on the table's values. Inside one operator they stay out of the graph, so
one graph serves every length. The zones save up to a third of the time at 4096 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops._common import save_call, saved_call
from .tables import constant_table, encoding_named


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    name: str,
    one_sided: bool,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    offset: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return `wavepe.ops.attention` with the constant table of the encoding called `name`.

    A table that is `one_sided` has rows for the distances 0..keys-1 only.
    """
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if not isinstance(offset, Tensor):
        offset = k.shape[2] - q.shape[2] if offset is None else offset
        offset = torch.full((), offset, dtype=torch.int64, device=q.device)
    seed = torch.randint(2**62, (), device=q.device) if dropout_p > 0 else None
    scores = (name, one_sided, causal, window, softcap, scale, offset)
    hidden = (key_mask, segments, mask)
    out, _ = torch.ops.wavepe_nn.attention_forward(q, k, v, *scores, *hidden, dropout_p, seed)
    return out


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, str name, bool one_sided, bool causal, SymInt? window, "
    "float? softcap, float? scale, Tensor offset, Tensor? key_mask, Tensor? segments, "
    "Tensor? mask, float dropout_p, Tensor? seed"
)


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, name: str, one_sided: bool, *rest: Any
) -> tuple[Any, ...]:
    """Return the arguments of torch.ops.wavepe.attention_forward for arguments of `_INPUTS`."""
    table = constant_table(k.shape[2], encoding_named(name), q.shape[-1], one_sided)
    p, first, zones = table.tensors(q.dtype, q.device)
    return (q, k, v, p, first, table.beyond, None, None, *rest, zones or None)


@torch.library.custom_op(
    "wavepe_nn::attention_forward", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)"
)
def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    return torch.ops.wavepe.attention_forward(*_arguments(*inputs))


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.ops.wavepe.attention_forward(q, k, v)


@torch.library.custom_op(
    "wavepe_nn::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_INPUTS})"
    " -> (Tensor, Tensor, Tensor)",
)
def _backward(*inputs: Any) -> tuple[Tensor, ...]:
    given = (*inputs[:4], *_arguments(*inputs[4:]))
    return torch.ops.wavepe.attention_backward(*given)[:3]


@_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in inputs[4:7])


def _gradient(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    inputs, (out, lse) = saved_call(ctx)
    grads = torch.ops.wavepe_nn.attention_backward(grad_out, grad_lse, out, lse, *inputs)
    return (*grads, *[None] * (len(inputs) - 3))


_forward.register_autograd(
    _gradient, setup_context=lambda ctx, inputs, output: save_call(ctx, inputs, *output)
)
