"""PoPE [P]: magnitudes and phases, where only the phases depend on the position."""

from __future__ import annotations

import numpy as np

from ..common import checks
from .base import Encoding
from .methods import Arrays, Tensor, Tensors
from .options import option, positive
from .register import register_encoding


@register_encoding
class PoPE(Encoding):
    """Take the elements of q and k as magnitudes, and turn each one by its position: PoPE.

    score(m, n) = sum over c of softplus(q_mc) softplus(k_nc) cos((m - n) w_c - delta_hc) / sqrt(d),
    where w_c = theta^(-c/d) for c = 0..d-1. Each head of a layer learns its phases delta.

    Parameters
    ----------
    theta : float
        The base of the frequencies.

    References
    ----------
    Gopalakrishnan et al., "Decoupling the what and where with polar coordinate positional
    embeddings", 2025, arXiv 2509.10534.
    """

    name = "pope"
    learned = True
    per_layer = ("delta",)

    theta: float = option(10000.0, positive())

    def parameters(self, head_dim: int, heads: int) -> Arrays:
        """Return the initial "delta" (heads, head_dim): zeros, float64."""
        heads = checks.integer("pope heads", heads, 1)
        head_dim = checks.integer("pope head_dim", head_dim, 1)
        return {"delta": np.zeros((heads, head_dim))}

    def score_vectors(
        self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, parameters: Tensors
    ) -> tuple[Tensor, Tensor]:
        return self._turned(q, queries, parameters["delta"]), self._turned(k, keys, None)

    def _turned(self, x: Tensor, places: Tensor, delta: Tensor | None) -> Tensor:
        """Return softplus(x) e^(i phase) as real and imaginary parts: (B, heads, L, 2 d)."""
        import torch

        from ..ops._common import wide
        from ..ops._rope_table import rope_table

        c = torch.arange(x.shape[-1], dtype=torch.float64, device=x.device)
        frequencies = torch.exp(c * (-np.log(self.theta) / x.shape[-1]))
        cos, sin = (
            y.unsqueeze(-3) for y in rope_table(places, frequencies, dtype=wide(x))
        )  # (B|1, 1, L, d)
        if delta is not None:  # the phase is less by delta
            cos_d, sin_d = (y.to(x.device, cos.dtype)[:, None] for y in (delta.cos(), delta.sin()))
            cos, sin = cos * cos_d + sin * sin_d, sin * cos_d - cos * sin_d
        size = torch.nn.functional.softplus(x.to(cos.dtype))
        return torch.cat([size * cos, size * sin], -1).to(x.dtype)
