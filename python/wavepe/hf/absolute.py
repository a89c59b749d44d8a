"""Absolute encodings: vectors that a hook adds to the token embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..encodings import Encoding
from ..positions.absolute import AbsoluteVectors
from . import families
from .masks import is_packed


class AddAbsolute:
    """Forward pre-hook of a base model that adds the vectors of an absolute encoding.

    The positions are `position_ids` where the caller gives them. Otherwise, with a 2-D attention
    mask over cache and input, the position of a token is the number of attended tokens before it.
    Without both, the positions are cache length + 0..q-1.

    Some families multiply their embeddings by a factor. The hook divides the vectors by this
    factor, so that the first layer gets them unscaled.
    """

    steady_name = None  # see `RopeRotation`

    def __init__(self, encoding: Encoding, base: Any) -> None:
        config = base.config
        self.encoding = encoding
        self.vectors = AbsoluteVectors(encoding, config.hidden_size, config.max_position_embeddings)
        self.names = families.argument_names(base)
        self.scale = families.embedding_scale(base)

    @property
    def follows_length(self) -> bool:
        return self.vectors.follows_length

    def name(self, position_ids: Tensor | None, length: int) -> str:
        """Name the vectors at these positions; without positions, those of `length` tokens."""
        if position_ids is not None and position_ids.numel():
            length = int(position_ids.max()) + 1
        return f"{self.encoding} of {self.vectors.length or length} tokens"

    def fix(self, length: int | None) -> None:
        self.vectors.fix(length)

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        kwargs = dict(zip(self.names, args, strict=False)) | kwargs
        input_ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        if (input_ids is None) == (embeds is None):
            return None  # the model raises the error
        if embeds is None:
            embeds = module.get_input_embeddings()(input_ids)
        cache = families.cache_in(kwargs)
        cached = 0 if cache is None else cache.get_seq_length()
        if self.vectors.follows_length and is_packed(kwargs.get("attention_mask")):
            raise ValueError(
                f"{self.encoding} depends on the sequence length, and this row packs several "
                "sequences: give each sequence a row of its own"
            )
        vectors = self._vectors_of(kwargs, embeds, cached) / self.scale
        embeds = embeds + vectors.to(embeds.device, embeds.dtype)
        return (), kwargs | {"input_ids": None, "inputs_embeds": embeds}

    def _vectors_of(self, kwargs: dict[str, Any], embeds: Tensor, cached: int | Tensor) -> Tensor:
        """Return the vectors (1|B, q, dim) for the tokens of this call."""
        if kwargs.get("position_ids") is not None:
            return self.vectors(kwargs["position_ids"])
        queries, mask = embeds.shape[1], kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 2 and mask.shape[1] == cached + queries:
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -queries:]
            return self.vectors(positions, below=mask.shape[1])
        if isinstance(cached, Tensor):  # a static cache counts on the device
            return self.vectors(torch.arange(queries, device=embeds.device)[None] + cached)
        return self.vectors.of_range(cached, cached + queries, embeds.device)
