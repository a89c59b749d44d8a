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
    """Return `wavepe.sinusoidal` of first..last-1, (last - first, dim), as a tensor like `like`.

    Waves are computed in float32 at least and rounded once.
    """
    positions = torch.arange(first, last, device=like.device)
    inv_freq = device_constant(_frequencies, dim)
    cos, sin = rope_table(positions, inv_freq.on(like), dtype=wide(like))
    return torch.stack((sin, cos), dim=-1).flatten(-2).to(like.dtype)


def _frequencies(dim: int) -> np.ndarray:
    return rope_frequencies(dim)[0]
