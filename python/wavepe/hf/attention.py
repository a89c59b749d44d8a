"""The attention "wavepe": score = ((q + u).k + (q + v).p_delta) * scaling - slope * |delta|.

A family with a softcap c applies c * tanh(score / c) after that. `wavepe.ops.attention` computes
every layer without a tensor of queries x keys, with two exceptions. Weights that the caller wants
and masks that are added to the scores need one. And where the device has no kernel, PyTorch's
attention serves layers whose encoding leaves the scores alone.

transformers knows this function as the attention "wavepe", and `masks.attention_mask` as its mask.
Without one it would pass no mask, and queries would see padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .. import ops
from ..encodings import encoding
from ..ops import _compiler
from ..ops._attention_composed import attention_with_weights
from ..ops._common import wide
from ..positions import Requests, Scores, Terms, TokenIndices, left_by
from . import families, inkling, masks, replaced_code, t5
from .families import ATTENTION
from .layer_hooks import STOCK, LayerState
from .layers import spec_text
from .passes import PASS, Pass

# The layer, q, k, v, the mask, the family's window, and options of `ops.attention`.
Call = tuple[Any, Tensor, Tensor, Tensor, Tensor | None, int | None, dict[str, Any]]

NO_ENCODING = Scores(encoding("none"), head_dim=1, heads=1, causal=True)

# Tensors that transformers passes to every attention function and that do not change the scores.
IGNORED = (
    "position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "token_type_ids", "logits_indices", "logits_processor_args",
    "num_items_in_batch", "shift_labels",  # for the loss
    "mm_token_type_ids",  # the mask holds their effect
    "seq_idx",  # packed sequences again, for Mamba layers
)  # fmt: skip
# Arguments that need no look at their values in each layer.
HARMLESS = frozenset((*IGNORED, PASS, "use_cache", "is_causal", "output_attentions"))


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
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the layer's encoding; transformers calls this function.

    Shapes: query (B, H, m, d), key and value (B, Hk, n, d). `attention_mask` is one of
    `masks.attention_mask`, or the user's own (B|1, H|1, m, n), bool or added to the scores, which
    alone decides which keys a query sees. `s_aux` (H,) scores the attention sinks, which have no
    value, and `sinks` (B, H, m, 1) those of each query (Inkling 2). `position_bias` (B, H, m, rank)
    is a patched Inkling's queries of its table (inkling.py), or the row of a patched T5 (t5.py).
    Returns the output (B, m, H, d), and weights (B, H, m, n) if `output_attentions` asks for them.
    """
    layer: LayerState | None = getattr(module, "wavepe", None)
    pass_: Pass | None = kwargs.get(PASS)
    of_t5: dict[str, Any] = {}
    if layer is None and type(module).__name__ == inkling.BLOCKS:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling)
    if layer is None:
        layer, sliding_window = _stock_layer(module), None  # a mask of the model has the window
        if t5.OFFSET in kwargs:
            of_t5 = t5.take_arguments(kwargs, position_bias, query)
        else:
            unread = {"position_bias": position_bias, "sinks": sinks}
            kwargs |= {name: x for name, x in unread.items() if x is not None}
        _check_packed(kwargs, attention_mask)
    elif pass_ is None or not pass_.waiting:
        raise replaced_code.replaced(f"what calls this {type(module).__name__}", module.config)
    else:
        pass_.waiting = False
    if not kwargs.keys() <= HARMLESS:
        _check_known(kwargs)
    if attention_mask is not None and attention_mask.shape[-1] == 0:  # of `masks.nothing_hidden`
        attention_mask = attention_mask if attention_mask.dtype == masks.BOTH_WAYS else None
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        attention_mask = _seen_both_ways(layer, query, key, attention_mask, sliding_window)
    score, weights = layer.score, kwargs.get("output_attentions")
    offset: Any = None
    if pass_ is not None:
        offset, weights = pass_.offset, weights or pass_.weights
        if pass_.paged is not None:
            ends = pass_.sequence_ends, kwargs["cu_seq_lens_k"]
            pass_.requests = Requests.of(*ends, pass_.requests)
        if layer.counts and pass_.cache is not None and not pass_.compiling:
            cached: Any = pass_.cached if offset is None else offset
            count, visible = key.shape[2] - query.shape[2], (sliding_window or 1 << 62) - 1
            if isinstance(cached, int) and count < min(cached, visible):
                raise _lost_keys(layer, module, count, pass_.cached)
    elif weights is None:
        weights = module.config.output_attentions
    learned: Terms = {}
    if score is not None and query.shape[1] != score.heads:
        _check_split(score, query.shape[1])
    if layer.learns and pass_ is not None:
        key, learned = _learned(module, layer, pass_, query, key, position_bias)
    options: dict[str, Any] = {
        "offset": key.shape[2] - query.shape[2] if offset is None else offset,
        "scale": scaling, "dropout_p": dropout, "softcap": softcap, "sinks": s_aux, **of_t5,
    }  # fmt: skip
    if sinks is not None:
        options["token_sinks"], score = sinks[..., 0], NO_ENCODING if score is None else score
    call = module, query, key, value, attention_mask, sliding_window, options
    if pass_ is not None and pass_.requests is not None:
        options |= {"offset": None, "requests": pass_.requests}
        score, weights = NO_ENCODING if score is None else score, None
    if weights or (attention_mask is not None and attention_mask.is_floating_point()):
        out, seen = _with_weights(call, score, learned, pass_)
        return out.transpose(1, 2).contiguous(), seen if weights else None
    plain = score is None and softcap is s_aux is None and "bias" not in of_t5
    if plain and query.device.type not in families.FUSED_ON:
        return _by_pytorch(call)
    out = _by_kernel(call, score, learned, pass_)
    return out.transpose(1, 2).contiguous(), None


