"""Sine waves of distances as torch tensors, so that autograd and compilers see one graph."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..arrays.rope_frequencies import rope_frequencies
from ..ops._common import wide
from ..ops._device_constant import device_constant
from ..ops._rope_table import rope_table


def sine_waves(first: int, last: int, dim: int, like: Tensor) -> Tensor:
    """Return `wavepe.sinusoidal` of the integers from `first` to `last` - 1.

    Parameters
    ----------
    first, last : int
        The range of distances.
    dim : int
        Size of a row, even.
    like : Tensor
        The result has its device and dtype. Waves are computed in float32 at least and rounded
        once.

    Returns
    -------
    Tensor (last - first, dim)
    """
    positions = torch.arange(first, last, device=like.device)
    inv_freq = device_constant(_frequencies, dim)
    cos, sin = rope_table(positions, inv_freq.on(like), dtype=wide(like))
    return torch.stack((sin, cos), dim=-1).flatten(-2).to(like.dtype)


def _frequencies(dim: int) -> np.ndarray:
    return rope_frequencies(dim)[0]
