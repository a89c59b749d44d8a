"""Build what encodings add to a model; the model itself stays as it is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from ..encodings import Encoding
from ..encodings import encoding as read_encoding
from ..positions import Learned, Scores, named_as_in
from . import families, rope_config
from .absolute import AddAbsolute
from .families import Size
from .inkling import OWN, without_own
from .layer_hooks import LayerState
from .layers import LayerEncodings
from .learned import SharedLearned
from .rope_config import Slot
from .rotary import IdentityRotation, RopeRotation, Rotary, with_base
from .rotary_check import check_rotary


@dataclass
class Parts:
    """The parts that encodings add to a model; all are built before the model is changed."""

    layers: list[LayerState] = field(default_factory=list)
    rotaries: dict[str, Rotary] = field(default_factory=dict)
    absolute: AddAbsolute | None = None
    shared: Learned | None = None
    by_layer: dict[nn.Module, Learned] = field(default_factory=dict)
    # Parts whose keys depend on more than the spec: on the model's base or the sequence length.
    cache_parts: list[RopeRotation | AddAbsolute] = field(default_factory=list)


class Builder:
    """Builds the parts for a model of this configuration; `owner` will hold learned parameters."""

    def __init__(self, config: PretrainedConfig, owner: nn.Module) -> None:
        self.config, self.owner = config, owner
        family = families.of(config)
        self.rotates, self.layout = family.is_rotary, family.layout
        self.parts = Parts()
        self.scores: dict[tuple[str, int, int], Scores] = {}
        # slot -> the rotations of its layers: a spec, or "" for none.
        self.rotations: dict[Slot, list[str]] = {}

    def layer(
        self,
        attention: nn.Module,
        slot: Slot | None,
        encoding: Encoding | None,
        stock: nn.Module | None,
        size: Size,
    ) -> LayerState:
        """Build the parts of `encoding` for one layer.

        Without an encoding, the layer keeps its own. Without a slot, it does not rotate. Without a
        stock module, no layer of the model does.
        """
        layer = LayerState(families.argument_names(attention))
        if stock is None:
            encoding = read_encoding(OWN) if encoding is None else encoding
            if encoding.in_scores:
                layer.set_score(self.score(encoding, size, size.head_dim))
            return layer
        rope: Any = None if encoding is None else encoding.rotary
        if encoding is None and slot is not None:  # the family's own
            rope = read_encoding("rope")
        reads_config = rope is not None and rope.theta is None
        if slot is not None:
            layer.rope = rope_config.parameters(self.config, slot) if reads_config else {}
        slot = Slot() if slot is None else slot
        key = "" if rope is None else str(rope)
        rotations = self.rotations.setdefault(slot, [])
        dims = families.rotated_dims(self.config, stock, slot, size.head_dim)
        if key not in rotations:
            rotations.append(key)
            if slot.module not in self.parts.rotaries:
                self.parts.rotaries[slot.module] = Rotary(stock)
            rotation: nn.Module
            if rope is None:
                rotation = IdentityRotation(dims, self.layout)
            else:
                rotation = RopeRotation(self.config, slot, dims, rope)
                self.parts.cache_parts.append(rotation)
            if reads_config:
                check_rotary(stock, rope_config.of_slot(self.config, slot))
            self.parts.rotaries[slot.module].add(slot, rotation)
        layer.rotation = rotations.index(key)
        if encoding is not None and encoding.in_scores:
            layer.set_score(self.score(self.as_rotated(encoding, slot), size, dims))
            layer.angle_layout = None if rope is None else self.layout
        return layer

    def as_rotated(self, encoding: Encoding, slot: Slot) -> Encoding:
        """Return the encoding with the base and the layout of the model, for a part that changes
        queries and keys once more."""
        rope: Any = encoding.rotary
        if rope is None or not rope.in_scores:
            return encoding
        if rope.theta is None:
            rope = with_base(rope, self.config, slot)
        rope = dataclasses.replace(rope, interleaved=self.layout.interleaved)
        return encoding.with_parts(lambda part: rope if part.rotates else part)

    def score(self, encoding: Encoding, size: Size, rotated_dims: int) -> Scores:
        """Return what `encoding` adds to the scores; layers of one encoding share it."""
        key = str(encoding), *size
        if key not in self.scores:
            self.scores[key] = Scores(encoding, *size, True, rotated_dims)
        return self.scores[key]

    def learn(self, combined: Encoding | None, attentions: list[Any], sizes: list[Size]) -> None:
        """Build the parameters that layers share, and those of each layer."""
        combined = self.learned_here(combined)
        if combined is None:
            return
        learning = []
        for attention, layer, size in zip(attentions, self.parts.layers, sizes, strict=True):
            encoding = self.learned_here(None if layer.score is None else layer.score.encoding)
            if encoding is not None and encoding.learns:
                learning.append((attention, layer, encoding, size))
        learning_sizes, dim = [size for *_, size in learning] or sizes, self.config.hidden_size
        shared = Learned(combined, *learning_sizes[0], True, layer=False, dim=dim)
        by_heads = {"bias", "sinks"}.issuperset(combined.learns)  # whatever the head size is
        different = sorted({size.heads if by_heads else size.head_dim for size in learning_sizes})
        if shared.has_parameters and len(different) > 1:
            what, these = ("numbers", "heads") if by_heads else ("one table", "heads of the sizes")
            raise ValueError(
                f"{combined} learns {what} for its layers, but in this model these have {these} "
                f"{' and '.join(map(str, different))}: name layers of one size, as in "
                f"{{'0-3': '{combined}'}}"
            )
        if shared.has_parameters:
            self.parts.shared = shared
        for attention, layer, encoding, size in learning:
            if self.parts.shared is not None:
                layer.shared = SharedLearned(combined, self.owner)
            named = named_as_in(combined, encoding)
            layer_module = Learned(named, *size, True, layer=True, dim=dim)
            if layer_module.has_parameters:
                self.parts.by_layer[attention] = layer_module

    def learned_here(self, encoding: Encoding | None) -> Encoding | None:
        """Leave out the part whose parameters the model has already (Inkling)."""
        return encoding if encoding is None or self.rotates else without_own(encoding)


def make_parts(choice: LayerEncodings, base: Any, config: PretrainedConfig) -> Parts:
    """Build all parts; ValueError if an encoding does not fit the model or its layers."""
    builder = Builder(config, base)
    attentions, sizes = families.attentions(base), families.sizes(base)
    slots = [families.slot(base.config, x, index) for index, x in enumerate(attentions)]
    chosen = choice.by_layer([slot is not None or not builder.rotates for slot in slots])
    layers = zip(attentions, slots, chosen, sizes, strict=True)
    for index, (attention, slot, encoding, size) in enumerate(layers):
        if slot is None and encoding is not None and encoding.rotates:
            raise ValueError(
                f"layer {index} of this model does not rotate, so it cannot have {encoding}"
            )
        stock = base.get_submodule((slot or Slot()).module) if builder.rotates else None
        builder.parts.layers.append(builder.layer(attention, slot, encoding, stock, size))
    _check_reused(families.keys_from(base), builder.parts.layers)
    for slot, layer in zip(slots, builder.parts.layers, strict=True):
        if len(builder.rotations.get(slot or Slot(), [])) == 1:
            layer.rotation = None  # all layers rotate alike
    builder.learn(choice.learned, attentions, sizes)
    if choice.everywhere is not None and choice.everywhere.adds:
        builder.parts.absolute = AddAbsolute(choice.everywhere, base)
        if builder.parts.absolute.follows_length:
            builder.parts.cache_parts.append(builder.parts.absolute)
    return builder.parts


def _check_reused(keys_from: list[int | None], layers: list[LayerState]) -> None:
    """Raise ValueError if a layer reuses keys that are not rotated as its queries are."""
    for index, source in enumerate(keys_from):
        if source is not None and layers[index].rotation != layers[source].rotation:
            raise ValueError(
                f"layer {index} of this model reuses the keys of layer {source}, so both must "
                "rotate alike: give them the same rope, or both none"
            )
