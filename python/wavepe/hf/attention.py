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
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..encodings import encoding
from ..ops._attention_composed import attention_with_weights
from ..positions import PositionEncoding
from . import masks
from .families import CACHE_NAMES, NAME
from .layers import text
from .rotary import Angles, Rotary

NOTHING = PositionEncoding(encoding("none"))

# Where `ops.attention` is a kernel; elsewhere PyTorch's serves layers without a score better.
FUSED_ON = ("cpu",)
# Tensors that transformers hands to every attention function, and that do not change the scores.
IGNORED = (
    "position_ids",
    "cache_position",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "num_items_in_batch",
    "shift_labels",  # of the loss
    "token_type_ids",
    "mm_token_type_ids",  # what they change is in the mask
    "wavepe_offset",  # of `before_attention`
    "seq_idx",  # packed sequences once more, for layers of Mamba
)
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
    rotary : Rotary, optional
        Of a layer that stands alone, outside a model: makes its position embeddings.
    """

    names: tuple[str, ...]
    score: PositionEncoding | None = None
    rotation: int | None = None
    rotary: Rotary | None = None


def before_attention(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add what the attention function of a layer is not told (a forward pre-hook)."""
    layer = module.wavepe
    kwargs = dict(zip(layer.names, args, strict=False)) | kwargs
    if kwargs.get("cache") is not None:
        raise ValueError("continuous batching pages its cache: attention 'wavepe' does not read it")
    hidden = kwargs["hidden_states"]
    cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    seen: int | Tensor = 0
    if cache is not None:
        seen, first = _cached_tokens(cache, module.layer_idx, hidden.shape[1], kwargs)
        kwargs["wavepe_offset"] = seen - first
    if layer.rotary is not None:
        position_ids = kwargs.get("position_ids")
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None] + seen
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
    return (), kwargs


def before_layer(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand on `output_attentions`, which GPT-NeoX's decoder layer keeps (a forward pre-hook)."""
    return args, kwargs | {"wavepe_weights": kwargs.get("output_attentions")}


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
    """Compute attention with the layer's encoding; transformers calls this function.

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
    score, attention_mask = _score(module), masks.given_or_none(attention_mask)
    # transformers records weights for the argument and for the configuration's own switch.
    weights_wanted = kwargs.get("output_attentions", module.config.output_attentions)
    weights_wanted = weights_wanted or kwargs.get("wavepe_weights")
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    _check_known(kwargs, attention_mask)
    if not causal:
        if score is not None:
            raise ValueError(f"{score.encoding} needs causal attention here, got is_causal=False")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if score is not None and query.shape[1] != module.config.num_attention_heads:
        _check_split(score, query.shape[1], module.config.num_attention_heads)
    queries, keys = query.shape[2], key.shape[2]
    offset = kwargs.get("wavepe_offset", keys - queries)
    options: dict[str, Any] = {
        "offset": offset, "scale": scaling, "dropout_p": dropout, "softcap": softcap,
    }  # fmt: skip
    position = NOTHING if score is None else score
    seen = masks.read(attention_mask)
    added = seen.mask is not None and seen.mask.is_floating_point()
    if weights_wanted or added:
        mask = masks.visible(attention_mask, queries, keys, offset, query.device, sliding_window)
        given = position.arguments(query, keys)
        out, weights = attention_with_weights(**given, k=key, v=value, mask=mask, **options)
        weights = weights.to(query.dtype)
        return out.transpose(1, 2).contiguous(), weights if weights_wanted else None
    if score is None and softcap is None and query.device.type not in FUSED_ON:
        whole = _mask_of_sdpa(query, key, attention_mask, offset, sliding_window)
        return sdpa_attention_forward(
            module, query, key, value, whole, dropout=dropout, scaling=scaling
        )
    if seen.segments is not None and seen.segments.shape[1] < keys:
        # A static cache has room behind the packed sequences that fill it.
        key, value = (x[:, :, : seen.segments.shape[1]] for x in (key, value))
    window = sliding_window if seen.causal else None
    out = position.attend(query, key, value, **seen._asdict(), window=window, **options)
    return out.transpose(1, 2).contiguous(), None


def _check_known(kwargs: dict[str, Any], mask: Tensor | None) -> None:
    """Raise ValueError for what would change the scores and is not known here (sinks, biases)."""
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and name not in IGNORED:
            raise ValueError(
                f"the attention 'wavepe' does not know the tensor {name!r}: load this model with "
                "another attn_implementation"
            )
    ends = kwargs.get("cu_seq_lens_q")
    if mask is None and ends is not None and ends.numel() > 2:
        raise ValueError(
            "packed sequences by cu_seq_lens_q alone: give position_ids that start again in each, "
            "or wavepe.hf.patch(model), which reads cu_seq_lens_q"
        )


def _check_split(score: PositionEncoding, given: int, heads: int) -> None:
    """Raise ValueError where tensor parallelism has split heads that the encoding tells apart."""
    if score.encoding.learned or score.encoding.entry in ("slope", "bias"):
        raise ValueError(
            f"{score.encoding} needs all {heads} heads in one process, got {given}: tensor "
            "parallelism would give heads the numbers of others, or leave what is learned without "
            "the gradients of the other processes; use FSDP, or an encoding with one constant "
            "table for all heads (wavelet, rope)"
        )


def _mask_of_sdpa(
    query: Tensor, key: Tensor, mask: Tensor | None, offset: int | Tensor, window: int | None
) -> Tensor | None:
    """Return the mask written out, or None where PyTorch's attention sees causality by itself."""
    queries, keys = query.shape[2], key.shape[2]
    alone = queries == 1 and isinstance(offset, int) and offset == keys - 1
    first = isinstance(offset, int) and offset == 0  # with room behind, in a static cache
    if mask is None and (alone or (first and queries > 1)) and (window is None or keys <= window):
        return None
    return masks.visible(mask, queries, keys, offset, query.device, window)


def _score(module: Any) -> PositionEncoding | None:
    """Return what the layer adds to its scores.

    A layer without an encoding may belong to a model that shares a configuration with others, but
    not to one whose configuration names an encoding.
    """
    layer = getattr(module, "wavepe", None)
    if layer is not None:
        return layer.score
    if hasattr(module.config, "position_encoding"):
        raise ValueError(
            f"this {type(module).__name__} has no position encoding, and its configuration names "
            f"{text(module.config.position_encoding)!r}: build the model by its Auto class, "
            "AutoModelForCausalLM.from_config(config), say"
        )
    return None


def _cached_tokens(
    cache: Any, layer_idx: int, queries: int, kwargs: dict[str, Any]
) -> tuple[int | Tensor, int | Tensor]:
    """Return the number of tokens before the first query, and of those that a window has dropped.

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
