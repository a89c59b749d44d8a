"""Learned encodings: a module of the model holds their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers.initialization import copy_

from ..encodings import Encoding
from ..positions import Learned, LearnedCache, Terms
from .families import need_module

# Name of the module in the model (model.position_encoding.scale, ...) and in its layers.
MODULE_NAME = "position_encoding"


class SharedLearned:
    """Lets a layer call the module that all layers share, by its name: PEFT may replace it."""

    def __init__(self, encoding: Encoding, owner: nn.Module) -> None:
        self.encoding = encoding
        self.owner: Any = owner

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedLearned:
        """Keep the model, which gives its layers a copy of itself (see _InitWeights)."""
        copied = memo[id(self)] = SharedLearned(self.encoding, self.owner)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {"encoding": self.encoding, "owner": None}

    def __call__(self, keys: int, cache: LearnedCache | None = None) -> Terms:
        if self.owner is None:
            raise ValueError(
                f"this layer was saved without its model, which holds the parameters of "
                f"{self.encoding}: save the whole model"
            )
        terms: Terms = getattr(self.owner, MODULE_NAME)(keys, cache)
        return terms


def attach(owner: Any, shared: Learned | None, by_layer: Mapping[Any, Learned]) -> None:
    """Make learned parameters modules of a model and its layers, or of a lone layer."""
    modules = [*by_layer.items(), *([] if shared is None else [(owner, shared)])]
    for place, learned in modules:
        # Weights of a quantised layer may be integers.
        first = next(x for y in (place, owner) for x in y.parameters() if x.is_floating_point())
        if not first.is_meta:  # else from_pretrained chooses device and dtype
            learned.to(first.device, first.dtype)
    for place, learned in modules:
        setattr(place, MODULE_NAME, learned)
        # Loading initialises what a checkpoint lacks by this method, which knows no `Learned`.
        owner._init_weights = _InitWeights(owner)


def detach(owner: nn.Module, layers: Iterable[nn.Module] = ()) -> None:
    """Undo `attach`, if it was done, for a model and its attention layers."""
    for module in (owner, *layers):
        module._modules.pop(MODULE_NAME, None)
    owner.__dict__.pop("_init_weights", None)


class _InitWeights:
    """Replacement for a model's `_init_weights` that also initialises learned encodings."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __call__(self, module: nn.Module) -> None:
        if isinstance(module, Learned):
            for name, value in module.initial().items():
                copy_(getattr(module, name), value)
        else:
            type(self.owner)._init_weights(self.owner, module)

    def __getstate__(self) -> dict[str, Any]:
        layers = [vars(module).get("wavepe") for module in self.owner.modules()]
        shared = [layer.shared for layer in layers if layer is not None]
        return {"owner": self.owner, "shared": [x for x in shared if x is not None]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.owner = state["owner"]  # of a copy, whose layers get it here
        for shared in state["shared"]:
            shared.owner = self.owner


def learned_ids(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that encodings learn."""
    parts = [module for module in model.modules() if isinstance(module, Learned)]
    return {id(parameter) for part in parts for parameter in part.parameters()}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups for an optimizer, one with weight decay and one without.

    The parameters of a learned encoding take no weight decay: decay would pull scales, shifts and
    biases to 0. Other parameters of one dimension (biases, weights of norms) take none either. The
    optimizer that transformers' Trainer creates does decay the parameters of an encoding.

    Parameters
    ----------
    model : nn.Module
        A patched model, a model of a type wavepe_<family>, or a wrapper of one.
    weight_decay : float
        Weight decay of all other parameters.

    Returns
    -------
    list of dict
        Two groups with the keys "params" and "weight_decay", as ``torch.optim.AdamW`` takes them.

    Raises
    ------
    TypeError
        `model` is not a module.

    Examples
    --------
    >>> import torch, wavepe.hf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    ...     num_attention_heads=2))
    >>> model = wavepe.hf.patch(model, "shaw:clip=4")
    >>> optimizer = torch.optim.AdamW(wavepe.hf.parameter_groups(model, weight_decay=0.1), lr=1e-3)
    """
    need_module(model)
    learned = learned_ids(model)
    groups: list[Any] = [{"params": [], "weight_decay": decay} for decay in (weight_decay, 0.0)]
    for parameter in model.parameters():
        plain = parameter.dim() < 2 or id(parameter) in learned
        groups[plain]["params"].append(parameter)
    return groups
