"""Shaw's relative position representations [S]: a learned table over clipped distances."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .. import _checks
from .._sinusoidal import sinusoidal
from .base import Encoding, register_encoding
from .options import option

if TYPE_CHECKING:
    from torch import Tensor

# Far beyond any use; a larger number would ask for more memory than there is.
_LARGEST_CLIP = 1 << 20


def _clip(label: str, value: Any) -> int:
    clip = _checks.integer(label, value, 1)
    if clip > _LARGEST_CLIP:
        raise ValueError(f"{label} must be at most {_LARGEST_CLIP}, got {clip}")
    return clip


@register_encoding
@dataclasses.dataclass(frozen=True)
class Shaw(Encoding):
    """score(m, n) = q_m.(k_n + a_clip(n - m, -clip, clip)) / sqrt(d), a learned [S].

    [S] is Shaw et al., "Self-attention with relative position representations", arXiv 1803.02155.
    Keys alone get a term, not the values. Heads and layers share the table.

    Parameters
    ----------
    clip : int
        Distances beyond it share a row; [S] has 16.
    """

    name = "shaw"
    entry = "relative"
    learned: ClassVar[bool] = True

    clip: int = option(16, _clip)

    def table(
        self, length: int, head_dim: int, *, causal: bool = True
    ) -> tuple[np.ndarray, int, str]:
        """`learned_table` of the initial values, float32."""
        _checks.integer("shaw length", length, 1)
        causal = _checks.flag("causal", causal)
        initial = self.parameters(head_dim, 1)["table"].astype(np.float32)
        return (*self._by_delta(initial, causal), "edge")

    def parameters(self, head_dim: int, heads: int) -> dict[str, np.ndarray]:
        """The initial "table", float64 (2 * clip + 1, head_dim): row n - m + clip.

        Rows begin as the sine waves of m - n: fixed numbers, large enough to tell rows apart from
        the first step on. The model of `wavepe compare` had a perplexity of 4.23 after 800 steps
        from there, 4.22 from random numbers of that size, 4.50 from zeros (means of two seeds).
        """
        head_dim = _checks.integer("shaw head_dim", head_dim, 1)
        delta = np.arange(self.clip, -self.clip - 1, -1)
        return {"table": sinusoidal(delta, head_dim + head_dim % 2)[:, :head_dim]}

    def learned_table(
        self, length: int, parameters: Mapping[str, Tensor], *, causal: bool = True
    ) -> tuple[Tensor, int, str]:
        """Rows for delta = m - n, differentiable in the trained table.

        Parameters
        ----------
        length : int
            The sequence length; the rows are the same for every one.
        parameters : mapping
            Tensor "table" (2 * clip + 1, head_dim), as `parameters` begins it.
        causal : bool
            Rows for delta = 0..clip; otherwise for -clip..clip.

        Returns
        -------
        p : Tensor (w, head_dim) of its dtype
        first : int
        beyond : str
            "edge": a larger distance has the last row.
        """
        return (*self._by_delta(parameters["table"], causal), "edge")

    def _by_delta(self, rows: Any, causal: bool) -> tuple[Any, int]:
        """Rows n - m = -clip..clip, an array or a tensor, by rising delta; and the first delta."""
        if causal:
            return _turned(rows[: self.clip + 1]), 0
        return _turned(rows), -self.clip


def _turned(rows: Any) -> Any:
    """The rows from the last to the first, in new memory: torch takes no negative stride."""
    return np.flip(rows, 0).copy() if isinstance(rows, np.ndarray) else rows.flip(0)
