"""Modules that replace the rotary embedding of a model."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..arrays.rope_frequencies import PARAMETERS, standard_parameters
from ..encodings import Encoding, RoPE
from ..positions.rotation import LONG, SHORT, FrequencySchedule
from . import families, rope_config
from .pairs import Layout
from .rope_config import Slot, frequency_name


class CosSin(NamedTuple):
    """cos and sin of the angles, each (1|B, q, columns), in the layout of the family.

    By this type an attention layer knows that the angles come from wavepe.
    """

    cos: Tensor
    sin: Tensor


class Rotary(nn.Module):
    """Replacement for the rotary module of a model.

    It computes the angles of all layers, and keeps the stock module so that `unpatch` can restore
    it. The stock module is a child, so it moves with the model; it adds nothing to the state dict.
    """

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock
        self.config: Any = stock.config  # Granite SWA reads the base of each of its modules here
        self.rotations = nn.ModuleList()
        self._by_type: dict[str | None, list[nn.Module]] = {}  # layer type -> those that differ

    def add(self, slot: Slot, rotation: nn.Module) -> None:
        """Add another rotation for layers of this slot."""
        self.rotations.append(rotation)
        self._by_type.setdefault(slot.layer_type, []).append(rotation)
        self.train(self.stock.training)  # the model may be in either mode

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return `CosSin` in the dtype of x, or a tuple of them if the layers differ."""
        rotations = self._by_type[layer_type]
        if len(rotations) == 1:
            return rotations[0].forward(x, position_ids)
        return tuple([rotation.forward(x, position_ids) for rotation in rotations])


class IdentityRotation(nn.Module):
    """Rotation by 0, for all encodings that are not rotary."""

    def __init__(self, dims: int, layout: Layout) -> None:
        super().__init__()
        self.columns = layout.widen(torch.empty(dims // 2)).numel()

    def forward(self, x: Tensor, position_ids: Tensor) -> CosSin:
        shape = (1, position_ids.shape[-1], self.columns)
        return CosSin(x.new_ones(()).expand(shape), x.new_zeros(()).expand(shape))


class RopeRotation(nn.Module):
    """RoPE [R] with exact angles, and frequencies for the longest row of the batch."""

    def __init__(self, config: PretrainedConfig, slot: Slot, dims: int, encoding: Encoding) -> None:
        super().__init__()
        rope = cast(RoPE, encoding)  # `register_encoding` demands this of a user's own class
        family = families.of(config)
        self.layout = family.layout
        if rope.interleaved not in (None, self.layout.interleaved):
            other = self.layout._replace(interleaved=rope.interleaved)
            raise ValueError(
                f"{encoding}: interleaved={str(rope.interleaved).lower()} is for models that "
                f"rotate the pairs {other.pairs}, but a {family.model_type} rotates the "
                f"pairs {self.layout.pairs}"
            )
        self.config, self.slot = config, slot
        self.encoding = with_base(rope, config, slot) if rope.theta is None else rope
        self.dims = dims
        self.rotation = FrequencySchedule(self.encoding, dims, config.max_position_embeddings)
        pairs = self.rotation.pairs
        if 2 * pairs != dims:
            raise ValueError(
                f"{self.encoding} rotates {2 * pairs} of {dims} dims, but the pairs "
                f"{self.layout.pairs} of this model need all of them: to leave pairs of the whole "
                "head unrotated, give fraction or type=proportional"
            )
        # Name that marks caches; None if the frequencies depend on the length or on the mode.
        self.constant_cache_name: str | None = None
        if not self.rotation.changes:
            self.constant_cache_name = self._name(str(self.encoding), None, 1)

    def name(self, position_ids: Tensor | None, length: int) -> str:
        """Name the rotation at these positions; without positions, that of `length` tokens."""
        label = f"{self.encoding} for this length or mode"
        return self.constant_cache_name or self._name(label, position_ids, length)

    @property
    def follows_length(self) -> bool:
        return self.rotation.follows_length

    def fix(self, length: int | None) -> None:
        self.rotation.fix(length)

    def _name(self, label: str, position_ids: Tensor | None, length: int) -> str:
        frequencies = self.rotation.needed(length, position_ids, self.training)
        factor = repr(frequencies.factor).encode()
        return frequency_name(label, frequencies.array.tobytes(), factor)

    def forward(self, x: Tensor, position_ids: Tensor) -> CosSin:
        if self.config.max_position_embeddings != self.rotation.trained_length:
            self._check_trained_length(self.config.max_position_embeddings)
        cos, sin = self.rotation.angles(position_ids, x, self.training)
        widen = self.layout.widen
        return CosSin(widen(cos).to(x.dtype), widen(sin).to(x.dtype))

    @torch.compiler.assume_constant_result
    def _check_trained_length(self, changed: int) -> None:
        """Raise ValueError if the changed trained length would change the angles."""
        before, after = self.rotation, FrequencySchedule(self.encoding, self.dims, changed)
        lengths = (SHORT, before.trained_length or SHORT, changed, LONG)
        if any(before.at(length, False) != after.at(length, False) for length in lengths):
            raise ValueError(
                f"config.max_position_embeddings of a live model was changed from "
                f"{before.trained_length} to {changed}, and {self.encoding} depends on it: call "
                f"from_pretrained(folder, max_position_embeddings={changed}), or unpatch the model "
                "and patch it again"
            )
        before.trained_length = changed


def with_base(encoding: RoPE, config: PretrainedConfig, slot: Slot) -> RoPE:
    """Add the model's base to `encoding`; if `encoding` has no type, add the scaling too."""
    parameters = rope_config.parameters(config, slot)
    ignored = getattr(config, "ignore_keys_at_rope_validation", None) or ()  # None in 5.0
    for key in set(ignored) - PARAMETERS.keys():
        parameters.pop(key, None)  # the family's layers read it, and not its rotary module
    options, problems = standard_parameters(parameters, config.max_position_embeddings)
    kind, theta = options.pop("rope_type"), options.pop("rope_theta", None)
    encoding = dataclasses.replace(encoding, theta=theta)
    if families.of(config).is_partial and kind != "proportional":
        # `dims` is the rotated part already, and the frequencies are those of all its dims.
        options.pop("partial_rotary_factor", None)
    if encoding.type is not None or kind == "default":
        return encoding
    for problem in problems:
        warnings.warn(f"rope_parameters of the model: {problem}", stacklevel=2)
    try:
        return dataclasses.replace(encoding, type=kind, **options)
    except ValueError as error:
        raise ValueError(
            f"{encoding} takes the scaling of this model, rope_type {kind!r}, and does not fit it: "
            f"{error}; give theta= or type= to choose another scaling"
        ) from None
