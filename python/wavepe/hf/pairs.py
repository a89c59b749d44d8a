"""Which elements of a head a family rotates together, and how its angles are written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops

APPLY = "apply_rotary_pos_emb"  # the function that rotates, a global of a family's modelling file


class Layout(NamedTuple):
    """Order of the pairs and form of the angles in a family."""

    interleaved: bool  # whether pairs are (2i, 2i + 1); else they are (i, i + h)
    widen: Callable[[Tensor], Tensor]  # from one value a pair, (..., h), to the rotary's table
    narrow: Callable[[Tensor], Tensor]  # the inverse

    @property
    def pairs(self) -> str:
        """The pairs, for messages."""
        return "(2i, 2i+1)" if self.interleaved else "(i, i + d/2)"


# Functions with names, because a model that is pickled holds them.
def _in_halves(pairs: Tensor) -> Tensor:
    return torch.cat((pairs, pairs), -1)


def _first_half(table: Tensor) -> Tensor:
    return table[..., : table.shape[-1] // 2]


def _every_second(table: Tensor) -> Tensor:
    return table[..., ::2]


def _as_it_is(table: Tensor) -> Tensor:
    return table


LLAMA = Layout(False, _in_halves, _first_half)
GPT_OSS = Layout(False, _as_it_is, _as_it_is)
GLM = Layout(True, _in_halves, _first_half)
COHERE = Layout(True, partial(torch.repeat_interleave, repeats=2, dim=-1), _every_second)


@torch.no_grad()
def agrees(layout: Layout, apply: Callable[..., Any], device: torch.device | str = "cpu") -> bool:
    """Return whether `apply(q, k, cos, sin)` rotates these pairs, given angles in this form."""
    with torch.device(device), torch.inference_mode(False):
        q, k, angles = (torch.arange(n, dtype=torch.float32) for n in (240, 80, 40))
    q, k, angles = q.sin().view(2, 3, 5, 8), k.cos().view(2, 1, 5, 8), 1 + angles.view(2, 5, 4)
    cos, sin = angles.cos(), angles.sin()
    expected = ops.rope_qk(q, k, cos, sin, interleaved=layout.interleaved)
    try:
        rotated = apply(q, k, layout.widen(cos), layout.widen(sin))
        return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(rotated, expected, strict=True))
    except Exception:  # an unknown function may raise anything for these arguments
        return False
