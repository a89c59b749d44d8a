"""Encodings that are trained: their parameters as a module of the model."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers.initialization import copy_
except ImportError:  # transformers < 5 calls _init_weights for what a checkpoint lacks only

    @torch.no_grad()
    def copy_(tensor: Tensor, other: Tensor) -> Tensor:
        return tensor.copy_(other)


from ..positions import Cached, Learned, PositionEncoding

# Of the module in the model (model.position_encoding.scale, ...).
MODULE = "position_encoding"


class LearnedOf(PositionEncoding):
    """The learned encoding of a model, as its layers use it: one set of parameters for all.

    It is asked for by name, for a wrapper (of PEFT, say) may have taken its place.
    """

    def __init__(self, table: Learned, owner: nn.Module) -> None:
        super().__init__(table.encoding)
        self.__dict__["owner"] = owner  # no child: the layer that holds this is a part of it

    def arguments(self, q: Tensor, keys: int, layer: Cached | None = None) -> dict[str, Any]:
        """Return the arguments that the shared module gives."""
        return getattr(self.owner, MODULE)(q, keys)


def attach(owner: Any, table: Learned) -> None:
    """Make `table` part of the model (or of a layer that stands alone)."""
    first = next(owner.parameters())
    if not first.is_meta:  # then from_pretrained puts it where it belongs
        table.to(first.device, first.dtype)
    setattr(owner, MODULE, table)
    # Loading fills what the checkpoint lacks by this method of the model, which knows no table.
    owner._init_weights = functools.partial(_init_weights, owner)


def detach(owner: nn.Module) -> None:
    """Undo `attach`, where it was done."""
    if owner._modules.pop(MODULE, None) is not None:
        del owner._init_weights


def _init_weights(owner: Any, module: nn.Module) -> None:
    if isinstance(module, Learned):
        for name, value in module.initial().items():
            copy_(getattr(module, name), value)
    else:
        type(owner)._init_weights(owner, module)