def _by_kernel(call: Call, score: Scores | None, learned: Terms, pass_: Pass | None) -> Any:
    """Return the attention (B, H, m, d) of `ops.attention`."""
    module, q, k, v, mask, window, options = call
    if mask is not None:
        parts = masks.mask_parts(mask) if pass_ is None else pass_.mask_parts(mask)
        if parts.segments is not None and parts.segments.shape[1] < k.shape[2]:
            # A static cache has unused room behind the packed sequences.
            k, v = (x[:, :, : parts.segments.shape[1]] for x in (k, v))
        if not parts.causal:  # a user's own mask alone decides, but for the encoding's window
            window = None
        options |= parts._asdict()
    options["window"] = window
    if score is None or pass_ is None:
        if options["sinks"] is not None:
            options["sinks"] = options["sinks"].to(q.device, wide(q))
        return ops.attention(q, k, v.to(q.dtype), **options)
    if mask is not None and not options["causal"]:
        _check_counts_no_hidden(score, module)
    if score.reads_positions:
        options["positions"] = pass_.counted_positions()
    return score.attend(q, k, v, learned, pass_.rotated, training=module.training, **options)


def _with_weights(
    call: Call, score: Scores | None, learned: Terms, pass_: Pass | None
) -> tuple[Tensor, Tensor]:
    """Return the attention (B, H, m, d) and its weights (B, H, m, n)."""
    module, q, k, v, mask, window, options = call
    score = NO_ENCODING if score is None else score
    parts, offset = masks.mask_parts(mask), options["offset"]
    if parts.mask is not None:
        _check_counts_no_hidden(score, module)
    if score.extended is not None and not module.training:
        raise ValueError(
            "self_extend makes two calls of attention and takes no output_attentions=True"
        )
    positions = rotated = None
    if pass_ is not None:
        positions = pass_.counted_positions() if score.reads_positions else None
        rotated = pass_.rotated
    indices = TokenIndices(offset, positions, parts.key_mask)
    token_sinks = score.token_sinks(learned, options.pop("token_sinks", None))
    sinks, scale = options["sinks"], options["scale"]
    kernel_args = score.arguments(q, k, learned, rotated, scale, indices, sinks)
    kernel_args["window"] = score.window(None)
    mask = masks.full_mask(mask, q, k, offset, window)
    out, weights, lse = attention_with_weights(v=v, mask=mask, **{**options, **kernel_args})
    if token_sinks is not None:
        left = left_by(token_sinks, lse)
        out, weights = out * left, weights * left
    return out.to(q.dtype), weights.to(q.dtype)


def _by_pytorch(call: Call) -> tuple[Tensor, None]:
    """Return the attention (B, m, H, d) of a layer whose encoding leaves the scores alone."""
    module, q, k, v, mask, window, options = call
    queries, keys, offset = q.shape[2], k.shape[2], options["offset"]
    alone = queries == 1 and isinstance(offset, int) and offset == keys - 1
    first = isinstance(offset, int) and offset == 0  # a static cache has room behind the keys
    near = window is None or keys <= window
    causal = mask is None
    if not (mask is None and near and (alone or (first and queries > 1))):
        # PyTorch's own causal rule is not enough.
        mask = masks.full_mask(mask, q, k, offset, window)
    dropout, scale = options["dropout_p"], options["scale"]
    rest = {"dropout": dropout, "scaling": scale, "is_causal": causal}
    return sdpa_attention_forward(module, q, k, v, mask, **rest)


