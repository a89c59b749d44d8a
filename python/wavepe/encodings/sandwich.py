"""Sandwich [C]: the inner product of two sinusoidal encodings is a bias."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.relative_bias import Bias
from ..arrays.sinusoidal import sinusoidal
from ..common import checks
from .base import Encoding
from .options import option
from .register import register_encoding


def _even(label: str, value: Any) -> int:
    dim = checks.integer(label, value, 2)
    if dim % 2 or dim > 1 << 16:
        raise ValueError(f"{label} must be even and at most 65536, got {dim}")
    return dim


@register_encoding
class Sandwich(Encoding):
    """Add the inner product of two sinusoidal encodings to the score: Sandwich.

    score(m, n) = q_m.k_n / sqrt(d) + (s_m.s_n) H / (8 h), where s_m is the sinusoidal encoding of
    position m in `dim` dims, H the number of heads and h = 1..H the head. The product s_m.s_n is
    the sum of cos(delta w_i) over dim / 2 frequencies w_i. Nothing is learned.

    Parameters
    ----------
    dim : int
        Size of the sinusoidal encoding, even. The authors use 128.

    References
    ----------
    Chi et al., "Dissecting transformer length extrapolation via the lens of receptive field
    analysis", ACL 2023, arXiv 2212.10356.

    Examples
    --------
    >>> import wavepe
    >>> bias, first, beyond = wavepe.encoding("sandwich:dim=2").bias(3, heads=1)
    >>> bias.round(3)
    array([[ 0.125,  0.068, -0.052]])
    """

    name = "sandwich"

    dim: int = option(128, _even)

    def bias(self, length: int, heads: int, *, causal: bool = True) -> Bias:
        length = checks.integer("sandwich length", length, 1)
        heads = checks.integer("sandwich heads", heads, 1)
        first = 0 if checks.flag("causal", causal) else 1 - length
        cosines = sinusoidal(np.arange(first, length), self.dim)[:, 1::2].sum(-1)
        ratio = 8 * np.arange(1, heads + 1) / heads
        return Bias(cosines / ratio[:, None], first)
