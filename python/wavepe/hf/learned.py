"""Learned encodings: a module of the model holds their parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers.initialization import copy_
except ImportError:  # transformers < 5 calls _init_weights only for what a checkpoint lacks

    @torch.no_grad()
    def copy_(tensor: Tensor, other: Tensor) -> Tensor:
        return tensor.copy_(other)


from ..positions import CacheState, Learned, PositionEncoding, learned_arguments

# Name of the module in the model (model.position_encoding.scale, ...).
MODULE_NAME = "position_encoding"


class SharedLearned(PositionEncoding):
    """The learned encoding of a model, as each layer uses it: all layers share the parameters.

    The layers look the module up by its name in the model, because a wrapper, of PEFT for example,
    may have replaced it. A layer that is pickled alone loses its model; see `_InitWeights`.
    """

    owner: Any = None

    def __init__(self, table: Learned, owner: nn.Module) -> None:
        super().__init__(table.encoding)
        self.__dict__["owner"] = owner  # not as a child: the owner contains this layer

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedLearned:
        """Keep the model, which gives its layers a copy of itself (see _InitWeights)."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = value if name == "owner" else copy.deepcopy(value, memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "owner"}

    def arguments(self, q: Tensor, keys: int, state: CacheState | None = None) -> dict[str, Any]:
        """Return the arguments of `ops.attention`, from the shared module."""
        if self.owner is None:
            raise ValueError(
                f"this layer was saved without its model, which holds the parameters of "
                f"{self.encoding}: save the whole model"
            )
        return learned_arguments(getattr(self.owner, MODULE_NAME), q, keys)


def attach(owner: Any, table: Learned) -> None:
    """Make `table` a module of the model, or of a layer that stands alone."""
    first = next(owner.parameters())
    if not first.is_meta:  # else from_pretrained chooses device and dtype
        table.to(first.device, first.dtype)
    setattr(owner, MODULE_NAME, table)
    # Loading initialises what a checkpoint lacks by this method, which does not know our module.
    owner._init_weights = _InitWeights(owner)


def detach(owner: nn.Module) -> None:
    """Undo `attach`, if it was done."""
    if owner._modules.pop(MODULE_NAME, None) is not None:
        del owner._init_weights


class _InitWeights:
    """Replacement for a model's `_init_weights` that also initialises learned encodings.

    When the model is copied or unpickled, it gives the layers their model.
    """

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
        scores = [layer.score for layer in layers if layer is not None]
        return {"owner": self.owner, "scores": [x for x in scores if isinstance(x, SharedLearned)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.owner = state["owner"]
        for score in state["scores"]:
            score.__dict__["owner"] = self.owner


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
    learned = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, Learned)
        for parameter in module.parameters()
    }
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        plain = parameter.dim() < 2 or id(parameter) in learned
        (others if plain else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
