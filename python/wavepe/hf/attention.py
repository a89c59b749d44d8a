"""The attention "wavepe": score = ((q + u).k + (q + v).p_delta) * scaling - slope * |delta|.

A family with a softcap c applies c * tanh(score / c) after that. `wavepe.ops.attention` computes
every layer, and it holds no tensor of queries x keys. There are two exceptions. Such a tensor is
built when the caller asks for the weights or gives a mask to be added to the scores. And where the
device has no kernel for it, a layer whose encoding leaves the scores alone uses PyTorch's
attention.

transformers knows this function as the attention "wavepe", and `masks.attention_mask` as the mask
of the same name. Without a registered mask, transformers would pass no mask, and queries would see
padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..encodings import encoding
from ..ops import _compiler
from ..ops._attention_composed import attention_with_weights
from ..positions import Places, Rotated, Scores, Terms
from . import families, foreign, inkling, masks
from .config import PatchedConfig
from .counting import POSITIONS, TOKENS_AT, by_positions, of_layer, span
from .families import ATTENTION, cache_in, is_cache
from .layers import spec_text
from .learned import MODULE_NAME, SharedLearned
from .pairs import Layout
from .rotary import CosSin, Rotary

NO_ENCODING = Scores(encoding("none"), head_dim=1, heads=1, causal=True)

# Attribute of the keys that layers share: layer type -> `LayerCall.offset` of the layer that has
# them. The cache has no entry for the other layers.
OFFSETS = "_wavepe_offsets"

# Tensors that transformers passes to every attention function and that do not change the scores.
IGNORED = (
    "position_ids",
    "cache_position",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "num_items_in_batch",
    "shift_labels",  # for the loss
    "token_type_ids",
    "mm_token_type_ids",  # the mask holds their effect
    "seq_idx",  # packed sequences again, for Mamba layers
)
# The argument is the number of queries; transformers < 5 takes their positions instead.
SIZES_BY_LENGTH = "query_length" in inspect.signature(Cache.get_mask_sizes).parameters


@dataclass
class LayerState:
    """The state that wavepe keeps on an attention layer, as its attribute `wavepe`.

    Attributes
    ----------
    names : tuple of str
        Names of the positional arguments of the layer's forward.
    score : Scores, optional
        What the encoding adds to the scores.
    shared : SharedLearned, optional
        What the layers of the model learn together. A layer's own parameters are in its module
        `position_encoding`.
    turned : Layout, optional
        The form of the angles, if the encoding rotates queries whose other terms read them without
        the rotation.
    rotation : int, optional
        Index of this layer's rotation, if the model has several.
    rotary : Rotary, optional
        Module that computes the angles, for a layer that stands alone, outside a model.
    """

    names: tuple[str, ...]
    score: Scores | None = None
    shared: SharedLearned | None = None
    turned: Layout | None = None
    rotation: int | None = None
    rotary: Rotary | None = None

    def learned(self, module: Any, keys: int, x: Tensor | None = None) -> Terms:
        """Return what the encoding of this layer, the attention `module` of x, has learned."""
        shared: Terms = {} if self.shared is None else self.shared(keys)
        own = module._modules.get(MODULE_NAME)
        return shared if own is None else {**shared, **own(keys, None, shared, x)}


STOCK = LayerState(())


@dataclass
class LayerCall:
    """What the hooks of a layer and the attention function tell each other in one call.

    Attributes
    ----------
    offset : int or Tensor (), optional
        Index of the key at the position of the first query; None: the queries come last.
    angles : CosSin, optional
        The angles, if other terms read the queries before the rotation.
    hidden : Tensor (B, m, dim), optional
        The input of the layer.
    positions : Tensor (B|1, m), optional
        The positions of its tokens.
    learned : mapping of str to LearnedTerms, optional
        What the encoding has learned, if the cache needed it already.
    reached : bool
        Whether the attention function has run.
    """

    offset: int | Tensor | None = None
    angles: CosSin | None = None
    hidden: Tensor | None = None
    positions: Tensor | None = None
    learned: Terms | None = None
    reached: bool = False


class CacheWithDecay:
    """A layer's view of its cache, which keeps with the keys what the input says of each token."""

    def __init__(self, cache: Any, add: Callable[[Tensor], Tensor]) -> None:
        self._cache, self._add = cache, add

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, keys: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Add keys and values to the cache, and return all of them."""
        try:
            return self._cache.update(self._add(keys), *args, **kwargs)
        except RuntimeError as error:  # transformers < 5 makes static caches before it sees keys
            raise ValueError(
                f"this {type(self._cache).__name__} has no room for what the position encoding "
                "keeps beside the keys: use a DynamicCache"
            ) from error


def before_attention(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add a `LayerCall` and the angles to the arguments of a layer (forward pre-hook)."""
    layer, call = module.wavepe, LayerCall()
    foreign.note(module)
    kwargs = dict(zip(layer.names, args, strict=False)) | kwargs
    if not (kwargs.get("cache") is None or is_cache(kwargs["cache"])):
        raise ValueError(
            "continuous batching uses a paged cache, which the attention 'wavepe' cannot read: "
            "generate without continuous batching, or load the model with another "
            "attn_implementation"
        )
    hidden, cache = kwargs["hidden_states"], cache_in(kwargs)
    cached: int | Tensor = 0
    if cache is not None:
        if families.reuses_keys(module):
            call.offset = getattr(kwargs["shared_kv_states"], OFFSETS)[module.layer_type]
        else:
            cached, first = _cached_tokens(cache, module.layer_idx, hidden.shape[1], kwargs)
            call.offset = cached - first
        if families.stores_keys(module):
            shared = kwargs["shared_kv_states"]
            shared.__dict__.setdefault(OFFSETS, {})[module.layer_type] = call.offset
    if layer.rotary is not None:
        position_ids = kwargs.get("position_ids")
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None] + cached
        if layer.rotary.training != module.training:  # no child: module.train() does not reach it
            layer.rotary.train(module.training)
        kwargs["position_embeddings"] = layer.rotary(hidden, position_ids)
    elif layer.rotation is not None:
        kwargs["position_embeddings"] = kwargs["position_embeddings"][layer.rotation]
    given = kwargs.get("position_embeddings")
    if not isinstance(given, CosSin) and not (given is None and families.gets_no_angles(module)):
        raise ValueError(
            f"this {type(module).__name__} has the position encoding "
            f"{spec_text(module.config.position_encoding)!r}, but its angles come from a module "
            "that is not wavepe's: leave the model's rotary_emb in place, or call "
            "wavepe.hf.unpatch(model) first"
        )
    if layer.turned is not None:
        call.angles = kwargs["position_embeddings"]
    found = kwargs.pop(TOKENS_AT, None)
    call.hidden, call.positions = hidden, kwargs.get("position_ids", found)
    if call.positions is None and layer.score is not None and layer.score.reads_positions:
        call.positions = torch.arange(hidden.shape[1], device=hidden.device)[None] + cached
    if cache is not None and layer.score is not None and layer.score.has_decay:
        unknown = isinstance(cached, Tensor)  # a static cache counts in a tensor
        size: Any = 1 if unknown else cached + hidden.shape[1]
        score, learned = layer.score, layer.learned(module, size, hidden)
        call.learned = None if unknown else learned
        name = next(name for name in families.CACHE_NAMES if kwargs.get(name) is cache)
        kwargs[name] = CacheWithDecay(cache, lambda keys: score.with_decay(keys, learned))
    return (), kwargs | {"wavepe_call": call}


