"""Attention sinks [O]: a learned logit of each head that takes part in the softmax."""

from __future__ import annotations

import numpy as np

from ..common import checks
from .base import Encoding
from .methods import Arrays, Tensor, Tensors, once
from .options import number, option
from .register import register_encoding


@register_encoding
class Sink(Encoding):
    """Let a head attend to nothing: a learned score without a value takes part in the softmax.

    weight(m, n) = exp(score(m, n)) / (exp(sink_h) + sum over n of exp(score(m, n))). It is a part
    to combine with others, such as "rope+sink". Each layer has its own sinks.

    Parameters
    ----------
    initial : float
        The initial value of the sinks. With a negative number, such as -8, a swap changes a
        trained model least.
    from_input : bool
        Train a w (dim,) for each head, too, which begins at zero: query m has the sink
        sink_h + w_h.x_m, for the input x of the attention layer, as in Inkling 2.

    References
    ----------
    OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025, arXiv 2508.10925; Xiao et al., "Efficient
    streaming language models with attention sinks", ICLR 2024, arXiv 2309.17453.
    """

    name = "sink"
    learned = True
    initial: float = option(0.0, number)
    from_input: bool = False

    @property
    def per_layer(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("sinks", *["s_proj"] * self.from_input)

    @once
    def learns(self) -> tuple[str, ...]:
        return ("input_sinks" if self.from_input else "sinks",)

    def parameters(self, head_dim: int, heads: int, dim: int | None = None) -> Arrays:
        """Return the initial "sinks" (heads,) and, `from_input`, "s_proj" (heads, dim), float64."""
        heads = checks.integer("sink heads", heads, 1)
        initial = {"sinks": np.zeros(heads) + self.initial}
        if self.from_input:
            initial["s_proj"] = np.zeros((heads, checks.integer("sink dim", dim, 1)))
        return initial

    def learned_sinks(self, parameters: Tensors) -> Tensor:
        return parameters["sinks"]

    def input_sinks(self, x: Tensor, parameters: Tensors) -> Tensor:
        from torch.nn.functional import linear

        weight, bias = (parameters[key].to(x.device) for key in ("s_proj", "sinks"))
        return linear(x.to(weight.dtype), weight, bias).mT
