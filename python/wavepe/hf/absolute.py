"""Absolute encodings: vectors added to the token embeddings on their way into the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..encodings import Encoding
from ..nn._absolute import AbsoluteVectors

FORWARD_ARGUMENTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "inputs_embeds",
    "use_cache",
)


class AddAbsolute:
    """Forward pre-hook of a LlamaModel, for an encoding with the entry point "absolute".

    Positions are `position_ids` where given; else, with a 2-D attention mask over cache and input,
    the number of attended tokens before each; else cache length + 0..q-1.
    """

    def __init__(self, encoding: Encoding, config: PretrainedConfig) -> None:
        self.encoding = encoding
        self.vectors = AbsoluteVectors(encoding, config.hidden_size, config.max_position_embeddings)

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        kwargs = dict(zip(FORWARD_ARGUMENTS, args, strict=False)) | kwargs
        input_ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        if (input_ids is None) == (embeds is None):
            return None  # the model says what is wrong
        if embeds is None:
            embeds = module.embed_tokens(input_ids)
        cache = kwargs.get("past_key_values")
        seen = 0 if cache is None else cache.get_seq_length()
        if self.vectors.follows_length and seen > 0:
            raise ValueError(
                f"{self.encoding} depends on the length of the sequence: {int(seen)} cached "
                "tokens were encoded for another one; pass use_cache=False"
            )
        positions = _positions(kwargs, embeds, seen)
        vectors = self.vectors(positions).to(embeds.device, embeds.dtype)
        return (), kwargs | {"input_ids": None, "inputs_embeds": embeds + vectors}


def _positions(kwargs: dict[str, Any], embeds: Tensor, seen: int | Tensor) -> Tensor:
    """Positions (1|B, q) of the tokens of this call."""
    if kwargs.get("position_ids") is not None:
        return kwargs["position_ids"]
    queries, mask = embeds.shape[1], kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2 and mask.shape[1] == seen + queries:
        return (mask.long().cumsum(1) - 1).clamp(min=0)[:, -queries:]
    return torch.arange(queries, device=embeds.device)[None] + seen
