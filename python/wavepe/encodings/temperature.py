"""Queries that grow with the logarithm of the position: Llama 4, Ministral 3, Inkling [I]."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .base import Encoding
from .options import number, one_of, option, positive
from .register import register_encoding


@register_encoding
class Temperature(Encoding):
    """Multiply queries by a factor that grows with the logarithm of their position.

    It keeps attention sharp among many keys. It is a part to combine with others, such as
    "rope+temperature". The factor multiplies products with keys and with tables, but no slope and
    no bias.

    Parameters
    ----------
    kind : str
        The rule, by the model that has it. "llama4": 1 + alpha log(1 + floor((m + 1) / floor)).
        "ministral3": 1 + alpha log(1 + floor(m / floor)). "inkling":
        1 + alpha log(max((m + 1) / floor, 1)).
    floor : float
        The position up to which the factor is 1.
    alpha : float
        How much the factor grows.

    References
    ----------
    Nakanishi, "Scalable-Softmax is superior for attention", 2025, arXiv 2501.19399; the model files
    llama4, ministral3 and inkling of transformers.

    Examples
    --------
    >>> import wavepe
    >>> wavepe.encoding("temperature:floor=100").temperature([0, 98, 99, 999]).round(3)
    array([1.   , 1.   , 1.069, 1.24 ])
    """

    name = "temperature"

    kind: str = option("llama4", one_of("llama4", "ministral3", "inkling"))
    floor: float = option(8192.0, positive())
    alpha: float = option(0.1, number)

    def temperature(self, positions: ArrayLike) -> np.ndarray:
        m: Any = positions
        xp: Any = np
        if hasattr(m, "is_floating_point"):  # a Tensor
            import torch

            xp, m = torch, m.double()
        else:
            m = np.asarray(m, np.float64)
        m = xp.clip(m, 0, None)  # padding may stand before the first token
        if self.kind == "inkling":
            logarithm = xp.log(xp.clip((m + 1) / self.floor, 1.0, None))
        else:
            logarithm = xp.log1p(xp.floor((m + (self.kind == "llama4")) / self.floor))
        factors: np.ndarray = 1 + self.alpha * logarithm
        return factors
