"""Modules that take the place of a Llama's rotary embedding."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from .. import ops
from ..encodings import Encoding
from .names import NAME

# Rope types of transformers whose frequencies change with the sequence length.
LIVE_ROPE_TYPES = ("dynamic", "longrope")
CACHE_TAG = "_wavepe_inv_freq"


class Rotary(nn.Module):
    """Base: guards the model, keeps the stock module for the way back.

    It runs once per forward pass of the model, whatever the encoding, so it is the place to see
    that the model still is what it was made to be. The stock module is a child, so that it moves
    with the model; it has no entries in the state dict.
    """

    def __init__(self, stock: nn.Module, config: PretrainedConfig) -> None:
        super().__init__()
        self.stock = stock
        self.config = config
        self.spec = config.position_encoding
        self.train(stock.training)  # a model that is patched may be in either mode

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (1|B, q, head_dim) in x's dtype, each half of the last axis the pairs."""
        if self.config._attn_implementation != NAME:
            raise ValueError(
                f"this model has the position encoding {self.spec!r}, which needs "
                f"attn_implementation={NAME!r}, got {self.config._attn_implementation!r}: "
                f"call model.set_attn_implementation({NAME!r}), or wavepe.hf.unpatch(model) first"
            )
        if self.config.position_encoding != self.spec:
            raise ValueError(
                f"config.position_encoding was changed from {self.spec!r} to "
                f"{self.config.position_encoding!r} on a live model, which has no effect: "
                "give it to from_pretrained, or patch a stock Llama with it"
            )
        return self.angles(x, position_ids)

    def angles(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of this encoding."""
        raise NotImplementedError


class Unrotated(Rotary):
    """The rotation by nothing, for all encodings that are not rotary."""

    def __init__(self, stock: nn.Module, config: PretrainedConfig) -> None:
        super().__init__(stock, config)
        self.head_dim = config.head_dim

    def angles(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        shape = (1, x.shape[1], self.head_dim)
        return x.new_ones(()).expand(shape), x.new_zeros(()).expand(shape)


class Rotated(Rotary):
    """RoPE with the encoding's frequencies, and exact angles at any position [R]."""

    def __init__(self, stock: nn.Module, config: PretrainedConfig, encoding: Encoding) -> None:
        super().__init__(stock, config)
        if encoding.interleaved:
            raise ValueError(
                f"{encoding}: a Llama rotates the pairs (i, i + d/2); interleaved=true is for "
                "models with the pairs (2i, 2i+1)"
            )
        self.encoding = encoding
        self.head_dim = config.head_dim
        self.trained_length = config.max_position_embeddings
        self.trained = self._frequencies(self.trained_length, training=True)
        self.inferred = self._frequencies(self.trained_length)
        longer, _ = self._frequencies(2 * self.trained_length)
        self.follows_length = not torch.equal(longer, self.inferred[0])
        # Then a cache may hold keys of another rotation.
        self.changes = self.follows_length or not torch.equal(self.trained[0], self.inferred[0])

    def _frequencies(self, length: int, training: bool = False) -> tuple[Tensor, float]:
        inv_freq, factor = self.encoding.frequencies(
            self.head_dim, length=length, trained_length=self.trained_length, training=training
        )
        return torch.from_numpy(np.asarray(inv_freq, dtype=np.float64)), float(factor)

    def frequencies(self, position_ids: Tensor) -> tuple[Tensor, float]:
        """Angle per position of each pair, and the factor on cos and sin, for these positions.

        Where the base follows the length, it is that of the longest row of the batch.
        """
        if self.training:
            return self.trained
        if not self.follows_length:
            return self.inferred
        return self._frequencies(int(position_ids.max()) + 1)

    def angles(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq, factor = self.frequencies(position_ids)
        return _table(x, position_ids, inv_freq, factor)

    def check_cache(self, cache: Any, seen: int | Tensor, position_ids: Tensor) -> None:
        """Refuse a cache whose keys were rotated with other frequencies, and mark it.

        Raises
        ------
        ValueError
            The base has changed since the cache was filled, or another model filled it.
        """
        inv_freq, _ = self.frequencies(position_ids)
        rotated_with = getattr(cache, CACHE_TAG, None)
        same = rotated_with is inv_freq or (
            rotated_with is not None and torch.equal(rotated_with, inv_freq)
        )
        if not same and seen > 0:
            raise ValueError(
                f"{self.encoding}: {int(seen)} cached keys were rotated with another base than "
                f"this call needs (length {int(position_ids.max()) + 1}, trained length "
                f"{self.trained_length}, training mode {self.training}): pass use_cache=False"
            )
        setattr(cache, CACHE_TAG, inv_freq)


class ScaledStock(Rotary):
    """RoPE with the frequencies of the stock module, for a model with a scaled rope type."""

    def angles(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.stock.rope_type in LIVE_ROPE_TYPES:
            self.stock(x, position_ids)  # brings inv_freq and the factor up to date
        return _table(x, position_ids, self.stock.inv_freq, self.stock.attention_scaling)


def rotation(encoding: Encoding, config: PretrainedConfig, stock: nn.Module) -> Rotary:
    """The module for an encoding; one without a base of its own takes the model's.

    Raises
    ------
    ValueError
        Options that need a base, on a model with a scaled rope type.
    """
    if encoding.entry != "rotary":
        return Unrotated(stock, config)
    if encoding.theta is not None:
        return Rotated(stock, config, encoding)
    parameters = config.rope_parameters
    if parameters["rope_type"] == "default":
        base = float(parameters["rope_theta"])
        return Rotated(stock, config, dataclasses.replace(encoding, theta=base))
    if encoding.options():
        raise ValueError(
            f"{encoding} needs theta= on a model with rope_type {parameters['rope_type']!r}: "
            "only a bare 'rope' takes over its scaling"
        )
    return ScaledStock(stock, config)


def _table(
    x: Tensor, position_ids: Tensor, inv_freq: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    inv_freq = inv_freq.to(x.device, torch.float64)
    cos, sin = ops.rope_table(position_ids, inv_freq, attention_factor=factor, dtype=dtype)
    return torch.cat((cos, cos), dim=-1).to(x.dtype), torch.cat((sin, sin), dim=-1).to(x.dtype)
