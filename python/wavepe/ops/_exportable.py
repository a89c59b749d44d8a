"""Small steps in a form that exporters take, those of ONNX, too."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._compiler import wants_standard


def within_a_turn(angles: Tensor) -> Tensor:
    """Return angles of float64 less whole turns, at most pi in size.

    Few runtimes have a cosine of float64. A turn is a tensor, because ONNX makes numbers float32.
    """
    turn = torch.tensor(2 * math.pi, dtype=torch.float64, device=angles.device)
    return angles - turn * torch.round(angles / turn)


def of_token_before(x: Tensor, first: Tensor | int) -> Tensor:
    """Return (B, n): the value of the token before each one, and `first` before the first.

    To slice n - 1 tokens would tell an exporter that n is not 2.
    """
    return torch.where(torch.arange(x.shape[1], device=x.device) == 0, first, x.roll(1, -1))


def largest_so_far(x: Tensor) -> Tensor:
    """Return (..., n): the largest of x (..., n) up to each place, at least -1."""
    if not wants_standard():
        return x.cummax(-1).values
    n = x.shape[-1]  # ONNX has no cummax
    place = torch.arange(n, device=x.device)
    return torch.where(place <= place[:, None], x[..., None, :], -1).amax(-1)
