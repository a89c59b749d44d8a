"""The attention "wavepe": score = ((q + u).k + (q + v).p_delta) * scaling - slope * |delta|.

`wavepe.ops.attention` computes it, and holds no tensor of queries x keys; one is made only where
the caller asks for the weights or brings a mask that is added. A layer whose encoding leaves the
scores alone gets PyTorch's attention. Registered with transformers as an attention and as a mask of
the same name: without the mask transformers would hand over none, and padding would be seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from .. import ops
from . import compiled, masks
from .names import NAME
from .rotary import Rotary, Rotated
from .scores import RelativeScore, Score, Terms
from .tables import relative_rows, table_rows

FORWARD_ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask", "past_key_values")


@dataclass
class Layer:
    """What one attention layer holds, as its attribute `wavepe`.

    Attributes
    ----------
    score : Score, optional
        What the encoding puts into the scores.
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
    attention_mask : Tensor, optional
        As `masks.attention_mask` makes it, or one of the user's own (B|1, H|1, m, n): bool (True:
        attend) or float (added), which alone decides what is seen.

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
    _check_mask(attention_mask)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    offset = kwargs.get("wavepe_offset", key.shape[2] - query.shape[2])
    options: Options = {"offset": offset, "scaling": scaling, "dropout": dropout}
    added = attention_mask is not None and attention_mask.is_floating_point()
    if score is not None and not (weights_wanted or added):
        out = _fused(score, query, key, value, attention_mask, **options)
        return out.transpose(1, 2).contiguous(), None
    return _composed(
        module, score, query, key, value, attention_mask, weights_wanted=weights_wanted, **options
    )


class Options(TypedDict):
    """What `_fused` and `_composed` take alike."""

    offset: int | Tensor
    scaling: float
    dropout: float


def _check_mask(mask: Tensor | None) -> None:
    if mask is None or mask.is_floating_point() or mask.dtype == torch.bool:
        return
    if mask.ndim != 2:  # sequences, numbered
        raise TypeError(f"attention_mask must be bool or floating point, got {mask.dtype}")


def _fused(
    score: Score,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    offset: int | Tensor,
    scaling: float,
    dropout: float,
) -> Tensor:
    """Attention (B, H, m, d) by `wavepe.ops.attention`."""
    whole = mask is not None and mask.ndim == 4
    packed = mask is not None and mask.dtype != torch.bool
    options: dict[str, Any] = {
        "causal": not whole,
        "scale": scaling,
        "offset": offset,
        "key_mask": None if whole or packed else mask,
        "segments": mask if packed else None,
        "mask": mask if whole else None,
        "dropout_p": dropout,
    }
    if torch.compiler.is_compiling() and isinstance(score, RelativeScore):
        if query.device.type == "cpu":
            return compiled.attention(query, key, value, score.spec, **options)
        rows = relative_rows(score.spec, key.shape[2], query)
        terms = Terms(rows)
    else:
        terms = score.terms(query, key.shape[2])
    query, q_rel = _with_biases(query, terms)
    options |= {"p": terms.p, "first": terms.first, "beyond": terms.beyond, "q_rel": q_rel}
    out: Any = ops.attention(query, key, value, slopes=terms.slopes, **options)
    return out


def _with_biases(query: Tensor, terms: Terms) -> tuple[Tensor, Tensor | None]:
    """q + u for the keys and q + v for the table; the latter None where both are q."""
    if terms.biases is None:
        return query, None
    u, v = terms.biases
    return query + u[:, None], query + v[:, None]


def _composed(
    module: nn.Module,
    score: Score | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    offset: int | Tensor,
    scaling: float,
    dropout: float,
    weights_wanted: bool,
) -> tuple[Tensor, Tensor | None]:
    """`attention_forward` by PyTorch, with a tensor of all scores."""
    queries, keys = query.shape[2], key.shape[2]
    if score is None and mask is None:  # a layer without a score is not told its offset
        offset = 0 if queries > 1 else keys - 1
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    bias: Tensor | None = None
    if score is not None:
        wide = query.to(dtype)
        terms = _terms(score, wide, keys)
        wide, q_rel = _with_biases(wide, terms)
        query, q_rel = wide.to(query.dtype), wide if q_rel is None else q_rel
        bias = _bias(terms, q_rel * scaling, keys, offset)
    if mask is None or not mask.is_floating_point():
        mask = masks.visible(mask, queries, keys, offset, query.device)
    mask = _additive(bias, mask, dtype)
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


def _terms(score: Score, query: Tensor, keys: int) -> Terms:
    """The terms of a score, a constant table as a tensor."""
    if isinstance(score, RelativeScore) and torch.compiler.is_compiling():
        return Terms(relative_rows(score.spec, keys, query))
    terms = score.terms(query, keys)
    if isinstance(terms.p, ops.RelativeTable):
        p, first, beyond = table_rows(terms.p, query.dtype, query.device)
        return terms._replace(p=p, first=first, beyond=beyond)
    return terms


def _bias(terms: Terms, q_rel: Tensor, keys: int, offset: int | Tensor) -> Tensor:
    """What is added to the scaled q.k, (B, H, m, n) or (H, m, n); q_rel is scaled."""
    queries = q_rel.shape[2]
    column = torch.arange(keys, device=q_rel.device)
    bias = q_rel.new_zeros(())
    if terms.p is not None:
        p: Any = terms.p
        bias = ops.relative_bias(q_rel, p, keys, first=terms.first, beyond=terms.beyond)
        if isinstance(offset, Tensor) or offset != keys - queries:
            # The operator lets the last query stand on the last key. With a static cache keys reach
            # beyond it; columns that have no source there are in the future, which is hidden.
            source = column + (keys - queries - offset)
            bias = bias.index_select(-1, source.clamp(max=keys - 1))
    if terms.slopes is not None:
        delta = torch.arange(queries, device=q_rel.device)[:, None] + offset - column
        bias = bias - terms.slopes[:, None, None] * delta.abs()
    return bias


def _additive(bias: Tensor | None, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The encoding's scores and the mask in one tensor of float32 (float64 for float64)."""
    if mask.is_floating_point():
        return mask.to(dtype) if bias is None else bias + mask.to(dtype)
    # The finite minimum keeps rows that see nothing (padding) finite. It is not added to the
    # bias: the sum of two negative numbers could be infinite.
    lowest = torch.finfo(dtype).min
    bias = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias
    return torch.where(mask, bias, lowest)


def _cached_tokens(cache: Any, layer_idx: int) -> int | Tensor:
    """Number of tokens before the first query; a tensor of no dimensions for a static cache."""
    read = getattr(cache, "get_query_offset", cache.get_seq_length)
    seen = read(layer_idx)
    # A static cache counts on in the same tensor while the layer runs.
    return seen.clone() if isinstance(seen, Tensor) else seen


def register() -> None:
    """Make the attention known to transformers; the mask belongs to it."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, masks.attention_mask)
