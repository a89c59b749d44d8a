"""xPos [E]: RoPE whose products shrink with the distance, each pair at its own rate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..arrays.rope import rope_table
from ..arrays.rope_frequencies import DEFAULT_THETA, rope_frequencies
from .base import Encoding
from .methods import Tensor, Tensors
from .options import flag, option, positive
from .register import register_encoding


@register_encoding
class XPos(Encoding):
    """Rotate as RoPE, and multiply the product of pair i by zeta_i^(delta / scale_base): xPos.

    zeta_i = (2i/d + gamma) / (1 + gamma) for i = 0..d/2-1. Slow pairs keep their products over long
    distances, and fast ones lose them.

    Parameters
    ----------
    theta : float
        The base of the rotation.
    interleaved : bool, optional
        As in `RoPE`.
    scale_base : float
        The distance over which a product shrinks by zeta.
    gamma : float
        How much the slowest shrinking differs from the fastest.

    References
    ----------
    Sun et al., "A length-extrapolatable transformer", ACL 2023, arXiv 2212.10554.
    """

    name = "xpos"

    theta: float = option(DEFAULT_THETA, positive())
    interleaved: bool | None = option(None, flag)
    scale_base: float = option(512.0, positive())
    gamma: float = option(0.4, positive())

    def frequencies(self, head_dim: int, **_: Any) -> tuple[np.ndarray, float]:
        """Return the frequencies of the pairs, and 1, as `RoPE.frequencies`."""
        return rope_frequencies(head_dim, self.theta)

    def rope_table(
        self, positions: ArrayLike, head_dim: int, **_: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        return rope_table(positions, self.frequencies(head_dim)[0])

    def score_vectors(
        self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, parameters: Tensors
    ) -> tuple[Tensor, Tensor]:
        import torch

        from ..ops._common import wide
        from ..ops._torch_private import holds

        d, tokens = q.shape[-1], queries.shape[-1]
        pairs = torch.arange(d // 2, device=q.device, dtype=torch.float64)
        rate = torch.log((2 * pairs / d + self.gamma) / (1 + self.gamma)) / self.scale_base
        rate = rate.repeat_interleave(2) if self.interleaved else rate.repeat(2)
        most = 600.0 if q.dtype == torch.float64 else 80.0  # exp(most) is far from overflow
        longest = -most * self.scale_base / math.log(self.gamma / (1 + self.gamma))
        if not holds(tokens <= longest):
            raise ValueError(
                f"xpos in {q.dtype} has factors for at most {int(longest)} queries, got {tokens}: "
                "give a larger scale_base, or a wider dtype"
            )
        # From the last query on, so that far keys shrink to zero. Later keys are not seen.
        last = torch.nn.functional.pad(queries, (1, 0))[..., -1:]
        of_queries = (queries - last)[..., None] * rate
        of_keys = ((last - keys)[..., None] * rate).clamp(max=most)
        q_factor, k_factor = (x.exp().unsqueeze(-3).to(wide(q)) for x in (of_queries, of_keys))
        return (q * q_factor).to(q.dtype), (k * k_factor).to(k.dtype)
