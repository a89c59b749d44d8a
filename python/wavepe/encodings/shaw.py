"""Shaw's relative position representations [S]: a learned table with a row for each distance."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.relative_bias import Table
from ..arrays.sinusoidal import sinusoidal
from ..common import checks
from .base import Encoding
from .methods import Arrays, Tensors
from .options import integer, option
from .register import register_encoding


@register_encoding
class Shaw(Encoding):
    """Add a learned vector of the distance to each key: Shaw's relative representations.

    score(m, n) = q_m.(k_n + a[n - m]) / sqrt(d), where the table a is learned and n - m is clipped
    to -clip..clip. Values get no vector. All heads and layers use the same table.

    Parameters
    ----------
    clip : int
        The largest distance with a row of its own. All larger distances use its row. The authors
        use 16.

    References
    ----------
    Shaw et al., "Self-attention with relative position representations", NAACL 2018,
    arXiv 1803.02155.
    """

    name = "shaw"
    learned = True

    clip: int = option(16, integer(1))

    def table(self, length: int, head_dim: int, *, causal: bool = True) -> Table:
        checks.integer("shaw length", length, 1)
        causal = checks.flag("causal", causal)
        initial = self.parameters(head_dim, 1)["table"].astype(np.float32)
        return Table(*self._by_delta(initial, causal), "edge")

    def parameters(self, head_dim: int, heads: int) -> Arrays:
        """Return the initial "table", float64 (2 * clip + 1, head_dim).

        The distance n - m has the row n - m + clip. Rows begin as the sine waves of m - n. These
        numbers are fixed, and tell the rows apart in the first step: models are worse from zeros.
        """
        head_dim = checks.integer("shaw head_dim", head_dim, 1)
        delta = np.arange(self.clip, -self.clip - 1, -1)
        return {"table": sinusoidal(delta, head_dim + head_dim % 2)[:, :head_dim]}

    def learned_table(self, length: int, parameters: Tensors, *, causal: bool = True) -> Table:
        return Table(*self._by_delta(parameters["table"], causal), "edge")

    def _by_delta(self, rows: Any, causal: bool) -> tuple[Any, int]:
        """Return rows of n - m = -clip..clip in the order of delta = m - n, and the first delta."""
        if causal:
            return _reversed(rows[: self.clip + 1]), 0
        return _reversed(rows), -self.clip


def _reversed(rows: Any) -> Any:
    """Return the rows in reverse order, in new memory: torch takes no negative stride."""
    return np.flip(rows, 0).copy() if isinstance(rows, np.ndarray) else rows.flip(0)
