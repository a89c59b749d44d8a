"""Attention by PyTorch's own, whose mask holds what is added to the scores and who sees whom.

For devices and sizes without a kernel of ours: one tensor (B, H, m, n) is held instead of ten. The
mask has q's dtype, so that in bfloat16 and float16 the relative term is rounded to it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._attention_composed import _along, _clamped, _default_scale, _delta, _visible
from ._common import names_memory, wide


def can_mask(softcap: float | None, dropout_p: float, return_lse: bool) -> bool:
    """Whether a mask says it all: PyTorch's attention gives no lse and draws its own dropout."""
    return softcap is None and dropout_p == 0 and not return_lse


@names_memory("attention")
def masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None = None,
    first: int = 0,
    beyond: str = "zero",
    q_rel: Tensor | None = None,
    slopes: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    offset: Tensor | int | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    zones: list[Tensor] | None = None,
    bias: Tensor | None = None,
    bias_first: int = 0,
    bias_beyond: str = "zero",
) -> Tensor:
    """Compute ``wavepe.ops.attention`` of checked arguments for which `can_mask` holds.

    Returns
    -------
    out : Tensor (B, H, m, dv) of q's dtype; 0 for a query that sees no key
    """
    scale = _default_scale(q) if scale is None else scale
    delta, own = _delta(q, k, offset), wide(q)
    term: Any = None
    if p is not None:
        r = q if q_rel is None else q_rel
        products = (r * scale).to(own) @ p.to(own).mT
        term = _along(products, delta - _clamped(first), beyond)
    if slopes is not None:
        slope = slopes.to(own)[:, None, None] * delta.abs()
        term = -slope if term is None else term - slope
    if bias is not None:
        of_heads = bias if bias.dim() == 2 else bias[None]
        of_rows = of_heads[None, :, None].expand(delta.shape[0], -1, q.shape[-2], -1)
        added = _along(of_rows, delta - _clamped(bias_first), bias_beyond)
        term = added if term is None else term + added
    visible = _visible(delta, causal, window, key_mask, segments, mask)
    blind = None
    if visible is not None:
        blind = ~visible.any(-1, keepdim=True)
        visible = visible | blind  # a row of -inf alone would be NaN
    if term is None:
        term = visible
    else:
        term = term.to(q.dtype)
        term = term if visible is None else torch.where(visible, term, -math.inf)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=term, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out if blind is None else out.masked_fill(blind, 0.0)
