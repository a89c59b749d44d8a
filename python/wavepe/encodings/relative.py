"""Learned relative logits that the layer's input reads, as in Inkling and Inkling 2 [I]."""

from __future__ import annotations

import numpy as np

from ..arrays.relative_bias import Table
from ..common import checks
from .base import Encoding
from .methods import Arrays, Tensor, Tensors, input_queries, once
from .options import integer, number, option, positive
from .register import register_encoding
from .temperature import Temperature


@register_encoding
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
    l2_clip : float, optional
        The largest L2 norm of r in each head: a longer r is multiplied by l2_clip / (norm + 1e-6).
        Inkling 2 has 8.
    floor : float, optional
        Multiply r, after the clip, by 1 + alpha log(max((m + 1) / floor, 1)) at position m. It is
        for a model that scales its queries itself. A part "temperature:kind=inkling" multiplies
        both q and r, as Inkling and Inkling 2 do.
    alpha : float
        How much that factor grows; it needs `floor`.

    References
    ----------
    Thinking Machines, Inkling, 2026; `InklingRelativeLogits` and `Inkling2RelativePositionBias` of
    transformers.
    """

    name = "relative"
    learned = True
    per_layer = ("r_proj", "table")

    extent: int = option(1024, integer(1))
    rank: int = option(16, integer(1))
    l2_clip: float | None = option(None, positive())
    floor: float | None = option(None, positive())
    alpha: float = option(0.1, number)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor is None and "alpha" in self.options():
            raise ValueError(f"relative alpha={self.alpha} needs floor, got none")

    def table(self, length: int, head_dim: int, *, causal: bool = True) -> Table:
        """Return the initial table, which is zero, as `Encoding.table` does."""
        checks.integer("relative length", length, 1)
        checks.flag("causal", causal)
        return Table(np.zeros((self.extent, self.rank), np.float32), 0)

    @once
    def input_temperature(self) -> Temperature | None:
        return None if self.floor is None else Temperature("inkling", self.floor, self.alpha)

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
        r_proj = np.random.default_rng(0).standard_normal((heads, self.rank, dim)) / np.sqrt(dim)
        return {"r_proj": r_proj, "table": np.zeros((self.extent, self.rank))}

    def learned_table(self, length: int, parameters: Tensors, *, causal: bool = True) -> Table:
        return Table(parameters["table"], 0)

    def input_query(self, x: Tensor, parameters: Tensors) -> Tensor:
        r = input_queries(x, parameters["r_proj"])
        if self.l2_clip is None:
            return r
        from ..ops._common import wide

        precise = r.to(wide(r))
        norm = precise.norm(dim=-1, keepdim=True)
        return (precise * (self.l2_clip / (norm + 1e-6)).clamp(max=1)).to(r.dtype)
