"""Sine waves of distances as torch tensors, in one graph with what is learned about them."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from .._rope_frequencies import rope_frequencies
from ..ops._common import wide


def sine_waves(first: int, last: int, dim: int, like: Tensor) -> Tensor:
    """Return `wavepe.sinusoidal` of the integers from `first` to `last` - 1.

    Parameters
    ----------
    first, last : int
    dim : int
        Even.
    like : Tensor
        Gives device and dtype; below float32 the waves are rounded once.

    Returns
    -------
    Tensor (last - first, dim)
    """
    positions = torch.arange(first, last, device=like.device)
    inv_freq = torch.tensor(_frequencies(dim), dtype=torch.float64, device=like.device)
    cos, sin = ops.rope_table(positions, inv_freq, dtype=wide(like))
    return torch.stack((sin, cos), dim=-1).flatten(-2).to(like.dtype)


@torch.compiler.assume_constant_result  # a compiler must not trace into NumPy
def _frequencies(dim: int) -> tuple[float, ...]:
    return tuple(rope_frequencies(dim)[0].tolist())
