"""Transformer-XL's relative encoding [X]: sine waves of the distance, with or without biases."""

from __future__ import annotations

import numpy as np

from ..arrays.relative_bias import Table
from ..arrays.rope_frequencies import rope_frequencies
from ..arrays.sinusoidal import sinusoidal
from ..common import checks
from .base import Encoding
from .methods import Arrays, Query, Tensors
from .register import register_encoding


@register_encoding
class TransformerXL(Encoding):
    """Add the product of the query with sine waves of the distance to the score: Transformer-XL.

    score(m, n) = ((q_m + u).k_n + (q_m + v).r_delta) / sqrt(d), where r_delta = R_delta W_r.
    R_delta holds heads * d sine waves of the distance. Each head learns its own u, v and W_r. All
    layers use the same ones.

    Parameters
    ----------
    biases : bool
        False leaves out u, v and W_r. Then score = (q.k + q.p_delta) / sqrt(d), where p_delta
        holds d sine waves of the distance, and nothing is learned. The wavelet paper compares with
        this form.

    References
    ----------
    Dai et al., "Transformer-XL: attentive language models beyond a fixed-length context",
    ACL 2019, arXiv 1901.02860.
    """

    name = "transformer_xl"

    biases: bool = True

    @property
    def learned(self) -> bool:  # type: ignore[override]
        """Whether a model trains parameters of the encoding: only with biases."""
        return self.biases

    def table(self, length: int, head_dim: int, *, causal: bool = True) -> Table:
        """Return sine waves of the distance, float32 (w, head_dim), as `Encoding.table` does.

        `head_dim` must be even. With biases, the table has only the initial rows of the first
        head; `learned_table` returns those of all heads.
        """
        length = checks.integer("transformer_xl length", length, 1)
        first = 0 if checks.flag("causal", causal) else 1 - length
        head_dim = checks.even("transformer_xl head_dim", head_dim, 2)
        waves = sinusoidal(np.arange(first, length), head_dim)
        return Table(waves.astype(np.float32), first)

    def parameters(self, head_dim: int, heads: int) -> Arrays:
        """Return the initial "u", "v" and "W_r", all float64.

        u and v are zeros, (heads, head_dim). W_r is (heads, heads * head_dim, head_dim) and selects
        pairs of waves: head h takes the pairs h, h + heads, h + 2 heads, and so on. So each head
        sees slow and fast waves, heads differ without random numbers, and r is as large as the sine
        waves. Without biases it raises NotImplementedError.
        """
        if not self.biases:
            return super().parameters(head_dim, heads)
        head_dim = checks.even("transformer_xl head_dim", head_dim, 2)
        heads = checks.integer("transformer_xl heads", heads, 1)
        pair = np.arange(head_dim) // 2
        odd = np.arange(head_dim) % 2  # 1 for the cosine of a pair
        projection = np.zeros((heads, heads * head_dim, head_dim))
        for head in range(heads):
            projection[head, 2 * (heads * pair + head) + odd, np.arange(head_dim)] = 1
        bias = np.zeros((heads, head_dim))
        return {"u": bias, "v": bias.copy(), "W_r": projection}

    def learned_table(self, length: int, parameters: Tensors, *, causal: bool = True) -> Table:
        if not self.biases:
            return super().learned_table(length, parameters, causal=causal)
        import torch

        from ..ops._common import wide
        from ..ops._device_constant import device_constant
        from ..ops._rope_table import rope_table

        projection = parameters["W_r"]
        first = 0 if causal else 1 - length
        positions = torch.arange(first, length, device=projection.device)
        inv_freq = device_constant(_frequencies, projection.shape[-2]).on(projection)
        cos, sin = rope_table(positions, inv_freq, dtype=wide(projection))
        waves = torch.stack((sin, cos), -1).flatten(-2).to(projection.dtype)
        return Table(waves @ projection, first)

    def learned_query(self, parameters: Tensors) -> Query:
        if not self.biases:
            return super().learned_query(parameters)
        return Query(parameters["u"], parameters["v"])


def _frequencies(dim: int) -> np.ndarray:
    return rope_frequencies(dim)[0]
