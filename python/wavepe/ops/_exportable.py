"""Small steps in a form that exporters take, those of ONNX, too."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def within_a_turn(angles: Tensor) -> Tensor:
    """Return angles of float64 less whole turns, at most pi in size.

    Few runtimes have a cosine of float64. A turn is a tensor, because ONNX makes numbers float32.
    """
    turn = torch.tensor(2 * math.pi, dtype=torch.float64, device=angles.device)
    return angles - turn * torch.round(angles / turn)
