"""The attention "wavepe": score = (q.k + q.p_delta) * scaling - slope * delta, then PyTorch's own.

Registered with transformers as an attention and as a mask of the same name: without the mask
transformers would hand over none, and padding would be seen. A layer without an encoding of its
own under this name gets plain attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from .names import NAME
from .rotary import Rotary, Rotated
from .scores import Score

FORWARD_ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask", "past_key_values")


@dataclass
class Layer:
    """What one attention layer holds, as its attribute `wavepe`.

    Attributes
    ----------
    score : Score, optional
        Added to the scores.
    angles : Rotated, optional
        Rotation whose base may change: caches are checked against it.
    rotary : Rotary, optional
        Of a layer that stands alone, outside a model: makes its position embeddings.
    """

    score: Score | None = None
    angles: Rotated | None = None
    rotary: Rotary | None = None


def before_attention(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of an attention layer: what its attention function is not told."""
    layer = module.wavepe
    kwargs = dict(zip(FORWARD_ARGUMENTS, args, strict=False)) | kwargs
    cache = kwargs.get("past_key_values")
    seen = 0 if cache is None else _cached_tokens(cache, module.layer_idx)
    position_ids = kwargs.get("position_ids")
    if position_ids is None and (layer.rotary or layer.angles):
        hidden = kwargs["hidden_states"]
        position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None] + seen
    if layer.rotary is not None:
        kwargs["position_embeddings"] = layer.rotary(kwargs["hidden_states"], position_ids)
    if layer.angles is not None and cache is not None:
        layer.angles.check_cache(cache, seen, position_ids)
    if layer.score is not None and cache is not None:
        kwargs["wavepe_offset"] = seen
    return (), kwargs


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention with the layer's encoding, as transformers calls it.

    Parameters
    ----------
    module : Module
        The attention layer; its attribute `wavepe`, where present, is a `Layer`.
    query : Tensor (B, H, m, d)
    key, value : Tensor (B, Hk, n, d)
        H a multiple of Hk.
    attention_mask : Tensor (B|1, H|1, m, n), optional
        bool (True: attend) or float (added). None: everything for one query, else query i sees
        keys 0..i, which is right for an empty static cache (n > m) too.

    Returns
    -------
    out : Tensor (B, m, H, d)
    weights : Tensor (B, H, m, n) or None
        With `output_attentions` only.
    """
    score = _score(module)
    # transformers records weights for the argument and for the configuration's own switch.
    weights_wanted = kwargs.get("output_attentions", module.config.output_attentions)
    if score is None and not weights_wanted:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if score is not None and not causal:
        raise ValueError(f"{score.spec} needs causal attention here, got is_causal=False")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    offset = kwargs.get("wavepe_offset", 0)
    queries = query.shape[2]
    if attention_mask is None and causal and queries > 1:
        key, value, offset = key[:, :, :queries], value[:, :, :queries], 0
        attention_mask = query.new_ones((queries, queries), dtype=torch.bool).tril()
    elif attention_mask is None:
        offset = key.shape[2] - queries
    mask = _additive_mask(score, query, key.shape[2], offset, scaling, attention_mask)
    if weights_wanted:
        return eager_attention_forward(
            module, query, key, value, mask, scaling=scaling, dropout=dropout
        )
    out = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def _score(module: nn.Module) -> Score | None:
    """What the layer adds to its scores.

    A layer without an encoding may belong to a model that shares a configuration with others, but
    not to one whose configuration names an encoding.
    """
    layer = getattr(module, "wavepe", None)
    if layer is not None:
        return layer.score
    if hasattr(module.config, "position_encoding"):
        raise ValueError(
            f"this {type(module).__name__} has no position encoding, and its configuration names "
            f"{module.config.position_encoding!r}: build a WavePELlama... from that configuration"
        )
    return None


def _additive_mask(
    score: Score | None,
    query: Tensor,
    keys: int,
    offset: int | Tensor,
    scaling: float,
    mask: Tensor | None,
) -> Tensor | None:
    """The encoding's scores and the mask in one float32 tensor (float64 for float64)."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    bias: Tensor | None = None
    if score is not None:
        bias = _from_offset(score.bias(query.to(dtype) * scaling, keys), offset)
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        # The finite minimum keeps rows that see nothing (padding) finite. It is not added to the
        # bias: the sum of two negative numbers could be infinite.
        lowest = torch.finfo(dtype).min
        bias = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias
        return torch.where(mask, bias, lowest)
    if not mask.is_floating_point():
        raise TypeError(f"attention_mask must be bool or floating point, got {mask.dtype}")
    return mask.to(dtype) if bias is None else bias + mask.to(dtype)


def _from_offset(bias: Tensor, offset: int | Tensor) -> Tensor:
    """Move scores whose last query stands on the last key to queries that start at `offset`.

    They differ with a static cache, whose keys reach beyond the last query. Columns that have no
    source there belong to keys in the future, which the mask hides.
    """
    queries, keys = bias.shape[-2:]
    if not isinstance(offset, Tensor) and offset == keys - queries:
        return bias
    columns = torch.arange(keys, device=bias.device) + (keys - queries - offset)
    return bias.index_select(-1, columns.clamp(max=keys - 1))


def _cached_tokens(cache: Any, layer_idx: int) -> int | Tensor:
    """Number of tokens before the first query; a tensor of no dimensions for a static cache."""
    read = getattr(cache, "get_query_offset", cache.get_seq_length)
    seen = read(layer_idx)
    # A static cache counts on in the same tensor while the layer runs.
    return seen.clone() if isinstance(seen, Tensor) else seen


def register() -> None:
    """Make the attention known to transformers; the mask belongs to it."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
