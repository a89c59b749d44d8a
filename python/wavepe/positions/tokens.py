"""Positions of tokens, and steps along them in a form that exporters take, those of ONNX, too."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._compiler import wants_standard


def token_positions(real: Tensor, segments: Tensor | None = None) -> Tensor:
    """Return the positions of tokens (B, n), int64, if only `real` ones (B, n) are counted.

    `segments` (B|1, n) are the numbers of the tokens' sequences, each of which counts from 0.
    """
    counted = real.long().cumsum(-1)
    if segments is not None:
        begins = segments != value_before(segments, segments[:, :1] + 1)
        counted = counted - largest_so_far(torch.where(begins, counted - real.long(), 0))
    return (counted - 1).clamp(min=0)


def value_before(x: Tensor, first: Tensor | int) -> Tensor:
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
