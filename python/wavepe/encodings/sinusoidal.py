"""Sinusoidal absolute encodings: the Transformer's own [V] and the length-ratio ones [L]."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..arrays.rope_frequencies import DEFAULT_THETA
from ..arrays.sinusoidal import sinusoidal
from .base import Encoding, sequence_length
from .options import option, positive
from .register import register_encoding


@register_encoding
class Sinusoidal(Encoding):
    """Add sine waves of the position to the token embedding.

    The vector of position m holds sin(m w_i) at index 2i and cos(m w_i) at index 2i + 1, where
    w_i = theta^(-2i/dim). `dim` is even.

    Parameters
    ----------
    theta : float or "length"
        The base. "length" is the length of the current sequence: length-ratio encoding (LRPE).
    reversed : bool
        Use the position length - m instead of m: length-difference encoding (LDPE).

    References
    ----------
    Vaswani et al., "Attention is all you need", NeurIPS 2017, arXiv 1706.03762. LRPE and LDPE:
    Takase and Okazaki, "Positional encoding to control output sequence length", NAACL 2019,
    arXiv 1904.07418.
    """

    name = "sinusoidal"

    theta: float | str = option(DEFAULT_THETA, positive("length"))
    reversed: bool = False

    def absolute(
        self, positions: ArrayLike, dim: int, *, length: int | None = None,
        trained_length: int | None = None,
    ) -> np.ndarray:  # fmt: skip
        theta: Any = self.theta
        if theta == "length" or self.reversed:
            length = sequence_length(self, positions, length)
            theta = float(length) if theta == "length" else theta
            if self.reversed:
                positions = np.subtract(length, positions, dtype=np.float64)
        return sinusoidal(positions, dim, theta)
