"""Encodings that are trained: their parameters as a module of the model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers.initialization import copy_
except ImportError:  # transformers < 5 calls _init_weights for what a checkpoint lacks only

    @torch.no_grad()
    def copy_(tensor: Tensor, other: Tensor) -> Tensor:
        return tensor.copy_(other)


from ..positions import CacheState, Learned, PositionEncoding

# Of the module in the model (model.position_encoding.scale, ...).
MODULE = "position_encoding"


class LearnedOf(PositionEncoding):
    """The learned encoding of a model, as its layers use it: one set of parameters for all.

    It is asked for by name, for a wrapper (of PEFT, say) may have taken its place. A layer that is
    pickled alone leaves its model behind; see `_Initial`.
    """

    owner: Any = None

    def __init__(self, table: Learned, owner: nn.Module) -> None:
        super().__init__(table.encoding)
        self.__dict__["owner"] = owner  # no child: the layer that holds this is a part of it

    def __deepcopy__(self, memo: dict[int, Any]) -> LearnedOf:
        """Copy it with its model; of a layer that is copied alone, the model stays the same."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            known = memo.get(id(value), value)
            copied.__dict__[name] = known if name == "owner" else copy.deepcopy(value, memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "owner"}

    def arguments(self, q: Tensor, keys: int, state: CacheState | None = None) -> dict[str, Any]:
        """Return the arguments that the shared module gives."""
        if self.owner is None:
            raise ValueError(
                f"this layer was saved without its model, which holds the parameters of "
                f"{self.encoding}: save the model"
            )
        return getattr(self.owner, MODULE)(q, keys)


def attach(owner: Any, table: Learned) -> None:
    """Make `table` part of the model (or of a layer that stands alone)."""
    first = next(owner.parameters())
    if not first.is_meta:  # then from_pretrained puts it where it belongs
        table.to(first.device, first.dtype)
    setattr(owner, MODULE, table)
    # Loading fills what the checkpoint lacks by this method of the model, which knows no table.
    owner._init_weights = _Initial(owner)


def detach(owner: nn.Module) -> None:
    """Undo `attach`, where it was done."""
    if owner._modules.pop(MODULE, None) is not None:
        del owner._init_weights


class _Initial:
    """A model's own way to initialise weights; unpickled, it gives the layers their model back."""

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
        return {"owner": self.owner, "scores": [x for x in scores if isinstance(x, LearnedOf)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.owner = state["owner"]
        for score in state["scores"]:
            score.__dict__["owner"] = self.owner


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return a model's parameters for an optimizer: what an encoding learns takes no weight decay.

    Biases and the weights of norms take none either. The optimizer that a Trainer makes by itself
    decays what an encoding learns.

    Parameters
    ----------
    model : nn.Module
        A patched model or one of a type wavepe_<family>, or a wrapper of one.
    weight_decay : float
        Of the other parameters.

    Returns
    -------
    list of dict
        Two groups, as ``torch.optim.AdamW`` takes them.

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
