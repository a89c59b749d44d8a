"""Putting an encoding into one Llama, and taking it out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRotaryEmbedding,
)

from ..encodings import Encoding, encoding
from ..nn._positions import check_learned
from .absolute import AddAbsolute
from .attention import Layer, before_attention
from .config import WavePELlamaConfig, patched_config, return_changes
from .learned import LearnedTable, attach, detach
from .rotary import Rotary, Rotated, rotation
from .scores import LearnedScore, RelativeScore, Score, SlopeScore


@dataclass
class Parts:
    """What an encoding puts into a model; made in full before the model is touched."""

    rotary: Rotary
    score: Score | None = None
    absolute: AddAbsolute | None = None
    learned: LearnedTable | None = None

    @property
    def angles(self) -> Rotated | None:
        """The rotation, where caches must be checked against it."""
        rotary = self.rotary
        return rotary if isinstance(rotary, Rotated) and rotary.changes else None


@dataclass
class Installed:
    """What a LlamaModel remembers of its encoding, as its attribute `_wavepe`.

    `stock` is the configuration before a patch; None for a wavepe_llama, which has no way back.
    """

    spec: str
    owner: str
    stock: LlamaConfig | None
    config: LlamaConfig
    hooks: list[RemovableHandle] = field(default_factory=list)


def llama_base(model: nn.Module) -> LlamaModel:
    """The LlamaModel in `model`; TypeError for anything but a Llama."""
    base = model.base_model if isinstance(model, LlamaPreTrainedModel) else None
    if not isinstance(base, LlamaModel):
        raise TypeError(
            "wavepe.hf supports transformers' Llama: LlamaModel and the LlamaFor... models on it; "
            f"got {type(model).__name__}. Of a wrapped model pass the Llama inside"
        )
    return base


def installed(base: LlamaModel) -> Installed | None:
    """What is installed in `base`."""
    return base.__dict__.get("_wavepe")


def make_parts(
    encoding: Encoding, config: LlamaConfig, stock_rotary: nn.Module, owner: nn.Module
) -> Parts:
    """Everything that `encoding` needs in `owner`, a model or layer of this configuration.

    Raises
    ------
    ValueError
        Where the encoding does not fit the model (head size, number of heads, rope type).
    """
    parts = Parts(rotation(encoding, config, stock_rotary))
    check_learned(encoding)
    if getattr(encoding, "learned", False):
        parts.learned = LearnedTable(encoding, config.head_dim, config.num_attention_heads)
        parts.score = LearnedScore(encoding, owner)
    elif encoding.entry == "relative":
        parts.score = RelativeScore(encoding, config.head_dim)
    elif encoding.entry == "slope":
        parts.score = SlopeScore(encoding, config.num_attention_heads)
    elif encoding.entry == "absolute":
        parts.absolute = AddAbsolute(encoding, config)
    return parts


def install_patch(model: nn.Module, encoding: Encoding) -> None:
    """Install `encoding` in a stock Llama, under a configuration of its own.

    Raises
    ------
    TypeError
        Not a Llama, or one with another configuration class than LlamaConfig.
    ValueError
        An encoding is installed already, or this one does not fit.
    """
    base = llama_base(model)
    config = base.config
    if isinstance(config, WavePELlamaConfig):
        raise ValueError(
            f"this is a wavepe_llama with the position encoding {config.position_encoding!r}: "
            "load it with another by from_pretrained(folder, position_encoding=...)"
        )
    if (present := installed(base)) is not None:
        raise ValueError(
            f"this model is patched with {present.spec!r} already: wavepe.hf.unpatch(model) first"
        )
    for layer in base.layers:
        release_attention(layer.self_attn)
    own = patched_config(config, encoding)
    parts = make_parts(encoding, own, base.rotary_emb, base)
    replace_config(model, config, own)
    _attach(base, parts, Installed(str(encoding), type(model).__name__, config, own))


def adopt(model: nn.Module) -> None:
    """Let a head built around a patched LlamaModel share its configuration."""
    present: Any = installed(model.base_model)
    replace_config(model, present.stock, present.config)
    present.owner = type(model).__name__


def install_own(model: nn.Module) -> None:
    """Install the encoding that the configuration of a wavepe_llama names, once."""
    base = llama_base(model)
    if installed(base) is not None:
        return
    config = base.config
    own = encoding(config.position_encoding)
    parts = make_parts(own, config, base.rotary_emb, base)
    _attach(base, parts, Installed(str(own), type(model).__name__, None, config))


def uninstall(model: nn.Module) -> None:
    """Undo `install_patch`.

    Raises
    ------
    ValueError
        The model is not patched, was patched through another model, or is a wavepe_llama.
    """
    base = llama_base(model)
    present = installed(base)
    if present is None:
        raise ValueError(f"this {type(model).__name__} is not patched")
    if present.stock is None:
        raise ValueError(
            f"this is a wavepe_llama with the position encoding {present.spec!r}: it has no other "
            "one to go back to"
        )
    if present.owner != type(model).__name__:
        raise ValueError(
            f"this {type(model).__name__} was patched as part of a {present.owner}: unpatch that"
        )
    for hook in present.hooks:
        hook.remove()
    for layer in base.layers:
        layer.self_attn.__dict__.pop("wavepe", None)
    base.rotary_emb = base.rotary_emb.stock
    detach(base)
    return_changes(present.config, present.stock)
    replace_config(model, present.config, present.stock)
    del base._wavepe


def replace_config(model: nn.Module, old: LlamaConfig, new: LlamaConfig) -> None:
    """Let every part of the model that holds `old` hold `new`."""
    for module in model.modules():
        if module.__dict__.get("config") is old:
            module.config = new


def install_attention(attention: LlamaAttention, encoding: Encoding) -> None:
    """Install `encoding` in a layer that stands alone: it rotates, or not, by itself."""
    stock = attention.config
    own = patched_config(stock, encoding)
    parts = make_parts(encoding, own, LlamaRotaryEmbedding(config=stock), attention)
    attention.config = own
    attention.wavepe = Layer(parts.score, parts.angles, parts.rotary)
    if parts.learned is not None:
        attach(attention, parts.learned)
    hook = attention.register_forward_pre_hook(before_attention, with_kwargs=True)
    attention._wavepe = Installed(str(encoding), type(attention).__name__, stock, own, [hook])


def release_attention(attention: LlamaAttention) -> None:
    """Undo `install_attention`, where it was done: the layer is part of a model now."""
    present = attention.__dict__.pop("_wavepe", None)
    if present is not None:
        present.hooks[0].remove()
        attention.config = present.stock
        detach(attention)
        del attention.wavepe


def _attach(base: LlamaModel, parts: Parts, record: Installed) -> None:
    base.rotary_emb = parts.rotary
    if parts.learned is not None:
        attach(base, parts.learned)
    for index, layer in enumerate(base.layers):
        attention = layer.self_attn
        attention.wavepe = Layer(parts.score, parts.angles if index == 0 else None)
        if attention.wavepe.score or attention.wavepe.angles:
            hook = attention.register_forward_pre_hook(before_attention, with_kwargs=True)
            record.hooks.append(hook)
    if parts.absolute is not None:
        record.hooks.append(base.register_forward_pre_hook(parts.absolute, with_kwargs=True))
    base._wavepe = record
