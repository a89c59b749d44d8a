"""Modules that take the place of a model's rotary embedding."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from .. import ops
from .._rope_frequencies import standard_parameters
from ..encodings import Encoding, RoPE
from ..ops._common import wide
from ..positions.rotation import LONG, SHORT, Rotation
from . import families, rope_config
from .cache_guard import named
from .families import NAME
from .layers import StoredSpec, text
from .rope_config import Slot

ALL = "all"


class Angles(NamedTuple):
    """cos and sin (1|B, q, rotated dims), each half of the last axis the pairs.

    A type of its own shows an attention layer that they come from here.
    """

    cos: Tensor
    sin: Tensor


class Rotary(nn.Module):
    """In the place of a rotary module: guards the model, keeps the stock module for the way back.

    It runs once per forward pass of the model, whatever the encoding, so it is the place to see
    that the model still is what it was made to be. The stock module is a child, so that it moves
    with the model; it has no entries in the state dict.

    Attributes
    ----------
    rotations : ModuleDict of ModuleList
        By layer type (`ALL` where the family has one for all), the different rotations of the
        layers. Where there are several, each layer picks its own from what `forward` returns.
    """

    def __init__(self, stock: nn.Module, config: PretrainedConfig) -> None:
        super().__init__()
        self.stock = stock
        self.config = config
        self.spec: StoredSpec = config.position_encoding
        self.rotations = nn.ModuleDict()

    def add(self, slot: Slot, rotation: nn.Module) -> None:
        """Add another rotation for layers of this slot."""
        key = slot.layer_type or ALL
        if key not in self.rotations:
            self.rotations[key] = nn.ModuleList()
        cast(nn.ModuleList, self.rotations[key]).append(rotation)
        self.train(self.stock.training)  # a model that is patched may be in either mode

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return `Angles` in x's dtype, or a tuple of them where the layers differ."""
        if self.config._attn_implementation != NAME:
            raise ValueError(
                f"this model has the position encoding {text(self.spec)!r}, which needs "
                f"attn_implementation={NAME!r}, got {self.config._attn_implementation!r}: "
                f"call model.set_attn_implementation({NAME!r}), or wavepe.hf.unpatch(model) first"
            )
        if self.config.position_encoding != self.spec:
            raise ValueError(
                f"config.position_encoding was changed from {text(self.spec)!r} to "
                f"{text(self.config.position_encoding)!r} on a live model, which has no effect: "
                "give it to from_pretrained, or patch a stock model with it"
            )
        rotations = cast(nn.ModuleList, self.rotations[layer_type or ALL])
        found = [rotation(x, position_ids) for rotation in rotations]
        return found[0] if len(found) == 1 else tuple(found)


class StockRotation(nn.Module):
    """The family's own rotation, for layers that a hybrid does not name."""

    stock: Any

    def __init__(self, stock: nn.Module, slot: Slot) -> None:
        super().__init__()
        self.__dict__["stock"] = stock  # a child of `Rotary`, not of this one too
        self.slot = slot

    def forward(self, x: Tensor, position_ids: Tensor) -> Angles:
        if self.slot.layer_type is None:
            return Angles(*self.stock(x, position_ids))
        return Angles(*self.stock(x, position_ids, self.slot.layer_type))