def _learned(
    module: Any, layer: LayerState, pass_: Pass, q: Tensor, k: Tensor, position_bias: Tensor | None
) -> tuple[Tensor, Terms]:
    """Return the keys, with their decay, and what the encoding of a layer has learned."""
    score: Any = layer.score
    terms = pass_.learned
    if terms is None:
        keys = k.shape[2] if pass_.requests is None else pass_.requests.longest
        terms = layer.learned(module, keys, pass_, pass_.hidden)
    pass_.learned = pass_.hidden = None
    if position_bias is not None and position_bias.shape[-1]:
        terms = {**terms, inkling.OWN: inkling.own_terms(module, position_bias)}
    if score.has_decay and k.shape[-1] == q.shape[-1]:  # there is no cache
        # Layers that reuse keys take their decay, too, as they do from a cache.
        if families.stores_keys(module):
            pass_.reused[module.layer_type] = terms
        reuses = families.reuses_keys(module)
        k = score.with_decay(k, pass_.reused.get(module.layer_type, terms) if reuses else terms)
    return k, terms


def _lost_keys(layer: LayerState, module: Any, count: int, cached: Any) -> ValueError:
    """Return the error for a layer whose cache does not hold the keys of all tokens."""
    score: Any = layer.score
    return ValueError(
        f"{score.encoding} measures distances in tokens, and layer {module.layer_idx} has {count} "
        f"keys of the {int(cached)} cached tokens: keys were taken out of the cache, or a program "
        "filled it by hand; start from an empty cache, or pass use_cache=False"
    )


def _check_known(kwargs: dict[str, Any]) -> None:
    """Raise ValueError for arguments that would change the scores, such as biases."""
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and name not in IGNORED:
            raise ValueError(
                f"the attention 'wavepe' got the argument {name!r}, which it does not know: if it "
                "is a column of your data, take it out of the batch; if this model passes it, the "
                "model needs another attn_implementation"
            )


def _check_packed(kwargs: dict[str, Any], mask: Tensor | None) -> None:
    """Raise ValueError if a stock model would not see packed sequences."""
    ends = kwargs.get("cu_seq_lens_q")
    if ends is not None and ends.numel() > 2 and (mask is None or not mask.shape[-1]):
        raise ValueError(
            "got packed sequences by cu_seq_lens_q alone: give position_ids that start again in "
            "each sequence, or call wavepe.hf.patch(model), which reads cu_seq_lens_q"
        )


def _seen_both_ways(
    layer: LayerState, q: Tensor, k: Tensor, mask: Tensor | None, window: int | None
) -> Tensor | None:
    """Return the mask of a layer that is not causal; ValueError for what only causal ones take."""
    if layer.score is not None:
        raise ValueError(f"{layer.score.encoding} needs causal attention, got is_causal=False")
    queries, keys = q.shape[2], k.shape[2]
    if queries == 1 or (mask is not None and mask.dtype not in (masks.KEY_MASK, masks.SEGMENTS)):
        return mask  # a mask of queries x keys decides alone
    if mask is None and queries == keys and (window is None or keys <= window):
        return q.new_ones(1, dtype=torch.bool).expand(1, 1, queries, keys)
    # The stock model would be causal here, or see other sequences.
    raise ValueError(
        "a layer with is_causal=False takes no padding, packed sequences, windows or chunks of a "
        "prompt: set config.is_causal=False instead, or give a mask of queries x keys"
    )


def _check_counts_no_hidden(score: Scores, module: Any) -> None:
    """Raise ValueError if an encoding would count tokens that a mask of queries x keys hides."""
    if score.has_decay or (score.extended is not None and not module.training):
        raise ValueError(
            f"{score.encoding} counts the tokens between query and key, so it takes no mask of "
            "queries x keys: give a mask of tokens, (batch, tokens)"
        )


def _check_split(score: Scores, heads: int) -> None:
    """Raise ValueError if tensor parallelism has split heads whose encodings differ."""
    if score.encoding.learns or {*score.encoding.terms} - {"table"}:
        raise ValueError(
            f"{score.encoding} needs all {score.heads} heads in one process, got {heads}: with "
            "tensor parallelism, heads would get the biases of other heads, or learned parameters "
            "would miss the gradients of other processes; use FSDP, or a constant encoding "
            "that is the same for all heads (wavelet, rope, xpos)"
        )


def _stock_layer(module: Any) -> LayerState:
    """Return the state of a stock layer; ValueError if its model should have an encoding."""
    if hasattr(module.config, "position_encoding"):
        raise ValueError(
            f"the configuration of this {type(module).__name__} names the position encoding "
            f"{spec_text(module.config.position_encoding)!r}, but the layer has none: build it "
            "by its Auto class, as AutoModelForCausalLM.from_config(config), or patch a stock model"
        )
    return STOCK


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
