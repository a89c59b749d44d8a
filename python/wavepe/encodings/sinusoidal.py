"""Sinusoidal absolute encodings: the Transformer's own [V] and the length-ratio ones [L]."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .._rope_frequencies import DEFAULT_THETA
from .._sinusoidal import sinusoidal
from .base import Encoding, register_encoding, sequence_length
from .options import option, positive


@register_encoding
@dataclasses.dataclass(frozen=True)
class Sinusoidal(Encoding):
    """PE[m, 2i] = sin(m w_i), PE[m, 2i+1] = cos(m w_i), w_i = theta^(-2i/dim), dim even [V].

    [V] is Vaswani et al., arXiv 1706.03762; [L] is Takase & Okazaki, NAACL 2019.

    Parameters
    ----------
    theta : float or "length"
        The base; "length" takes the length of the current sequence (LRPE [L]).
    reversed : bool
        Count from the end: position length - m instead of m (LDPE [L]).
    """

    name = "sinusoidal"
    entry = "absolute"

    theta: float | str = option(DEFAULT_THETA, positive("length"))
    reversed: bool = False

    def absolute(
        self,
        positions: ArrayLike,
        dim: int,
        *,
        length: int | None = None,
        trained_length: int | None = None,
    ) -> np.ndarray:
        theta: Any = self.theta
        if theta == "length" or self.reversed:
            length = sequence_length(self, positions, length)
            theta = float(length) if theta == "length" else theta
            if self.reversed:
                positions = np.subtract(length, positions, dtype=np.float64)
        return sinusoidal(positions, dim, theta)
