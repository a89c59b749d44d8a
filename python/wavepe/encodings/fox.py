"""The forget gate of the Forgetting Transformer [G]: a decay that the layer's input decides."""

from __future__ import annotations

import numpy as np

from ..common import checks
from .base import Encoding
from .methods import Arrays, Tensor, Tensors
from .register import register_encoding


@register_encoding
class FoX(Encoding):
    """Let each token decide how much of what came before is forgotten: FoX.

    score(m, n) = q_m.k_n / sqrt(d) + sum over the tokens l = n+1..m of log f_l, with the forget
    gate f_l = sigmoid(x_l w_h + b_h) of head h. x is the input of the attention layer. Each layer
    has its own w and b.

    References
    ----------
    Lin et al., "Forgetting transformer: softmax attention with a forget gate", ICLR 2025,
    arXiv 2503.02130.
    """

    name = "fox"
    learned = True
    per_layer = ("f_proj", "f_bias")

    def parameters(self, head_dim: int, heads: int, dim: int | None = None) -> Arrays:
        """Return the initial "f_proj" (heads, dim) and "f_bias" (heads,): zeros, float64.

        So all gates begin at 1/2, the middle of the authors' initial values.
        """
        heads = checks.integer("fox heads", heads, 1)
        dim = checks.integer("fox dim", dim, 1)
        sizes = {"f_proj": (heads, dim), "f_bias": (heads,)}
        return {key: np.zeros(size) for key, size in sizes.items()}

    def input_decay(self, x: Tensor, parameters: Tensors) -> Tensor:
        from torch.nn.functional import linear, logsigmoid

        weight, bias = (parameters[key].to(x.device) for key in ("f_proj", "f_bias"))
        return logsigmoid(linear(x.to(weight.dtype), weight, bias)).mT
