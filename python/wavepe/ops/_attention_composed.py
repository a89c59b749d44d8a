"""Attention in plain torch: for torch.func, forward mode, higher derivatives and any device.

`masked` calls PyTorch's attention. `composed` follows the definition, with an (m, n) tensor for
every step. It also returns the weights, and takes a mask that is added to the scores.

A hidden key or value reaches neither the result nor a gradient, even if it is NaN or Inf. In a
matrix product 0 * NaN would be NaN. So the products take finite values only, and NaN and Inf are
added afterwards to the results that may see them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ._attention_checks import Arguments
from ._common import full_precision, report_out_of_memory, wide
from ._relative_table import RelativeTable
from ._scores import bias_values, clamped, default_scale, distances, take_rows, visible_keys

_LOW_32_BITS = 0xFFFFFFFF


@report_out_of_memory("attention")
def composed(call: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``wavepe.ops.attention`` of checked arguments, differentiable any number of times.

    bfloat16 and float16 are computed in float32, and the result is rounded once. The offset may be
    an int, too, and the mask floating point, which is added to the scores after the softcap.
    `zones` are not read, because p holds the same values. lse (B, H, m) of a query that sees no key
    is its sink, or -inf. The weights (B, H, m, n) are those after dropout, and with a sink they sum
    to less than 1. Both are float32 (float64 for float64).
    """
    dtype, wide_dtype = call.q.dtype, wide(call.q)
    delta = distances(call.q, call.k, call.offset)
    added, mask = None, call.mask
    if mask is not None and mask.is_floating_point():
        added, mask = mask, None
    visible = visible_keys(delta, call.causal, call.window, call.key_mask, call.segments, mask)
    q, k, v = (x.to(wide_dtype) for x in (call.q, call.k, call.v))

    scores, repeats = _times(_finite(q), _finite(k).mT), q.shape[1] // max(k.shape[1], 1)
    # (B, H, m, n): NaN where the products leave out a NaN or an Inf, else 0
    poison = _poison(k)[:, :, None, None, :].expand(-1, -1, repeats, -1, -1).flatten(1, 2)
    poison = _poison(q)[..., None] + poison
    if call.p is not None:
        r = q if call.q_rel is None else call.q_rel.to(wide_dtype)
        p, row = call.p.to(wide_dtype), delta - clamped(call.first)
        scores = scores + take_rows(_finite(r) @ _finite(p).mT, row, call.beyond)
        rows = _poison(p).unsqueeze(-2).expand(*r.shape[:-1], p.shape[-2])
        poison = poison + (_poison(r)[..., None] + take_rows(rows, row, call.beyond))
    scores = scores * (default_scale(q) if call.scale is None else call.scale)
    if call.slopes is not None:
        scores = scores - call.slopes.to(wide_dtype)[:, None, None] * delta.abs().to(wide_dtype)
    if call.bias is not None:
        scores = scores + bias_values(call.bias, delta, call.bias_first, call.bias_beyond)
    if (softcap := call.softcap) is not None:
        if visible is not None:  # the derivative of tanh at a hidden NaN would be NaN
            scores = torch.where(visible, scores, 0.0)
        scores = softcap * torch.tanh(scores / softcap)
    if added is not None:
        scores = scores + added.to(wide_dtype)

    weights, lse = _softmax(scores + poison, visible, call.sinks)
    if call.dropout_p > 0 and call.seed is not None:
        weights = weights * _dropout_factor(q, k, call.dropout_p, call.seed)
    return _weighted(weights, v, visible).to(dtype), lse, weights


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    p: Tensor | RelativeTable | None = None,
    dropout_p: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``wavepe.ops.attention`` together with its weights and its lse.

    The arguments are those of ``wavepe.ops.attention`` without key_mask, segments, causal and
    window. Only `mask` hides keys, as in PyTorch's attention: bool, or floating point, which is
    added to the scores. The weights (B, H, m, n), those after dropout, are float32 (float64 for
    float64).
    """
    if isinstance(p, RelativeTable):
        options["beyond"] = p.beyond
        p, options["first"], _ = p.tensors(q.dtype, q.device)
    seed = torch.randint(2**62, (), device=q.device) if dropout_p > 0 else None
    call = Arguments(q, k, v, p=p, causal=False, dropout_p=dropout_p, seed=seed, **options)
    with full_precision(q.device.type):
        out, lse, weights = composed(call)
    return out, weights, lse


def can_mask(softcap: float | None, dropout_p: float, return_lse: bool) -> bool:
    """Tell whether a mask is enough: PyTorch's attention has no softcap, no lse, other dropout."""
    return softcap is None and dropout_p == 0 and not return_lse


