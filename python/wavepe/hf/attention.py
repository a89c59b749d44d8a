"""The attention "wavepe": score = ((q + u).k + (q + v).p_delta) * scaling - slope * |delta|.

Where the family has a softcap c, c * tanh(score / c). `wavepe.ops.attention` computes it for every
layer, those whose encoding leaves the scores alone too, and holds no tensor of queries x keys; one
is made only where the caller asks for the weights or brings a mask that is added. (On devices
without its kernel, layers whose scores are left alone get PyTorch's attention.) Registered with
transformers as an attention and as a mask of the same name: without the mask transformers would
hand over none, and padding would be seen.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .. import ops
from ..encodings import encoding
from ..ops._common import wide
from ..positions import PositionEncoding
from . import masks
from .families import CACHE_NAMES
from .layers import text
from .names import NAME
from .rotary import Angles, Rotary, Rotated

NOTHING = PositionEncoding(encoding("none"))

# Where `ops.attention` is a kernel; elsewhere PyTorch's serves layers without a score better.
FUSED_ON = ("cpu",)
# transformers < 5 asks for the places of the queries, not for their number.
SIZES_BY_LENGTH = "query_length" in inspect.signature(Cache.get_mask_sizes).parameters


@dataclass
class Layer:
    """What one attention layer holds, as its attribute `wavepe`.

    Attributes
    ----------
    names : tuple of str
        Of the positional arguments of the layer's forward.
    score : PositionEncoding, optional
        What the encoding puts into the scores.
    rotation : int, optional
        Of several rotations that a model's layers have, this layer's.
    angles : Rotated, optional
        A rotation that this layer is the first to have: caches are checked against it.
    rotary : Rotary, optional
        Of a layer that stands alone, outside a model: makes its position embeddings.
    """

    names: tuple[str, ...]
    score: PositionEncoding | None = None
    rotation: int | None = None
    angles: Rotated | None = None
    rotary: Rotary | None = None


def before_attention(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of an attention layer: what its attention function is not told."""
    layer = module.wavepe
    kwargs = dict(zip(layer.names, args, strict=False)) | kwargs
    if kwargs.get("cache") is not None:
        raise ValueError("continuous batching pages its cache: attention 'wavepe' does not read it")
    hidden = kwargs["hidden_states"]
    cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    if kwargs.get("output_attentions"):
        kwargs["wavepe_weights"] = True  # GPT-NeoX of transformers < 5 keeps the other to itself
    seen: int | Tensor = 0
    if cache is not None:
        seen, first = _cached_tokens(cache, module.layer_idx, hidden.shape[1], kwargs)
        kwargs["wavepe_offset"] = seen - first
    position_ids = kwargs.get("position_ids")
    if position_ids is None and (layer.rotary or layer.angles):
        position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None] + seen
    if layer.rotary is not None:
        if layer.rotary.training != module.training:  # it is no child, which train() would reach
            layer.rotary.train(module.training)
        kwargs["position_embeddings"] = layer.rotary(hidden, position_ids)
    elif layer.rotation is not None:
        kwargs["position_embeddings"] = kwargs["position_embeddings"][layer.rotation]
    if not isinstance(kwargs.get("position_embeddings"), Angles):
        raise ValueError(
            f"this {type(module).__name__} has the position encoding "
            f"{text(module.config.position_encoding)!r}, but another module than wavepe's made its "
            "angles: leave the model's rotary_emb in place, or wavepe.hf.unpatch(model) first"
        )
    if cache is not None and layer.angles is not None and layer.angles.changes:
        layer.angles.check_cache(cache, seen, position_ids)
    return (), kwargs


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
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
    attention_mask : Tensor, optional
        As `masks.attention_mask` makes it, or one of the user's own (B|1, H|1, m, n): bool (True:
        attend) or float (added), which alone decides what is seen.
    scaling, dropout, sliding_window, softcap
        As the family passes them.

    Returns
    -------
    out : Tensor (B, m, H, d)
    weights : Tensor (B, H, m, n) or None
        With `output_attentions` only.
    """
    score = _score(module)
    # transformers records weights for the argument and for the configuration's own switch.
    weights_wanted = kwargs.get("output_attentions", module.config.output_attentions)
    weights_wanted = weights_wanted or kwargs.get("wavepe_weights", False)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if kwargs.get("head_mask") is not None:
        raise ValueError("head_mask is not supported by the attention 'wavepe'")
    if not causal:
        if score is not None:
            raise ValueError(f"{score.encoding} needs causal attention here, got is_causal=False")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    seen = masks.read(attention_mask)
    options: Options = {
        "offset": kwargs.get("wavepe_offset", key.shape[2] - query.shape[2]),
        "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "dropout": dropout,
        "window": sliding_window,
        "softcap": softcap,
    }
    added = seen.mask is not None and seen.mask.is_floating_point()
    if weights_wanted or added:
        out, weights = _composed(score, query, key, value, attention_mask, **options)
        return out.transpose(1, 2).contiguous(), weights if weights_wanted else None
    if score is None and softcap is None and query.device.type not in FUSED_ON:
        whole = _mask_of_sdpa(query, key, attention_mask, options["offset"], sliding_window)
        return sdpa_attention_forward(
            module, query, key, value, whole, dropout=dropout, scaling=scaling
        )
    out = _fused(score, query, key, value, seen, **options)
    return out.transpose(1, 2).contiguous(), None


def _mask_of_sdpa(
    query: Tensor, key: Tensor, mask: Tensor | None, offset: int | Tensor, window: int | None
) -> Tensor | None:
    """Written out; None where causality is all, as PyTorch's attention reads it."""
    queries, keys = query.shape[2], key.shape[2]
    alone = queries == 1 and isinstance(offset, int) and offset == keys - 1
    first = isinstance(offset, int) and offset == 0  # with room behind, in a static cache
    if mask is None and (alone or (first and queries > 1)) and (window is None or keys <= window):
        return None
    return masks.visible(mask, queries, keys, offset, query.device, window)


