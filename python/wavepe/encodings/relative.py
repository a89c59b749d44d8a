"""Learned relative logits that the layer's input reads, as in Inkling [I]."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..arrays.relative_bias import Table
from ..common import checks
from .base import Encoding
from .methods import Arrays, Tensor, Tensors, input_queries
from .options import integer, option
from .register import register_encoding


@register_encoding
@dataclasses.dataclass(frozen=True)
class Relative(Encoding):
    """Add learned functions of the distance, which each token weights: Inkling's relative logits.

    score(m, n) = q_m.k_n / sqrt(d) + r_m.p_delta. r_m = W_h x_m comes from the input x of the
    attention layer, and has a few numbers for each head. The heads of a layer share the table p.
    Each layer has its own W and p. From the distance `extent` on nothing is added.

    Parameters
    ----------
    extent : int
        The number of distances that the table has.
    rank : int
        The number of columns of the table, and of numbers in r.

    References
    ----------
    Thinking Machines, Inkling, 2026; `InklingRelativeLogits` of transformers.
    """

    name = "relative"
    learned = True
    per_layer = ("r_proj", "table")

    extent: int = option(1024, integer(1))
    rank: int = option(16, integer(1))

    def table(self, length: int, head_dim: int, *, causal: bool = True) -> Table:
        """Return the initial table, which is zero, as `Encoding.table` does."""
        checks.integer("relative length", length, 1)
        checks.flag("causal", causal)
        return Table(np.zeros((self.extent, self.rank), np.float32), 0)

    def table_columns(self, head_dim: int) -> int:
        return self.rank

    def parameters(self, head_dim: int, heads: int, dim: int | None = None) -> Arrays:
        """Return the initial "r_proj" (heads, rank, dim) and "table" (extent, rank), float64.

        The table is zero, so the term begins at zero, and so do the distances that training never
        meets. r_proj holds normal numbers, the same in each layer. The elements of r are about as
        large as those of x.
        """
        heads = checks.integer("relative heads", heads, 1)
        dim = checks.integer("relative dim", dim, 1)
        r_proj = np.random.default_rng(0).standard_normal((heads, self.rank, dim))
        table = np.zeros((self.extent, self.rank))
        return {"r_proj": r_proj / np.sqrt(dim), "table": table}

    def learned_table(self, length: int, parameters: Tensors, *, causal: bool = True) -> Table:
        return Table(parameters["table"], 0)

    def input_query(self, x: Tensor, parameters: Tensors) -> Tensor:
        return input_queries(x, parameters["r_proj"])
