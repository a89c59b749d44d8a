"""Absolute encodings: vectors that are added to the token embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..encodings import Encoding
from ..positions.absolute import AbsoluteVectors
from ..positions.tokens import token_positions
from . import families
from .call import Call
from .masks import is_packed


class AddAbsolute(AbsoluteVectors):
    """The vectors of an encoding, added to the embeddings of a base model.

    The positions are `position_ids` where the caller gives them. Otherwise, with a 2-D attention
    mask over cache and input, the position of a token is the number of attended tokens before it.
    Without both, the positions are cache length + 0..q-1.

    Some families multiply their embeddings by a factor. The vectors are divided by this factor, so
    that the first layer gets them unscaled.
    """

    steady_name = None  # see `RopeRotation`

    def __init__(self, encoding: Encoding, base: Any) -> None:
        config = base.config
        super().__init__(encoding, config.hidden_size, config.max_position_embeddings)
        self.scale = families.embedding_scale(base)

    def name(self, position_ids: Tensor | None, length: int) -> str:
        """Name the vectors at these positions; without positions, those of `length` tokens."""
        if position_ids is not None and position_ids.numel():
            length = int(position_ids.max()) + 1
        return f"{self.encoding} of {self.length or length} tokens"

    def add(self, call: Call) -> None:
        """Add the vectors to the embeddings in the arguments of a base model."""
        kwargs = call.kwargs
        input_ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        if (input_ids is None) == (embeds is None):
            return  # the model raises the error
        kwargs |= families.inputs_by_layer(call.module, kwargs)
        if embeds is None:
            embeds = call.module.get_input_embeddings()(input_ids)
        cached = 0 if call.cache is None else call.cache.get_seq_length()
        if self.follows_length and is_packed(kwargs.get("attention_mask")):
            raise ValueError(
                f"{self.encoding} depends on the sequence length, and this row packs several "
                "sequences: give each sequence a row of its own"
            )
        vectors = self._vectors_of(kwargs, embeds, cached) / self.scale
        embeds = embeds + vectors.to(embeds.device, embeds.dtype)
        kwargs |= {"input_ids": None, "inputs_embeds": embeds}

    def _vectors_of(self, kwargs: dict[str, Any], embeds: Tensor, cached: int | Tensor) -> Tensor:
        """Return the vectors (1|B, q, dim) for the tokens of this call."""
        if kwargs.get("position_ids") is not None:
            return self(kwargs["position_ids"])
        queries: int = embeds.shape[1]
        mask: Any = kwargs.get("attention_mask")
        if (positions := by_mask(mask, queries, cached)) is not None:
            return self(positions, below=mask.shape[1])
        if isinstance(cached, Tensor):  # a static cache counts on the device
            return self(torch.arange(queries, device=embeds.device)[None] + cached)
        return self.of_range(cached, cached + queries, embeds.device)


def add_absolute_positions(call: Call) -> None:
    """Let a mask say the positions in a call without position_ids."""
    tokens, kwargs = call.tokens, call.kwargs
    if tokens is None or tokens.ndim < 2 or kwargs.get("position_ids") is not None:
        return
    cached = 0 if call.cache is None else call.cache.get_seq_length()
    kwargs["position_ids"] = by_mask(kwargs.get("attention_mask"), tokens.shape[1], cached)


def by_mask(mask: Any, queries: int, cached: int | Tensor) -> Tensor | None:
    """Return the positions (B, q) of the last tokens, where a mask (B, cached + q) counts them."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != cached + queries:
        return None
    return token_positions(mask)[:, -queries:]