class Options(TypedDict):
    """What `_fused` and `_composed` take alike."""

    offset: int | Tensor
    scaling: float
    dropout: float
    window: int | None
    softcap: float | None


def _fused(
    score: PositionEncoding | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: masks.Seen,
    *,
    offset: int | Tensor,
    scaling: float,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention (B, H, m, d) by `wavepe.ops.attention`."""
    if seen.segments is not None and seen.segments.shape[1] < key.shape[2]:
        # A static cache has room behind the packed sequences that fill it.
        key, value = (x[:, :, : seen.segments.shape[1]] for x in (key, value))
    options: dict[str, Any] = {
        **seen._asdict(),
        "scale": scaling,
        "offset": offset,
        "window": window if seen.causal else None,
        "softcap": softcap,
        "dropout_p": dropout,
    }
    return (NOTHING if score is None else score).attend(query, key, value, **options)


def _composed(
    score: PositionEncoding | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    offset: int | Tensor,
    scaling: float,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attention (B, H, m, d) and its weights (B, H, m, n) by PyTorch, with a tensor of scores."""
    queries, keys, dtype = query.shape[2], key.shape[2], query.dtype
    own = wide(query)
    given = (NOTHING if score is None else score).arguments(query.to(own), keys)
    query = given.pop("q")
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.to(own).repeat_interleave(groups, 1).transpose(-1, -2) * scaling
    scores = scores + _bias(given.pop("q_rel", query) * scaling, keys, offset, **given)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    shown = masks.visible(mask, queries, keys, offset, query.device, window)
    if shown.is_floating_point():
        scores = scores + shown
    else:
        # The finite minimum keeps rows that see nothing (padding) finite.
        scores = scores.masked_fill(~shown, torch.finfo(own).min)
    weights = nn.functional.dropout(scores.softmax(-1).to(dtype), dropout)
    return weights @ value.repeat_interleave(groups, 1), weights


def _score(module: Any) -> PositionEncoding | None:
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
            f"{text(module.config.position_encoding)!r}: build a WavePELlama... from that "
            "configuration"
        )
    return None


def _bias(
    q_rel: Tensor,
    keys: int,
    offset: int | Tensor,
    *,
    p: Any = None,
    first: int = 0,
    beyond: str = "zero",
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    bias_first: int = 0,
    bias_beyond: str = "zero",
) -> Tensor:
    """What is added to the scaled q.k, (B, H, m, n) or (H, m, n); q_rel is scaled."""
    queries = q_rel.shape[2]
    column = torch.arange(keys, device=q_rel.device)
    delta = torch.arange(queries, device=q_rel.device)[:, None] + offset - column
    added = q_rel.new_zeros(())
    if isinstance(p, ops.RelativeTable):
        beyond = p.beyond
        p, first, _ = p.tensors(q_rel.dtype, q_rel.device)
    if p is not None:
        added = ops.relative_bias(q_rel, p, keys, first=first, beyond=beyond)
        if isinstance(offset, Tensor) or offset != keys - queries:
            # The operator lets the last query stand on the last key. With a static cache keys reach
            # beyond it; columns that have no source there are in the future, which is hidden.
            source = column + (keys - queries - offset)
            added = added.index_select(-1, source.clamp(max=keys - 1))
    if slopes is not None:
        added = added - slopes[:, None, None] * delta.abs()
    if bias is not None:
        row = delta - bias_first
        numbers = bias[:, row.clamp(0, bias.shape[1] - 1)]
        outside = (row < 0) | (row >= bias.shape[1])
        added = added + (numbers if bias_beyond == "edge" else numbers.masked_fill(outside, 0))
    return added


def _cached_tokens(
    cache: Any, layer_idx: int, queries: int, kwargs: dict[str, Any]
) -> tuple[int | Tensor, int | Tensor]:
    """Number of tokens before the first query, and of those that a window has dropped.

    The first is a tensor of no dimensions for a static cache, which counts on in it while the layer
    runs.
    """
    seen = getattr(cache, "get_query_offset", cache.get_seq_length)(layer_idx)
    if SIZES_BY_LENGTH:
        _, first = cache.get_mask_sizes(queries, layer_idx)
    else:
        places = kwargs.get("cache_position")
        if places is None:
            places = torch.arange(queries) + seen
        elif isinstance(seen, Tensor):  # which does not count keys of zeros
            seen = places[0]
        _, first = cache.get_mask_sizes(places, layer_idx)
    return seen.clone() if isinstance(seen, Tensor) else seen, first


def register() -> None:
    """Make the attention known to transformers; the mask belongs to it."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, masks.attention_mask)
