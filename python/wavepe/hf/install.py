"""Putting encodings into one model, and taking them out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from ..encodings import Encoding
from ..encodings import encoding as read_encoding
from ..positions import Learned, PositionEncoding, check_learned, position_encoding
from . import families, rope_config
from .absolute import AddAbsolute
from .attention import Layer, before_attention, before_layer
from .cache_guard import EncodingGuard
from .config import EncodedConfig, patched_config, return_changes
from .layers import Choice, StoredSpec, text
from .learned import LearnedOf, attach, detach
from .packing import FindPacked
from .rope_config import Slot
from .rotary import IdentityRotation, RopeRotation, Rotary, StockRotation


@dataclass
class Parts:
    """What the encodings put into a model; made in full before the model is touched."""

    layers: list[Layer] = field(default_factory=list)
    rotaries: dict[str, Rotary] = field(default_factory=dict)
    absolute: AddAbsolute | None = None
    learned: Learned | None = None
    # What keys depend on beyond the spec: bases of the model, the length of the sequence.
    noted: list[RopeRotation | AddAbsolute] = field(default_factory=list)


@dataclass
class Installed:
    """What a base model remembers of its encoding, as its attribute `_wavepe`.

    `stock` is the configuration before a patch; None for a wavepe_<family>, which has no way back.
    """

    spec: StoredSpec
    owner: str
    stock: PretrainedConfig | None
    config: PretrainedConfig
    hooks: list[RemovableHandle] = field(default_factory=list)
    follows: list[RopeRotation | AddAbsolute] = field(default_factory=list)  # the length

    def __getstate__(self) -> dict[str, Any]:
        # A layer that was taken out of the model leaves handles that torch could not read back.
        alive = [hook for hook in self.hooks if hook.hooks_dict_ref() is not None]
        return {**self.__dict__, "hooks": alive}


def installed(base: nn.Module) -> Installed | None:
    """Return what is installed in `base`, or None."""
    return base.__dict__.get("_wavepe")


# ---------------------------------------------------------------- parts


class _Builder:
    """Makes the parts for a model of this configuration.

    Parameters
    ----------
    owner : Module
        The base model, or a layer that stands alone: it will hold what is learned.
    """

    def __init__(self, config: PretrainedConfig, head_dim: int, owner: nn.Module) -> None:
        self.config, self.head_dim, self.owner = config, head_dim, owner
        self.heads = config.num_attention_heads
        self.parts = Parts()
        self.scores: dict[str, PositionEncoding | None] = {}
        # By slot the different rotations of its layers: a spec, "" for none, None for the family's.
        self.rotations: dict[Slot, list[str | None]] = {}

    def layer(
        self, attention: nn.Module, slot: Slot | None, encoding: Encoding | None, stock: nn.Module
    ) -> Layer:
        """Build what a layer needs of `encoding`, None for its own; slot None does not rotate."""
        layer = Layer(families.argument_names(attention))
        if encoding is not None:
            layer.score = self.score(encoding)
        rope = encoding if encoding is not None and encoding.entry == "rotary" else None
        own = encoding is None and slot is not None
        slot = Slot() if slot is None else slot
        if own and rope_config.follows_length(self.config, slot):
            # The family's module would not say with which frequencies a cache was filled.
            rope, own = read_encoding("rope"), False
        key = None if own else "" if rope is None else str(rope)
        found = self.rotations.setdefault(slot, [])
        if key not in found:
            found.append(key)
            dims = families.rotated_dims(self.config, stock, slot, self.head_dim)
            rotation: nn.Module = StockRotation(stock, slot) if own else IdentityRotation(dims)
            if rope is not None:
                rotation = RopeRotation(self.config, slot, dims, rope)
                self.parts.noted.append(rotation)
            if slot.module not in self.parts.rotaries:
                self.parts.rotaries[slot.module] = Rotary(stock, self.config)
            self.parts.rotaries[slot.module].add(slot, rotation)
        layer.rotation = found.index(key)
        return layer

    def score(self, encoding: Encoding) -> PositionEncoding | None:
        """Return what `encoding` puts into the scores; layers of one encoding share it.

        Raises
        ------
        ValueError
            Where the encoding does not fit the model (head size, number of heads).
        """
        spec = str(encoding)
        if spec not in self.scores:
            found: PositionEncoding | None = None
            check_learned(encoding)
            if encoding.entry in ("relative", "slope", "bias"):
                found = position_encoding(
                    encoding, self.head_dim, self.heads, causal=True, max_length=None
                )
            if isinstance(found, Learned):
                self.parts.learned = found
                found = LearnedOf(found, self.owner)
            self.scores[spec] = found
        return self.scores[spec]


def make_parts(choice: Choice, base: Any, config: PretrainedConfig) -> Parts:
    """Build all that the encodings need in a base model, under its new configuration.

    Raises
    ------
    ValueError
        Where an encoding does not fit the model (head size, number of heads, rope type, layers).
    """
    builder = _Builder(config, families.head_dim(base), base)
    attentions, slots = families.attentions(base), families.slots(base)
    chosen = choice.by_layer(len(attentions))
    for index, (attention, slot, one) in enumerate(zip(attentions, slots, chosen, strict=True)):
        if slot is None:  # a layer that the family leaves without positions
            if choice.everywhere is not None:
                one = None
            elif one is not None and one.entry == "rotary":
                raise ValueError(f"layer {index} of this model does not rotate: {one} has no place")
        stock = getattr(base, (slot or Slot()).module)
        builder.parts.layers.append(builder.layer(attention, slot, one, stock))
    for slot, layer in zip(slots, builder.parts.layers, strict=True):
        if len(builder.rotations[slot or Slot()]) == 1:
            layer.rotation = None  # all layers have the same
    if choice.everywhere is not None and choice.everywhere.entry == "absolute":
        builder.parts.absolute = AddAbsolute(choice.everywhere, base)
        if builder.parts.absolute.follows_length:
            builder.parts.noted.append(builder.parts.absolute)
    return builder.parts


def _attach(base: Any, parts: Parts, record: Installed) -> None:
    for name, rotary in parts.rotaries.items():
        setattr(base, name, rotary)
    if parts.learned is not None:
        attach(base, parts.learned)
    if parts.absolute is not None:
        record.hooks.append(base.register_forward_pre_hook(parts.absolute, with_kwargs=True))
    names = families.argument_names(base)
    record.follows = [part for part in parts.noted if part.follows_length]
    record.hooks += EncodingGuard(record.spec, parts.noted, names).attach(base)
    # Before the others: it finds positions that vectors are then made of.
    record.hooks.append(
        base.register_forward_pre_hook(FindPacked(base), with_kwargs=True, prepend=True)
    )
    for whole in base.layers:
        if "output_attentions" in families.argument_names(whole):
            record.hooks.append(whole.register_forward_pre_hook(before_layer, with_kwargs=True))
    for attention, layer in zip(families.attentions(base), parts.layers, strict=True):
        attention.wavepe = layer
        record.hooks.append(attention.register_forward_pre_hook(before_attention, with_kwargs=True))
    base._wavepe = record


# ---------------------------------------------------------------- one model


def install_patch(model: nn.Module, choice: Choice) -> None:
    """Install the encodings in a stock model, under a configuration of its own.

    Raises
    ------
    TypeError
        Not of a family that can be patched, or with another configuration class than its family's.
    ValueError
        An encoding is installed already, or this one does not fit.
    """
    base = families.decoder(model)
    config = base.config
    if isinstance(config, EncodedConfig):
        raise ValueError(
            f"this is a {config.model_type} with the position encoding "
            f"{text(config.position_encoding)!r}: load it with another by "
            "from_pretrained(folder, position_encoding=...)"
        )
    if (present := installed(base)) is not None:
        raise ValueError(
            f"this model is patched with {text(present.spec)!r} already: "
            "wavepe.hf.unpatch(model) first"
        )
    own = patched_config(config, choice.written())
    parts = make_parts(choice, base, own)
    for layer in families.attentions(base):
        release_attention(layer)
    replace_config(model, config, own)
    _attach(base, parts, Installed(choice.written(), type(model).__name__, config, own))


def adopt(model: nn.Module) -> None:
    """Let a head built around a patched LlamaModel share its configuration."""
    base: Any = model.base_model
    present: Any = installed(base)
    replace_config(model, present.stock, present.config)
    present.owner = type(model).__name__


def install_own(model: nn.Module) -> None:
    """Install the encoding that the configuration of a wavepe_<family> names, once."""
    base = families.decoder(model)
    if installed(base) is not None:
        return
    config = base.config
    choice = Choice(config.position_encoding)
    parts = make_parts(choice, base, config)
    _attach(base, parts, Installed(choice.written(), type(model).__name__, None, config))


def uninstall(model: nn.Module) -> None:
    """Undo `install_patch`.

    Raises
    ------
    ValueError
        The model is not patched, was patched through another model, or is a wavepe_<family>.
    """
    base = families.decoder(model)
    present = installed(base)
    if present is None:
        raise ValueError(f"this {type(model).__name__} is not patched")
    if present.stock is None:
        raise ValueError(
            f"this is a {present.config.model_type} with the position encoding "
            f"{text(present.spec)!r}: it has no other one to go back to"
        )
    if present.owner != type(model).__name__:
        raise ValueError(
            f"this {type(model).__name__} was patched as part of a {present.owner}: unpatch that"
        )
    for hook in present.hooks:
        hook.remove()
    for attention in families.attentions(base):
        attention.__dict__.pop("wavepe", None)
    for name, module in list(base.named_children()):
        if isinstance(module, Rotary):
            setattr(base, name, module.stock)
    detach(base)
    return_changes(present.config, present.stock)
    replace_config(model, present.config, present.stock)
    del base._wavepe


def replace_config(model: nn.Module, old: PretrainedConfig, new: PretrainedConfig) -> None:
    """Let every part of the model that holds `old` hold `new`."""
    for module in model.modules():
        if module.__dict__.get("config") is old:
            module.config = new


# ---------------------------------------------------------------- a layer that stands alone


def install_attention(attention: LlamaAttention, choice: Choice) -> None:
    """Install an encoding in a layer that stands alone: it rotates, or not, by itself."""
    stock = attention.config
    own = patched_config(stock, choice.written())
    builder = _Builder(own, attention.head_dim, attention)
    rotary = LlamaRotaryEmbedding(config=stock)
    layer = builder.layer(attention, Slot(), choice.everywhere, rotary)
    layer.rotary, layer.rotation = builder.parts.rotaries[Slot().module], None
    attention.config = own
    attention.wavepe = layer
    if builder.parts.learned is not None:
        attach(attention, builder.parts.learned)
    spec = choice.written()
    hooks = [attention.register_forward_pre_hook(before_attention, with_kwargs=True)]
    hooks += EncodingGuard(spec, builder.parts.noted, layer.names).attach(attention)
    attention._wavepe = Installed(spec, type(attention).__name__, stock, own, hooks)


def release_attention(attention: Any) -> None:
    """Undo `install_attention`, where it was done: the layer is part of a model now."""
    present = attention.__dict__.pop("_wavepe", None)
    if present is not None:
        for hook in present.hooks:
            hook.remove()
        attention.config = present.stock
        detach(attention)
        del attention.wavepe