class IdentityRotation(nn.Module):
    """The rotation by nothing, for all encodings that are not rotary."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor, position_ids: Tensor) -> Angles:
        shape = (1, x.shape[1], self.dims)
        return Angles(x.new_ones(()).expand(shape), x.new_zeros(()).expand(shape))


class RopeRotation(nn.Module):
    """RoPE with the encoding's frequencies, and exact angles at any position [R].

    Frequencies that follow the length are those of the longest row of the batch, whatever was
    computed before. An encoding without a base of its own takes the model's.
    """

    def __init__(self, config: PretrainedConfig, slot: Slot, dims: int, encoding: Encoding) -> None:
        super().__init__()
        rope = cast(RoPE, encoding)  # as `register_encoding` asks of a user's own
        if rope.interleaved:
            raise ValueError(
                f"{encoding}: a {type(config).__name__.removesuffix('Config')} rotates the pairs "
                "(i, i + d/2); interleaved=true is for models with the pairs (2i, 2i+1)"
            )
        self.config, self.slot = config, slot
        self.encoding = _with_base(rope, config, slot) if rope.theta is None else rope
        self.dims = dims
        self.rotation = Rotation(self.encoding, dims, config.max_position_embeddings)
        pairs = self.rotation.pairs
        if 2 * pairs != dims:
            raise ValueError(
                f"{self.encoding} rotates {2 * pairs} of {dims} dims, and the "
                "pairs (i, i + d/2) of this model need them all: fraction or type=proportional "
                "leaves pairs of the whole head alone"
            )
        # By which a cache is marked; None where the frequencies follow the length or the mode.
        self.steady_name: str | None = None
        if not self.rotation.changes:
            self.steady_name = self._name(str(self.encoding), None, 1)

    def name(self, position_ids: Tensor | None, length: int) -> str:
        """Name the rotation at these positions, or without them of a sequence of `length`."""
        label = f"{self.encoding} as the length or the mode asks"
        return self.steady_name or self._name(label, position_ids, length)

    @property
    def follows_length(self) -> bool:
        return self.rotation.follows_length

    def fix(self, length: int | None) -> None:
        self.rotation.fix(length)

    def _name(self, label: str, position_ids: Tensor | None, length: int) -> str:
        found = self.rotation.needed(length, position_ids, self.training)
        return named(label, found.array.tobytes(), repr(found.factor).encode())

    def forward(self, x: Tensor, position_ids: Tensor) -> Angles:
        if self.config.max_position_embeddings != self.rotation.trained_length:
            self._check_trained_length(self.config.max_position_embeddings)
        found = self.rotation.needed(1, position_ids, self.training)
        cos, sin = ops.rope_table(
            position_ids, found.on(x), attention_factor=found.factor, dtype=wide(x)
        )
        return Angles(*(torch.cat((half, half), dim=-1).to(x.dtype) for half in (cos, sin)))

    @torch.compiler.assume_constant_result
    def _check_trained_length(self, changed: int) -> None:
        """Raise ValueError where a model of this trained length would rotate otherwise."""
        before, after = self.rotation, Rotation(self.encoding, self.dims, changed)
        lengths = (SHORT, before.trained_length or SHORT, changed, LONG)
        if any(before.at(length, False) != after.at(length, False) for length in lengths):
            raise ValueError(
                f"config.max_position_embeddings was changed from {before.trained_length} to "
                f"{changed} on a live model, and {self.encoding} depends on it: give it to "
                f"from_pretrained(folder, max_position_embeddings={changed}), or unpatch the model "
                "and patch it again"
            )
        before.trained_length = changed


def _with_base(encoding: RoPE, config: PretrainedConfig, slot: Slot) -> RoPE:
    """Add the model's base to `encoding`, and where it names no type, the model's scaling."""
    parameters = rope_config.parameters(config, slot)
    given, cautions = standard_parameters(parameters, config.max_position_embeddings)
    kind, theta = given.pop("rope_type"), given.pop("rope_theta", None)
    encoding = dataclasses.replace(encoding, theta=theta)
    if families.family(config) in families.PARTIAL and kind != "proportional":
        # The width that is rotated is known, and the frequencies are those of all of its dims.
        given.pop("partial_rotary_factor", None)
    if encoding.type is not None or kind == "default":
        return encoding
    for caution in cautions:
        warnings.warn(f"rope_parameters of the model: {caution}", stacklevel=2)
    try:
        return dataclasses.replace(encoding, type=kind, **given)
    except ValueError as error:
        raise ValueError(
            f"{encoding} on a model with rope_type {kind!r}, whose scaling it takes over: {error}; "
            "give theta= or type= for an encoding of its own"
        ) from None
