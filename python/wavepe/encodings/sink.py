"""Attention sinks [O]: a learned logit of each head that takes part in the softmax."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..common import checks
from .base import Encoding
from .methods import Arrays, Tensor, Tensors
from .options import number, option
from .register import register_encoding


@register_encoding
@dataclasses.dataclass(frozen=True)
class Sink(Encoding):
    """Let a head attend to nothing: a learned score without a value takes part in the softmax.

    weight(m, n) = exp(score(m, n)) / (exp(sink_h) + sum over n of exp(score(m, n))). It is a part
    to combine with others, such as "rope+sink". Each layer has its own sinks.

    Parameters
    ----------
    initial : float
        The initial value of the sinks. With a negative number, such as -8, a swap changes a
        trained model least.

    References
    ----------
    OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025, arXiv 2508.10925; Xiao et al., "Efficient
    streaming language models with attention sinks", ICLR 2024, arXiv 2309.17453.
    """

    name = "sink"
    learned = True
    per_layer = ("sinks",)

    initial: float = option(0.0, number)

    def parameters(self, head_dim: int, heads: int) -> Arrays:
        """Return the initial "sinks", float64 (heads,)."""
        heads = checks.integer("sink heads", heads, 1)
        return {"sinks": np.zeros(heads) + self.initial}

    def learned_sinks(self, parameters: Tensors) -> Tensor:
        return parameters["sinks"]
