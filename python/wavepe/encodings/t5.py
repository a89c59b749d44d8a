"""The relative bias of T5 [T]: each head learns a number for each bucket of distances."""

from __future__ import annotations

import math

import numpy as np

from ..arrays.relative_bias import Bias
from ..common import checks
from .base import Encoding
from .methods import Arrays, Tensors
from .options import integer, option
from .register import register_encoding


@register_encoding
class T5(Encoding):
    """Add a learned number for the bucket of the distance to the score: T5's relative bias.

    score(m, n) = q_m.k_n / sqrt(d) + b_h[bucket(delta)], where b is learned. All layers use the
    same b. The first half of the buckets hold one distance each. The other buckets get wider with
    the logarithm of the distance. The last bucket also holds all distances from `max_distance` on.
    T5 itself does not divide q.k by sqrt(d).

    Parameters
    ----------
    buckets : int
        The number of buckets. With a causal mask, all are for keys before the query. Without one,
        half of them are for keys after the query.
    max_distance : int
        All distances from here on are in the last bucket, which begins a little earlier. It must
        be above half of `buckets`.

    References
    ----------
    Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text
    transformer", JMLR 2020, arXiv 1910.10683.
    """

    name = "t5"
    learned = True

    buckets: int = option(32, integer(2))
    max_distance: int = option(128, integer(2))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"t5 max_distance must be above {self.buckets // 2}, half of the buckets; got "
                f"{self.max_distance}"
            )

    def bias(self, length: int, heads: int, *, causal: bool = True) -> Bias:
        checks.integer("t5 length", length, 1)
        causal = checks.flag("causal", causal)
        b = self.parameters(1, heads)["b"][:, _buckets(self.buckets, self.max_distance, causal)]
        return Bias(b, 0 if causal else -self.max_distance, "edge")

    def parameters(self, head_dim: int, heads: int) -> Arrays:
        """Return the initial "b": zeros, float64 (heads, buckets)."""
        heads = checks.integer("t5 heads", heads, 1)
        return {"b": np.zeros((heads, self.buckets))}

    def learned_bias(self, length: int, parameters: Tensors, *, causal: bool = True) -> Bias:
        from ..ops._device_constant import device_constant

        b = parameters["b"]
        index = device_constant(_buckets, self.buckets, self.max_distance, causal).on(b)
        return Bias(b[:, index], 0 if causal else -self.max_distance, "edge")


def _buckets(buckets: int, max_distance: int, causal: bool) -> np.ndarray:
    """Return the bucket of each delta from 0, or from -`max_distance`, to `max_distance`."""
    delta = np.arange(0 if causal else -max_distance, max_distance + 1)
    buckets = buckets if causal else buckets // 2
    exact = max(buckets // 2, 1)
    distance = np.abs(delta)
    with np.errstate(divide="ignore"):
        # 0 where the wide buckets begin, 1 at max_distance
        position = np.log(distance.astype(np.float32) / exact) / math.log(max_distance / exact)
        wide = exact + (position * np.float32(buckets - exact)).clip(0).astype(np.int64)
    index = np.where(distance < exact, distance, np.minimum(wide, buckets - 1))
    return index + np.where(delta < 0, buckets, 0)  # delta < 0: keys after the query
