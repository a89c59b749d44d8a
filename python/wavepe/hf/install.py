"""Install encodings in one model, with the hooks that read and check each pass, and remove them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from ..positions import Learned, named_as_in
from ..positions.requests import current
from ..positions.tables import refuse_trace
from . import families, replaced_code
from .absolute import AddAbsolute
from .cache_guard import CacheGuard
from .config import EncodedConfig, patched_config, return_changes
from .inkling import hide_distances, keep_queries, restore
from .layer_hooks import after_attention, before_attention, before_layer
from .layers import LayerEncodings, StoredSpec, spec_text
from .learned import attach, detach
from .parts import Builder, Parts, make_parts
from .passes import PASS, Args, Kwargs, Pass
from .rope_config import Slot
from .rotary import RopeRotation, Rotary
from .rotary_check import LIVE, Link, LiveCheck, check_layers
from .sequences import measures_tokens, note_shifts, read_sequences


@dataclass
class Installed:
    """The record that a base model keeps of its encoding, as its attribute `_wavepe`."""

    spec: StoredSpec
    owner: str
    stock: PretrainedConfig | None  # before the patch; None: a wavepe_<family>, which had none
    config: PretrainedConfig
    hooks: list[RemovableHandle] = field(default_factory=list)
    # the parts that depend on the sequence length
    length_parts: list[RopeRotation | AddAbsolute] = field(default_factory=list)
    live: Any = None  # the `LiveCheck` of a base model

    def __getstate__(self) -> dict[str, Any]:
        # torch cannot unpickle the handle of a layer that was removed from the model.
        alive = [hook for hook in self.hooks if hook.hooks_dict_ref() is not None]
        return {**self.__dict__, "hooks": alive}


def installed(base: nn.Module) -> Installed | None:
    """Return the record of the encoding in `base`, or None."""
    return base.__dict__.get("_wavepe")


class PassHooks:
    """Reads each pass through a base model, and checks it before and after."""

    def __init__(self, base: nn.Module, live: LiveCheck, parts: Parts) -> None:
        self.names = families.argument_names(base)
        self.live, self.spec = live, spec_text(live.spec)
        self.absolute = parts.absolute
        self.follows_length = any(part.follows_length for part in parts.cache_parts)
        scores = [layer.score for layer in parts.layers if layer.score is not None]
        self.counting = next((x.encoding for x in scores if measures_tokens(x.encoding)), None)
        self.reads_positions = any(score.reads_positions for score in scores)
        self.cuts_logits = "logits_to_keep" in self.names
        self.guard = CacheGuard.of(live.spec, parts.cache_parts)

    def attach(self, base: nn.Module) -> list[RemovableHandle]:
        # The first of all hooks, because others may read the positions that it finds.
        before = base.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)
        return [before, base.register_forward_hook(self.after, with_kwargs=True)]

    def before(self, module: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        pass_ = Pass(self.names, args, kwargs)
        refuse_trace(self.spec)
        kwargs = pass_.kwargs
        replaced_code.check_before(pass_, self.live.attention, module)
        self.live.before_pass(module.config, pass_.compiling)
        if pass_.weights is None:  # transformers asks by the argument or by the configuration
            pass_.weights = module.config.output_attentions
        if self.reads_positions and pass_.positions is None:
            pass_.set_positions(pass_.positions_by_mask())
        if self.cuts_logits:  # Gemma 4 would cut the angles of its last layers
            kwargs["logits_to_keep"] = None
        if self.follows_length and not pass_.compiling:
            current.lengths = None if pass_.paged is None else pass_.paged.request_lengths()
        read_sequences(pass_, module, self.counting)
        if self.absolute is not None:
            self.absolute.add(module, pass_)
        self.guard.before(pass_)
        pass_.kwargs = {}  # else they would hold each other
        kwargs[PASS] = pass_
        return args[len(self.names) :], kwargs

    def after(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        pass_: Pass = kwargs[PASS]
        if pass_.waiting or not pass_.ran:
            replaced_code.check_after(pass_, self.live.attention, module)
        if pass_.cache is None and pass_.use_cache is not False:
            self.guard.after(pass_, output)
        if pass_.shifts is not None:
            note_shifts(pass_, output)


def _attach(base: Any, parts: Parts, record: Installed) -> None:
    attach(base, parts.shared, parts.by_layer)  # first, because it may raise
    for name, rotary in parts.rotaries.items():
        base.set_submodule(name, rotary)
    record.length_parts = [part for part in parts.cache_parts if part.follows_length]
    record.live = LiveCheck(base, record.config)
    record.hooks += PassHooks(base, record.live, parts).attach(base) + hide_distances(base)
    if families.of(record.config).drops_arguments:
        for whole in base.layers:
            record.hooks.append(whole.register_forward_pre_hook(before_layer, with_kwargs=True))
    for attention, layer in zip(families.attentions(base), parts.layers, strict=True):
        attention.wavepe = layer
        hook = attention.register_forward_pre_hook(before_attention, with_kwargs=True)
        record.hooks.append(hook)
        keep_queries(attention, layer.score)
    base._wavepe = record


def install_patch(model: nn.Module, choice: LayerEncodings) -> None:
    """Install the encodings in a stock model, and give the model its own configuration."""
    base = families.decoder(model)
    config = base.config
    if isinstance(config, EncodedConfig):
        raise ValueError(
            f"this is a {config.model_type} with the position encoding "
            f"{spec_text(config.position_encoding)!r}: to load it with another one, call "
            "from_pretrained(folder, position_encoding=...)"
        )
    if (record := installed(base)) is not None:
        raise ValueError(
            f"this model is patched with {spec_text(record.spec)!r} already: call "
            "wavepe.hf.unpatch(model) first"
        )
    encoded = patched_config(config, choice.stored())
    check_layers(base, encoded, type(families.attentions(base)[0]))
    with torch.device("meta" if next(base.parameters()).is_meta else "cpu"):  # not the default
        parts = make_parts(choice, base, encoded)
    for layer in families.attentions(base):
        release_attention(layer)
    _attach(base, parts, Installed(choice.stored(), type(model).__name__, config, encoded))
    replace_configs(model, dict.fromkeys(_config_ids(base), encoded))


def adopt(model: nn.Module) -> None:
    """Give a head around a patched LlamaModel the configuration of that model."""
    base: Any = model.base_model
    record: Any = installed(base)
    replace_configs(model, {id(record.stock): record.config})
    record.owner = type(model).__name__


def install_own(model: nn.Module) -> None:
    """Install the encoding that the configuration of a wavepe_<family> names, once."""
    base = families.decoder(model)
    if installed(base) is not None:
        return
    config = base.config
    choice = LayerEncodings(config.position_encoding)
    parts = make_parts(choice, base, config)
    _attach(base, parts, Installed(choice.stored(), type(model).__name__, None, config))


def uninstall(model: nn.Module) -> None:
    """Undo `install_patch`; ValueError unless this model was patched."""
    base = families.decoder(model)
    record = installed(base)
    if record is None:
        raise ValueError(f"this {type(model).__name__} is not patched")
    if record.stock is None:
        raise ValueError(
            f"this is a {record.config.model_type} with the position encoding "
            f"{spec_text(record.spec)!r}: it was not patched, so there is nothing to restore"
        )
    if record.owner != type(model).__name__:
        raise ValueError(
            f"this {type(model).__name__} was patched as part of a {record.owner}: unpatch that "
            "model"
        )
    for hook in record.hooks:
        hook.remove()
    for module in base.modules():
        for key, function in list(module._forward_pre_hooks.items()):
            if function in (before_attention, before_layer):  # of a layer that was copied
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
    for attention in families.attentions(base):
        attention.__dict__.pop("wavepe", None)
        restore(attention)
    for name, module in list(base.named_modules()):
        if isinstance(module, Rotary):
            base.set_submodule(name, module.stock)
    detach(base, families.attentions(base))
    return_changes(record.config, record.stock)
    replace_configs(model, dict.fromkeys(_config_ids(base), record.stock))
    del base._wavepe


def _config_ids(base: Any) -> set[int]:
    """Return the ids of its configuration, and of those of layers that a program has copied."""
    return {id(part.config) for part in (base, *families.attentions(base))}


def replace_configs(model: nn.Module, new: dict[int, Any]) -> None:
    """Replace configurations by new ones, listed by the ids of the old ones, in every module."""
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, PretrainedConfig) and id(value) in new:
                setattr(module, key, new[id(value)])
                if "name_or_path" in vars(module):
                    module.name_or_path = new[id(value)]._name_or_path


def check_owner(owner: PreTrainedModel) -> None:
    """Link configurations to their patched models; ValueError if a file would lose an encoding."""
    configs = [owner.config]
    for config in configs:  # the list grows by those that are loaded by their model_type
        keys = [key for key, cls in config.sub_configs.items() if cls is AutoConfig]
        configs += [getattr(config, key) for key in keys if getattr(config, key, None) is not None]
    specs = [getattr(config, "position_encoding", None) for config in configs]
    for module in owner.modules():
        record = installed(module) if isinstance(module, PreTrainedModel) else None
        if record is None or record.live is None:  # a T5 keeps its own encoding and its files
            continue
        # A pickled configuration has lost it, and models may share one.
        vars(record.config)[LIVE] = Link(record.live)
        if record.spec not in specs and not any(x is record.config for x in configs):
            raise ValueError(
                f"this {type(owner).__name__} would be loaded without the position encoding "
                f"{spec_text(record.spec)!r} of its {type(module).__name__}: patch the outermost "
                "model that patch takes; or save the state_dict() alone, and load it into a model "
                "that is patched so again"
            )


def install_attention(attention: LlamaAttention, choice: LayerEncodings) -> None:
    """Install an encoding in a layer that stands alone; the layer computes its own angles."""
    stock, spec = attention.config, choice.stored()
    encoded = patched_config(stock, spec)
    builder = Builder(encoded, attention)
    rotary = LlamaRotaryEmbedding(config=stock)
    combined = choice.everywhere
    assert combined is not None
    encoding = combined.at(attention.layer_idx, encoded.num_hidden_layers)
    size = families.Size(attention.head_dim, encoded.num_attention_heads)
    layer = builder.layer(attention, Slot(), encoding, rotary, size)
    layer.rotary, layer.rotation = builder.parts.rotaries[Slot().module], None
    attention.config = encoded
    attention.wavepe = layer
    if encoding.learns:
        learned = Learned(named_as_in(combined, encoding), *size, True, dim=encoded.hidden_size)
        attach(attention, None, {attention: learned})
    hooks = [
        attention.register_forward_pre_hook(before_attention, with_kwargs=True),
        attention.register_forward_hook(after_attention, with_kwargs=True),
        *CacheGuard.of(spec, builder.parts.cache_parts).attach(attention),
    ]
    attention._wavepe = Installed(spec, type(attention).__name__, stock, encoded, hooks)


def release_attention(attention: Any) -> None:
    """Undo `install_attention` in a layer that is part of a model now."""
    record = attention.__dict__.pop("_wavepe", None)
    if record is not None:
        for hook in record.hooks:
            hook.remove()
        attention.config = record.stock
        detach(attention)
        del attention.wavepe
