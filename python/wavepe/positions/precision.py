"""Parameters that stay in float32 where a model is cast to less."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

NARROW = (torch.bfloat16, torch.float16)


class AtLeastFloat32(nn.Module):
    """Its parameters are float32 in a model of bfloat16 or float16, float64 where it is cast to
    that: a step of training is smaller than bfloat16's distance between a shift and its neighbour.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def kept(tensor: Tensor) -> Tensor:
            given = fn(tensor)
            return tensor.to(given.device) if given.dtype in NARROW else given

        return super()._apply(kept, recurse)
