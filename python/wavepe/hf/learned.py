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


from ..encodings import Encoding
from ..nn._precision import AtLeastFloat32

# Of the module in the model (model.position_encoding.scale, ...).
MODULE = "position_encoding"


class LearnedTable(AtLeastFloat32):
    """The parameters of a learned relative encoding ([W], [S], [X]), one set for all layers."""

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
            copy_(getattr(self, name), value)


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