def after_attention(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Raise ValueError if another program's forward has left the encoding out (forward hook)."""
    call = kwargs.get("wavepe_call")
    if call is not None and not call.reached:
        raise foreign.replaced(f"the forward of this {type(module).__name__}", module.config)


def before_layer(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass `output_attentions` on, as GPT-NeoX's decoder layer does not (forward pre-hook)."""
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
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the layer's encoding; transformers calls this function.

    Parameters
    ----------
    module : Module
        The attention layer. If it has the attribute `wavepe`, that is a `LayerState`.
    query : Tensor (B, H, m, d)
    key, value : Tensor (B, Hk, n, d)
        H must be a multiple of Hk.
    attention_mask : Tensor, optional
        A mask of `masks.attention_mask`, or a mask of the user's own (B|1, H|1, m, n): bool (True:
        attend) or float (added to the scores). The user's own mask alone decides which keys a
        query sees.
    scaling, dropout, sliding_window, softcap
        As the family passes them.
    s_aux : Tensor (H,), optional
        The score of each head's attention sink, which has no value.
    position_bias : Tensor (B, H, m, rank), optional
        What a patched Inkling has in place of its relative logits (see inkling.py).

    Returns
    -------
    out : Tensor (B, m, H, d)
    weights : Tensor (B, H, m, n) or None
        None unless the caller asks for `output_attentions`.
    """
    layer, attention_mask = _layer(module), masks.drop_empty(attention_mask)
    score, call = layer.score, kwargs.get("wavepe_call") or LayerCall()
    if layer is not STOCK and "wavepe_call" not in kwargs:
        raise foreign.replaced(f"what calls this {type(module).__name__}", module.config)
    call.reached = True
    # transformers asks for weights by the argument or by the configuration.
    weights_wanted = kwargs.get("output_attentions", module.config.output_attentions)
    weights_wanted = weights_wanted or kwargs.get("wavepe_weights")
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if layer is STOCK and position_bias is not None:
        kwargs["position_bias"] = position_bias
    _check_known(kwargs, attention_mask)
    if not causal:
        if score is not None:
            raise ValueError(f"{score.encoding} needs causal attention, got is_causal=False")
        if s_aux is not None:
            raise ValueError("attention sinks need causal attention, got is_causal=False")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if score is not None and query.shape[1] != score.heads:
        _check_split(score, query.shape[1])
    queries, keys = query.shape[2], key.shape[2]
    offset = keys - queries if call.offset is None else call.offset
    options: dict[str, Any] = {
        "offset": offset, "scale": scaling, "dropout_p": dropout, "softcap": softcap,
        "sinks": s_aux,
    }  # fmt: skip
    positions = None if score is None else kwargs.get(POSITIONS)
    size = keys if positions is None else span(positions)
    position: Scores = NO_ENCODING
    learned: Terms = {}
    if score is not None:
        position, known = score, call.learned if positions is None else None
        learned = layer.learned(module, size, call.hidden) if known is None else known
        if position_bias is not None and position_bias.shape[-1]:
            learned = {**learned, inkling.OWN: inkling.own_terms(module, position_bias)}
        if score.has_decay and key.shape[-1] == query.shape[-1]:  # there is no cache
            key = score.with_decay(key, learned)
    rotated = _rotated(call.angles, layer.turned)
    parts = masks.mask_parts(attention_mask)
    added = parts.mask is not None and parts.mask.is_floating_point()
    extended = position.extended is not None and not module.training
    if parts.mask is not None and (extended or position.has_decay):
        raise ValueError(
            f"{position.encoding} counts the tokens between query and key, so it takes no mask of "
            "queries x keys: give a mask of tokens, (batch, tokens)"
        )
    if weights_wanted or added or positions is not None:
        if extended:
            what = "position_ids with gaps" if positions is not None else "output_attentions=True"
            raise ValueError(f"self_extend makes two calls of attention and takes no {what}")
        mask = masks.full_mask(attention_mask, queries, keys, offset, query.device, sliding_window)
        places = Places(offset, call.positions, parts.key_mask)
        if positions is not None:
            first = positions.keys.shape[1] - queries - int(offset)
            positions = of_layer(positions, first, keys)
            places = places._replace(positions=positions.queries, of_keys=positions.keys)
        given = position.arguments(query, key, learned, rotated, scaling, places, size, s_aux)
        given["window"] = position.window(None)
        if positions is not None:
            given = by_positions(given, positions)
        out, weights = attention_with_weights(v=value, mask=mask, **{**options, **given})
        out, weights = out.to(query.dtype), weights.to(query.dtype)
        return out.transpose(1, 2).contiguous(), weights if weights_wanted else None
    plain = score is None and softcap is None and s_aux is None
    if plain and query.device.type not in families.FUSED_ON:
        whole = _sdpa_mask(query, key, attention_mask, offset, sliding_window)
        return sdpa_attention_forward(
            module, query, key, value, whole, dropout=dropout, scaling=scaling
        )
    if parts.segments is not None and parts.segments.shape[1] < keys:
        # A static cache has unused room behind the packed sequences.
        key, value = (x[:, :, : parts.segments.shape[1]] for x in (key, value))
    # A user's own mask alone decides, but for the window of the encoding.
    window = sliding_window if parts.causal else None
    options |= {
        "causal": parts.causal, "key_mask": parts.key_mask, "segments": parts.segments,
        "mask": parts.mask, "window": window, "positions": call.positions,
        "training": module.training,
    }  # fmt: skip
    out = position.attend(query, key, value, learned, rotated, **options)
    return out.transpose(1, 2).contiguous(), None


def _check_known(kwargs: dict[str, Any], mask: Tensor | None) -> None:
    """Raise ValueError for arguments that would change the scores, such as biases."""
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and name not in IGNORED:
            raise ValueError(
                f"the attention 'wavepe' got the argument {name!r}, which it does not know: if it "
                "is a column of your data, take it out of the batch; if this model passes it, the "
                "model needs another attn_implementation"
            )
    ends = kwargs.get("cu_seq_lens_q")
    if mask is None and ends is not None and ends.numel() > 2:
        raise ValueError(
            "got packed sequences by cu_seq_lens_q alone: give position_ids that start again in "
            "each sequence, or call wavepe.hf.patch(model), which reads cu_seq_lens_q"
        )


def _check_split(score: Scores, given: int) -> None:
    """Raise ValueError if tensor parallelism has split heads whose encodings differ."""
    if score.encoding.learns or score.encoding.terms != ("table",):
        raise ValueError(
            f"{score.encoding} needs all {score.heads} heads in one process, got {given}: with "
            "tensor parallelism, heads would get the biases of other heads, or learned parameters "
            "would miss the gradients of other processes; use FSDP, or an encoding with one "
            "constant table for all heads (wavelet, rope)"
        )


def _sdpa_mask(
    query: Tensor, key: Tensor, mask: Tensor | None, offset: int | Tensor, window: int | None
) -> Tensor | None:
    """Return a mask (B|1, 1, m, n), or None if PyTorch's own causal rule is enough."""
    queries, keys = query.shape[2], key.shape[2]
    alone = queries == 1 and isinstance(offset, int) and offset == keys - 1
    first = isinstance(offset, int) and offset == 0  # a static cache has room behind the keys
    if mask is None and (alone or (first and queries > 1)) and (window is None or keys <= window):
        return None
    return masks.full_mask(mask, queries, keys, offset, query.device, window)


def _rotated(angles: CosSin | None, layout: Layout | None) -> Rotated | None:
    """Return how the queries were rotated."""
    if angles is None or layout is None:
        return None
    cos, sin = map(layout.narrow, angles)
    return Rotated(cos, sin, layout.interleaved)


def _layer(module: Any) -> LayerState:
    """Return the state of a layer; one without an encoding for a layer of a stock model.

    Raises
    ------
    ValueError
        The configuration names an encoding, and the layer has none.
    """
    layer: LayerState | None = getattr(module, "wavepe", None)
    if layer is not None:
        return layer
    if hasattr(module.config, "position_encoding"):
        raise ValueError(
            f"the configuration of this {type(module).__name__} names the position encoding "
            f"{spec_text(module.config.position_encoding)!r}, but the layer has none: "
            + (
                "build a stock model, and patch it"
                if isinstance(module.config, PatchedConfig)
                else "build the model with its Auto class, such as "
                "AutoModelForCausalLM.from_config(config)"
            )
        )
    return STOCK


def _cached_tokens(
    cache: Any, layer_idx: int, queries: int, kwargs: dict[str, Any]
) -> tuple[int | Tensor, int | Tensor]:
    """Return the number of tokens before the first query, and how many of them a window dropped.

    For a static cache the first number is a tensor () of its own: the cache goes on counting in
    its tensor while the layer runs.
    """
    cached = getattr(cache, "get_query_offset", cache.get_seq_length)(layer_idx)
    if SIZES_BY_LENGTH:
        _, first = cache.get_mask_sizes(queries, layer_idx)
    else:
        positions = kwargs.get("cache_position")
        if positions is None:
            positions = torch.arange(queries) + cached
        elif isinstance(cached, Tensor):  # its count leaves out keys that are 0
            cached = positions[0]
        _, first = cache.get_mask_sizes(positions, layer_idx)
    return cached.clone() if isinstance(cached, Tensor) else cached, first


def register() -> None:
    """Register the attention and its mask with transformers, and what its exporters need."""
    AttentionInterface.register(ATTENTION, attention_forward)
    AttentionMaskInterface.register(ATTENTION, masks.attention_mask)
    try:
        from transformers.exporters.utils import register_patch
    except ImportError:  # transformers < 5.24 has no exporters
        return
    for program in ("onnx", "openvino", "executorch"):  # they know no operators of ours
        register_patch(program, f"{_compiler.__name__}.STANDARD")(lambda _: True)
