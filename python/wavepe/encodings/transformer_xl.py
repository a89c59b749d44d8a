"""Transformer-XL's relative encoding [X]: sine waves of the distance, with or without biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from .. import _checks
from .._sinusoidal import sinusoidal
from .base import Encoding, register_encoding

if TYPE_CHECKING:
    from torch import Tensor


@register_encoding
@dataclasses.dataclass(frozen=True)
class TransformerXL(Encoding):
    """score(m, n) = ((q_m + u).k_n + (q_m + v).r_delta) / sqrt(d), r_delta = R_delta W_r [X].

    [X] is Dai et al., "Transformer-XL", arXiv 1901.02860. R_delta are sine waves of the distance,
    heads * d of them; u, v and W_r are learned and each head has its own. Layers share them.

    Parameters
    ----------
    biases : bool
        False leaves out u, v and W_r: score = (q.k + q.p_delta) / sqrt(d), where p are sine waves
        of the head size and nothing is learned. [W] compares with this form.
    """

    name = "transformer_xl"
    entry = "relative"

    biases: bool = True

    @property
    def learned(self) -> bool:  # type: ignore[override]
        """Tell whether there is anything to train: with biases."""
        return self.biases

    def table(
        self, length: int, head_dim: int, *, causal: bool = True
    ) -> tuple[np.ndarray, int, str]:
        """Return sine waves of the distance, float32 (w, head_dim); head_dim is even.

        With biases these are the rows that the first head begins with; `learned_table` has all.
        """
        length = _checks.integer("transformer_xl length", length, 1)
        first = 0 if _checks.flag("causal", causal) else 1 - length
        waves = sinusoidal(np.arange(first, length), self._even(head_dim))
        return waves.astype(np.float32), first, "zero"

    def parameters(self, head_dim: int, heads: int) -> dict[str, np.ndarray]:
        """Return the initial "u", "v" and "W_r", all float64.

        Their shapes are (heads, head_dim), twice, and (heads, heads * head_dim, head_dim). u and v
        are zeros. W_r hands each head every heads-th wave, head h from pair h on: r is as large as
        the sine waves themselves, each head sees slow waves and fast ones, and nothing need be
        drawn to tell heads apart. NotImplementedError without biases.
        """
        if not self.biases:
            return super().parameters(head_dim, heads)
        head_dim = self._even(head_dim)
        heads = _checks.integer("transformer_xl heads", heads, 1)
        pair = np.arange(head_dim) // 2
        odd = np.arange(head_dim) % 2  # the cosine of a pair
        projection = _checks.new_array((heads, heads * head_dim, head_dim), make=np.zeros)
        for head in range(heads):
            projection[head, 2 * (heads * pair + head) + odd, np.arange(head_dim)] = 1
        bias = np.zeros((heads, head_dim))
        return {"u": bias, "v": bias.copy(), "W_r": projection}

    def learned_table(
        self, length: int, parameters: Mapping[str, Tensor], *, causal: bool = True
    ) -> tuple[Tensor, int, str]:
        if not self.biases:
            return super().learned_table(length, parameters, causal=causal)
        from ._waves import sine_waves

        projection = parameters["W_r"]
        first = 0 if causal else 1 - length
        waves = sine_waves(first, length, projection.shape[-2], projection)
        return waves @ projection, first, "zero"

    def query_biases(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return the trained u and v (heads, head_dim); None without biases."""
        return (parameters["u"], parameters["v"]) if self.biases else None

    def _even(self, head_dim: int) -> int:
        head_dim = _checks.integer("transformer_xl head_dim", head_dim, 2)
        if head_dim % 2:
            raise ValueError(f"transformer_xl needs an even head_dim for its waves, got {head_dim}")
        return head_dim
