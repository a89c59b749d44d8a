"""Absolute encodings: vectors that are added to the token embeddings."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..encodings import Encoding
from ..positions.absolute import AbsoluteVectors
from . import families
from .passes import Pass


class AddAbsolute(AbsoluteVectors):
    """The vectors of an encoding, added to the embeddings of a base model."""

    constant_cache_name = None  # see `RopeRotation`

    def __init__(self, encoding: Encoding, base: Any) -> None:
        config = base.config
        super().__init__(encoding, config.hidden_size, config.max_position_embeddings)
        # Some models multiply their embeddings, and so the vectors, by a factor.
        self.scale = families.embedding_scale(base)

    def name(self, position_ids: Tensor | None, length: int) -> str:
        """Name the vectors at these positions; without positions, those of `length` tokens."""
        if position_ids is not None and position_ids.numel():
            length = int(position_ids.max()) + 1
        return f"{self.encoding} of {self.length or length} tokens"

    def add(self, base: Any, pass_: Pass) -> None:
        """Add the vectors to the embeddings in the arguments of a base model."""
        kwargs = pass_.kwargs
        input_ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        if (input_ids is None) == (embeds is None):
            return  # the model raises the error
        kwargs |= families.inputs_by_layer(base, kwargs)
        if embeds is None:
            embeds = base.get_input_embeddings()(input_ids)
        if self.follows_length and pass_.packed:
            raise ValueError(
                f"{self.encoding} depends on the sequence length, and this row packs several "
                "sequences: give each sequence a row of its own"
            )
        if pass_.positions is not None:
            vectors = self(pass_.positions)
        elif (positions := pass_.positions_by_mask()) is not None:
            vectors = self(positions, below=pass_.mask.shape[1])
        elif isinstance(pass_.cached, Tensor):  # a static cache counts on the device
            vectors = self(pass_.counted_positions())
        else:
            vectors = self.of_range(pass_.cached, pass_.cached + embeds.shape[1], embeds.device)
        vectors = vectors / self.scale
        embeds = embeds + vectors.to(embeds.device, embeds.dtype)
        kwargs |= {"input_ids": None, "inputs_embeds": embeds}
