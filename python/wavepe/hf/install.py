"""Install encodings in one model, and remove them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from ..encodings import Encoding
from ..encodings import encoding as read_encoding
from ..ops._compiler import before_marked
from ..positions import Learned, Scores, named_as_in
from ..positions.tables import refuse_trace
from . import families, rope_config
from .absolute import AddAbsolute
from .cache_guard import EncodingGuard
from .config import EncodedConfig, note_live, patched_config, return_changes
from .foreign import ReplacedForwardCheck
from .inkling import OWN, keep_queries, restore, without_own
from .layer_hooks import LayerState, after_attention, before_attention, before_layer
from .layers import Choice, StoredSpec, spec_text
from .learned import SharedLearned, attach, detach
from .passes import PASS, Pass, measures_tokens
from .rope_config import Slot
from .rotary import (
    IdentityRotation,
    RopeRotation,
    Rotary,
    StockRotation,
    check_config,
    with_base,
)
from .rotary_check import check_rotary


@dataclass
class Parts:
    """The parts that encodings add to a model; all are built before the model is changed."""

    layers: list[LayerState] = field(default_factory=list)
    rotaries: dict[str, Rotary] = field(default_factory=dict)
    absolute: AddAbsolute | None = None
    shared: Learned | None = None
    own: dict[nn.Module, Learned] = field(default_factory=dict)
    # Parts whose keys depend on more than the spec: on the model's base or the sequence length.
    cache_parts: list[RopeRotation | AddAbsolute] = field(default_factory=list)


@dataclass
class Installed:
    """The record that a base model keeps of its encoding, as its attribute `_wavepe`.

    `stock` is the configuration before the patch. It is None for a wavepe_<family>, which cannot be
    unpatched. `length_parts` holds the parts that depend on the sequence length.
    """

    spec: StoredSpec
    owner: str
    stock: PretrainedConfig | None
    config: PretrainedConfig
    hooks: list[RemovableHandle] = field(default_factory=list)
    length_parts: list[RopeRotation | AddAbsolute] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        # torch cannot unpickle the handle of a layer that was removed from the model.
        alive = [hook for hook in self.hooks if hook.hooks_dict_ref() is not None]
        return {**self.__dict__, "hooks": alive}


def installed(base: nn.Module) -> Installed | None:
    """Return the record of the encoding in `base`, or None."""
    return base.__dict__.get("_wavepe")


# ---------------------------------------------------------------- parts


class Size(NamedTuple):
    """The heads of a layer."""

    head_dim: int
    heads: int


class _Builder:
    """Builds the parts for a model with this configuration.

    Parameters
    ----------
    owner : Module
        The base model, or a layer that stands alone. It will hold the learned parameters.
    """

    def __init__(self, config: PretrainedConfig, owner: nn.Module) -> None:
        self.config, self.owner = config, owner
        family = families.of(config)
        self.rotates, self.layout = family.is_rotary, family.layout
        self.parts = Parts()
        self.scores: dict[tuple[str, int, int], Scores] = {}
        # slot -> the rotations of its layers: a spec, "" for none, or None for the family's own.
        self.rotations: dict[Slot, list[str | None]] = {}

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
                layer.score = self.score(encoding, size, size.head_dim)
            return layer
        head_dim, rope = size.head_dim, None
        if encoding is not None:
            rope = encoding.rotary
        own = encoding is None and slot is not None
        slot = Slot() if slot is None else slot
        if own and rope_config.follows_length(self.config, slot):
            # The family's module cannot tell which frequencies filled a cache; ours can.
            rope, own = read_encoding("rope"), False
        key = None if own else "" if rope is None else str(rope)
        found = self.rotations.setdefault(slot, [])
        dims = families.rotated_dims(self.config, stock, slot, head_dim)
        if key not in found:
            found.append(key)
            rotation: nn.Module = (
                StockRotation(stock, slot) if own else IdentityRotation(dims, self.layout)
            )
            if rope is not None:
                rotation = RopeRotation(self.config, slot, dims, rope)
                if rotation.reads_config:
                    check_rotary(stock, rope_config.of_slot(self.config, slot))
                self.parts.cache_parts.append(rotation)
            if slot.module not in self.parts.rotaries:
                self.parts.rotaries[slot.module] = Rotary(stock, self.config, slot)
            self.parts.rotaries[slot.module].add(slot, rotation)
        layer.rotation = found.index(key)
        if encoding is not None and encoding.in_scores:
            layer.score = self.score(self.as_rotated(encoding, slot), size, dims)
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
        """Return what `encoding` adds to the scores; layers of one encoding share it.

        Raises
        ------
        ValueError
            The encoding does not fit the head size or the number of heads.
        """
        key = str(encoding), *size
        if key not in self.scores:
            self.scores[key] = Scores(encoding, *size, True, rotated_dims)
        return self.scores[key]

    def learn(self, whole: Encoding | None, attentions: list[Any], sizes: list[Size]) -> None:
        """Build the parameters that layers share, and those of each layer.

        Raises
        ------
        ValueError
            Layers with heads of several sizes would share a table.
        """
        if whole is not None and not self.rotates:
            whole = without_own(whole)
        if whole is None:
            return
        learning = []
        for attention, layer, size in zip(attentions, self.parts.layers, sizes, strict=True):
            one = None if layer.score is None else layer.score.encoding
            if one is not None and not self.rotates:
                one = without_own(one)
            if one is not None and one.learns:
                learning.append((attention, layer, one, size))
        own_sizes, dim = [size for *_, size in learning] or sizes, self.config.hidden_size
        shared = Learned(whole, *own_sizes[0], True, layer=False, dim=dim)
        of_heads = {"bias", "sinks"}.issuperset(whole.learns)  # whatever the head size is
        different = sorted({size.heads if of_heads else size.head_dim for size in own_sizes})
        if shared.has_parameters and len(different) > 1:
            what, these = ("numbers", "heads") if of_heads else ("one table", "heads of the sizes")
            raise ValueError(
                f"{whole} learns {what} for its layers, but in this model these have {these} "
                f"{' and '.join(map(str, different))}: name layers of one size, as in "
                f"{{'0-3': '{whole}'}}"
            )
        if shared.has_parameters:
            self.parts.shared = shared
        for attention, layer, one, size in learning:
            if self.parts.shared is not None:
                layer.shared = SharedLearned(whole, self.owner)
            part = named_as_in(whole, one)
            own = Learned(part, *size, True, layer=True, dim=dim)
            if own.has_parameters:
                self.parts.own[attention] = own


def make_parts(choice: Choice, base: Any, config: PretrainedConfig) -> Parts:
    """Build all parts of the encodings for a base model with its new configuration.

    Raises
    ------
    ValueError
        An encoding does not fit the head size, the number of heads, the rope type or the layers.
    """
    builder = _Builder(config, base)
    attentions, slots = families.attentions(base), families.slots(base)
    sizes = list(map(Size, families.head_dims(base), families.head_counts(base)))
    chosen = choice.by_layer([slot is not None or not builder.rotates for slot in slots])
    every = zip(attentions, slots, chosen, sizes, strict=True)
    for index, (attention, slot, one, size) in enumerate(every):
        if slot is None and one is not None and one.rotates:
            raise ValueError(
                f"layer {index} of this model does not rotate, so it cannot have {one}"
            )
        stock = base.get_submodule((slot or Slot()).module) if builder.rotates else None
        builder.parts.layers.append(builder.layer(attention, slot, one, stock, size))
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


class _PassHooks:
    """Reads each pass through a base model, and checks it before and after."""

    def __init__(self, base: nn.Module, config: Any, spec: StoredSpec, parts: Parts) -> None:
        self.names = families.argument_names(base)
        self.spec, self.stored = spec_text(spec), spec
        self.forwards = ReplacedForwardCheck(base)
        self.absolute = parts.absolute
        self.config = None if parts.rotaries else config  # else a `Rotary` looks at it
        scores = [layer.score for layer in parts.layers if layer.score is not None]
        counting = (score.encoding for score in scores if measures_tokens(score.encoding))
        self.counting = next(counting, None)
        self.reads_positions = any(score.reads_positions for score in scores)
        self.cuts_logits = "logits_to_keep" in self.names
        self.guard = EncodingGuard(spec, parts.cache_parts)

    def attach(self, base: nn.Module) -> list[RemovableHandle]:
        # The first of all hooks, because others may read the positions that it finds.
        before = base.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)
        return [before, base.register_forward_hook(self.after, with_kwargs=True)]

    def before(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        before_marked()
        refuse_trace(self.spec)
        this = Pass(self.names, args, kwargs)
        kwargs = this.kwargs
        self.forwards.before(this)
        if self.config is not None:
            check_config(self.config, self.stored)
        if this.weights is None:  # transformers asks by the argument or by the configuration
            this.weights = module.config.output_attentions
        if self.reads_positions and this.positions is None:
            this.set_positions(this.positions_by_mask())
        if self.cuts_logits:
            # A number lets Gemma 4 cut the angles of its last layers, which ours would not know.
            kwargs["logits_to_keep"] = None
        this.read_sequences(module, self.counting)
        if self.absolute is not None:
            self.absolute.add(module, this)
        self.guard.before(this)
        this.kwargs = {}  # else they would hold each other
        kwargs[PASS] = this
        return args[len(self.names) :], kwargs

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        this: Pass = kwargs[PASS]
        self.forwards.after(this)
        self.guard.after(this, output)
        if this.shifts is not None:
            this.note_shifts(output)


def _attach(base: Any, parts: Parts, record: Installed) -> None:
    attach(base, parts.shared, parts.own)  # first, because it may raise
    for name, rotary in parts.rotaries.items():
        base.set_submodule(name, rotary)
    record.length_parts = [part for part in parts.cache_parts if part.follows_length]
    record.hooks += _PassHooks(base, record.config, record.spec, parts).attach(base)
    if families.of(record.config).drops_arguments:
        for whole in base.layers:
            record.hooks.append(whole.register_forward_pre_hook(before_layer, with_kwargs=True))
    for attention, layer in zip(families.attentions(base), parts.layers, strict=True):
        attention.wavepe = layer
        hook = attention.register_forward_pre_hook(before_attention, with_kwargs=True)
        record.hooks.append(hook)
        keep_queries(attention, layer.score)
    note_live(record.config, len(parts.layers))
    base._wavepe = record


# ---------------------------------------------------------------- one model


def install_patch(model: nn.Module, choice: Choice) -> None:
    """Install the encodings in a stock model, and give the model its own configuration.

    Raises
    ------
    TypeError
        The model is of no family that can be patched, or its configuration class is not that of
        its family.
    ValueError
        The model has an encoding of wavepe already, or this one does not fit.
    """
    base = families.decoder(model)
    config = base.config
    if isinstance(config, EncodedConfig):
        raise ValueError(
            f"this is a {config.model_type} with the position encoding "
            f"{spec_text(config.position_encoding)!r}: to load it with another one, call "
            "from_pretrained(folder, position_encoding=...)"
        )
    if (present := installed(base)) is not None:
        raise ValueError(
            f"this model is patched with {spec_text(present.spec)!r} already: call "
            "wavepe.hf.unpatch(model) first"
        )
    own = patched_config(config, choice.stored())
    parts = make_parts(choice, base, own)
    for layer in families.attentions(base):
        release_attention(layer)
    _attach(base, parts, Installed(choice.stored(), type(model).__name__, config, own))
    replace_config(model, config, own)


def adopt(model: nn.Module) -> None:
    """Give a head around a patched LlamaModel the configuration of that model."""
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
    _attach(base, parts, Installed(choice.stored(), type(model).__name__, None, config))


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
            f"{spec_text(present.spec)!r}: it was not patched, so there is nothing to restore"
        )
    if present.owner != type(model).__name__:
        raise ValueError(
            f"this {type(model).__name__} was patched as part of a {present.owner}: unpatch that "
            "model"
        )
    for hook in present.hooks:
        hook.remove()
    for attention in families.attentions(base):
        attention.__dict__.pop("wavepe", None)
        restore(attention)
    for name, module in list(base.named_modules()):
        if isinstance(module, Rotary):
            base.set_submodule(name, module.stock)
    detach(base, families.attentions(base))
    return_changes(present.config, present.stock)
    replace_config(model, present.config, present.stock)
    del base._wavepe


def replace_config(model: nn.Module, old: PretrainedConfig, new: PretrainedConfig) -> None:
    """Replace `old` by `new` in every module that holds it."""
    for module in model.modules():
        if module.__dict__.get("config") is old:
            module.config = new
            if "name_or_path" in module.__dict__:
                module.name_or_path = new._name_or_path


# ---------------------------------------------------------------- a layer that stands alone


def install_attention(attention: LlamaAttention, choice: Choice) -> None:
    """Install an encoding in a layer that stands alone; the layer computes its own angles."""
    stock = attention.config
    own = patched_config(stock, choice.stored())
    builder = _Builder(own, attention)
    rotary = LlamaRotaryEmbedding(config=stock)
    whole = choice.everywhere
    assert whole is not None
    one = whole.at(attention.layer_idx, own.num_hidden_layers)
    size = Size(attention.head_dim, own.num_attention_heads)
    layer = builder.layer(attention, Slot(), one, rotary, size)
    layer.rotary, layer.rotation = builder.parts.rotaries[Slot().module], None
    attention.config = own
    attention.wavepe = layer
    if one.learns:
        learned = Learned(named_as_in(whole, one), *size, True, dim=own.hidden_size)
        attach(attention, None, {attention: learned})
    spec = choice.stored()
    hooks = [
        attention.register_forward_pre_hook(before_attention, with_kwargs=True),
        attention.register_forward_hook(after_attention, with_kwargs=True),
        *EncodingGuard(spec, builder.parts.cache_parts).attach(attention),
    ]
    attention._wavepe = Installed(spec, type(attention).__name__, stock, own, hooks)


def release_attention(attention: Any) -> None:
    """Undo `install_attention` in a layer that is part of a model now."""
    present = attention.__dict__.pop("_wavepe", None)
    if present is not None:
        for hook in present.hooks:
            hook.remove()
        attention.config = present.stock
        detach(attention)
        del attention.wavepe
