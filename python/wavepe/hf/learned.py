"""Encodings that are trained: their parameters as a module of the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization

from ..encodings import Encoding

# Of the module in the model (model.position_encoding.scale, ...).
MODULE = "position_encoding"
_NARROW = (torch.bfloat16, torch.float16)


class LearnedTable(nn.Module):
    """The parameters of a learned relative encoding ([W], [S], [X]), one set for all layers.

    They stay in float32 where the model is cast to less (float64 where it is cast to that): a step
    of training is smaller than bfloat16's distance between a shift and its neighbour.
    """

    def __init__(self, encoding: Encoding, head_dim: int, heads: int) -> None:
        super().__init__()
        self.encoding = encoding
        self.initial = {
            name: torch.from_numpy(value).float()
            for name, value in encoding.parameters(head_dim, heads).items()
        }
        for name, value in self.initial.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, keys: int) -> tuple[Tensor, int, str, tuple[Tensor, Tensor] | None]:
        """Table p for delta = 0..keys-1, its first delta, what lies beyond it; and u and v, if any.

        Computed anew by each layer, so that gradient checkpointing and changed parameters are
        right without a thought; it is small beside the scores.
        """
        parameters = {name: getattr(self, name) for name in self.initial}
        table = self.encoding.learned_table(keys, parameters)
        return (*table, self.encoding.query_biases(parameters))

    def reset(self) -> None:
        """Initial values, where a checkpoint had none."""
        for name, value in self.initial.items():
            initialization.copy_(getattr(self, name), value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def kept(tensor: Tensor) -> Tensor:
            given = fn(tensor)
            return tensor.to(given.device) if given.dtype in _NARROW else given

        return super()._apply(kept, recurse)


def attach(owner: Any, table: LearnedTable) -> None:
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
    if isinstance(module, LearnedTable):
        module.reset()
    else:
        type(owner)._init_weights(owner, module)
