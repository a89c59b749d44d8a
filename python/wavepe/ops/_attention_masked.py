"""Attention by PyTorch's scaled_dot_product_attention, with one mask for everything else.

The mask holds the terms that are added to the scores, and -inf for hidden keys. This serves devices
and head sizes for which we have no kernel, and holds one tensor (B, H, m, n) instead of ten. The
mask has q's dtype, so bfloat16 and float16 round the relative term.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._attention_checks import Arguments
from ._common import report_out_of_memory, wide
from ._scores import bias_values, clamped, default_scale, distances, take_rows, visible_keys


def can_mask(softcap: float | None, dropout_p: float, return_lse: bool) -> bool:
    """Tell whether a mask is enough: PyTorch's attention has no softcap, no lse, other dropout."""
    return softcap is None and dropout_p == 0 and not return_lse


@report_out_of_memory("attention")
def masked(call: Arguments) -> Tensor:
    """Return ``wavepe.ops.attention`` of checked arguments for which `can_mask` is true.

    Returns
    -------
    out : Tensor (B, H, m, dv) of q's dtype; 0 for a query that sees no key
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
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=term, scale=scale, enable_gqa=bool(q.shape[1] != k.shape[1])
    )
    return out if blind is None else out.masked_fill(blind, 0.0)
