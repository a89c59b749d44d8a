"""Sandwich [C]: the product of two sinusoidal encodings as a bias."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from .. import _checks
from .._sinusoidal import sinusoidal
from .base import Encoding, register_encoding
from .options import option


def _even(label: str, value: Any) -> int:
    dim = _checks.integer(label, value, 2)
    if dim % 2 or dim > 1 << 16:
        raise ValueError(f"{label} must be even and at most 65536, got {dim}")
    return dim


@register_encoding
@dataclasses.dataclass(frozen=True)
class Sandwich(Encoding):
    """score(m, n) = q_m.k_n / sqrt(d) + (s_m.s_n) H / (8 h), s sinusoidal of `dim` numbers [C].

    [C] is Chi et al., "Dissecting transformer length extrapolation via the lens of receptive field
    analysis", arXiv 2212.10356. s_m.s_n is the sum of cos(delta w_i) over the dim / 2 frequencies,
    and h = 1..H the head. Nothing is learned.

    Parameters
    ----------
    dim : int
        Even; [C] has 128.
    """

    name = "sandwich"
    entry = "bias"

    dim: int = option(128, _even)

    def bias(self, length: int, heads: int, *, causal: bool = True) -> tuple[np.ndarray, int, str]:
        length = _checks.integer("sandwich length", length, 1)
        heads = _checks.integer("sandwich heads", heads, 1)
        first = 0 if _checks.flag("causal", causal) else 1 - length
        cosines = sinusoidal(np.arange(first, length), self.dim)[:, 1::2].sum(-1)
        ratio = 8 * np.arange(1, heads + 1) / heads
        return cosines / ratio[:, None], first, "zero"