@report_out_of_memory("attention")
def masked(call: Arguments) -> Tensor:
    """Return ``wavepe.ops.attention`` of checked arguments for which `can_mask` is true.

    This serves devices and head sizes for which we have no kernel. PyTorch's attention gets a mask
    of the terms that are added to the scores, and of -inf for hidden keys: one tensor (B, H, m, n)
    instead of ten. The mask has q's dtype, so bfloat16 and float16 round the relative term.
    """
    q, k, v, p, bias, sinks = call.q, call.k, call.v, call.p, call.bias, call.sinks
    scale = default_scale(q) if call.scale is None else call.scale
    delta, dtype = distances(q, k, call.offset), wide(q)
    term: Any = None
    if p is not None:
        r = q if call.q_rel is None else call.q_rel
        products = (r * scale).to(dtype) @ p.to(dtype).mT
        term = take_rows(products, delta - clamped(call.first), call.beyond)
    if call.slopes is not None:
        slope = call.slopes.to(dtype)[:, None, None] * delta.abs()
        term = -slope if term is None else term - slope
    if bias is not None:
        added = bias_values(bias, delta, call.bias_first, call.bias_beyond)
        term = added if term is None else term + added
    visible = visible_keys(delta, call.causal, call.window, call.key_mask, call.segments, call.mask)
    blind = None
    if visible is not None:
        blind = ~visible.any(-1, keepdim=True)
        visible = visible | blind  # the softmax of a row of -inf would be NaN
    if term is None and sinks is None:
        term = visible
    else:
        term = q.new_zeros(()) if term is None else term.to(q.dtype)
        term = term if visible is None else torch.where(visible, term, -math.inf)
    if sinks is not None:  # a key whose value is 0
        sink = sinks.to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
        term = torch.cat([term.expand(*q.shape[:3], k.shape[2]), sink], -1)
        k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=term, scale=scale, enable_gqa=bool(q.shape[1] != k.shape[1])
    )
    return out if blind is None else out.masked_fill(blind, 0.0)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """Return the products (B, H, m, n) of x (B, H, m, c) and y (B, Hk, c, n)."""
    heads = y.shape[1]
    if x.shape[1] == heads:
        return x @ y
    return (x.unflatten(1, (heads, x.shape[1] // heads)) @ y[:, :, None]).flatten(1, 2)


# ---- NaN and Inf --------------------------------------------------------------------------------


def _finite(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, 0.0)


def _poison(x: Tensor) -> Tensor:
    """Return (..., rows): NaN for a row that holds a NaN or an Inf, else 0."""
    return (x.detach() * 0).sum(-1)


def _softmax(scores: Tensor, visible: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights, 0 for hidden pairs even of NaN, and the lse, that of the sink included."""
    if visible is not None:
        scores = torch.where(visible, scores, -math.inf)
    if scores.shape[-1]:
        largest = scores.detach().amax(-1, keepdim=True)
    else:
        largest = scores.new_full((*scores.shape[:-1], 1), -math.inf)
    if sinks is not None:
        sinks = sinks.to(scores.dtype)[:, None, None]
        largest = torch.maximum(largest, sinks.detach())
    largest = torch.where(largest == -math.inf, 0.0, largest)
    e = torch.exp(scores - largest)
    if visible is not None:
        e = torch.where(visible, e, 0.0)  # `largest` may be NaN
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - largest)
    blind = total == 0
    total = torch.where(blind, 1.0, total)
    lse = torch.where(blind, -math.inf, largest + torch.log(total))
    weights = e / total
    if visible is not None:  # `total` may be NaN
        weights = torch.where(visible, weights, 0.0)
    return weights, lse.squeeze(-1)


def _weighted(weights: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Return the products of weights and values, (B, H, m, dv)."""
    if visible is None:
        return _times(weights, v)
    out = _times(weights, _finite(v))
    # NaN counts as both infinities: their sum is NaN.
    fixed, nan = v.detach(), torch.isnan(v)
    bad = torch.cat([nan | (fixed == math.inf), nan | (fixed == -math.inf)], -1)
    sees = visible.expand(weights.shape).to(v.dtype)
    plus, minus = (_times(sees, bad.to(v.dtype)) > 0).chunk(2, -1)
    zero = torch.zeros_like(out)
    return out + zero.masked_fill(plus, math.inf) + zero.masked_fill(minus, -math.inf)


def _dropout_factor(q: Tensor, k: Tensor, dropout_p: float, seed: Tensor) -> Tensor:
    """Return (B, H, m, n): 0 for a dropped weight, 1 / (1 - dropout_p) for a kept one.

    This is the counter-based hash of the kernel: splitmix64 of seed and row, and a 32-bit mix with
    the key. int64 wraps as uint64 does, but a right shift must not copy the sign (`_shifted`).
    """
    batch, heads, m, n = *q.shape[:3], k.shape[-2]
    row = torch.arange(batch * heads * m, device=q.device).reshape(batch, heads, m, 1)
    z = seed.reshape(()) + _signed(0x9E3779B97F4A7C15) * (row + 1)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    x = (torch.arange(n, device=q.device) * 0x9E3779B9 + (z & _LOW_32_BITS)) & _LOW_32_BITS
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW_32_BITS
    x = x ^ (x >> 15) ^ _shifted(z, 32)
    x = (x * 0x846CA68B) & _LOW_32_BITS
    x = x ^ (x >> 16)
    kept = x >= math.floor(dropout_p * 2.0**32)
    return kept.to(q.dtype) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shifted(z: Tensor, by: int) -> Tensor:
    """Return z shifted to the right, with zeros from the left."""
    return (z >> by) & ((1 << (64 - by)) - 1)
