"""KERPLE [K]: each head learns a kernel of the distance."""

from __future__ import annotations

import numpy as np

from ..arrays.relative_bias import Bias
from ..common import checks
from .base import Encoding
from .methods import Arrays, Tensors
from .options import one_of, option
from .register import register_encoding


@register_encoding
class Kerple(Encoding):
    """Subtract a learned kernel of the distance from the score: KERPLE.

    score(m, n) = q_m.k_n / sqrt(d) - kernel_h(abs(delta)), with two learned numbers r1 and r2 for
    each head h. All layers use the same numbers.

    Parameters
    ----------
    kind : str
        "log" takes the kernel r1 log(1 + r2 abs(delta)), with r1 and r2 above 0. "power" takes
        r1 abs(delta)^r2, with r1 above 0 and r2 between 0 and 2.

    References
    ----------
    Chi et al., "KERPLE: kernelized relative positional embedding for length extrapolation",
    NeurIPS 2022, arXiv 2205.09921.

    Examples
    --------
    >>> import wavepe
    >>> bias, first, beyond = wavepe.encoding("kerple").bias(3, heads=1)
    >>> bias.round(3) + 0.0
    array([[ 0.   , -0.405, -0.693]])
    """

    name = "kerple"
    learned = True

    kind: str = option("log", one_of("log", "power"))

    def bias(self, length: int, heads: int, *, causal: bool = True) -> Bias:
        length = checks.integer("kerple length", length, 1)
        first = 0 if checks.flag("causal", causal) else 1 - length
        r1, r2 = (x[:, None] for x in self._initial(heads))
        distance = np.abs(np.arange(first, length, dtype=np.float64))
        if self.kind == "log":
            return Bias(-r1 * np.log1p(r2 * distance), first)
        return Bias(-r1 * distance**r2, first)

    def parameters(self, head_dim: int, heads: int) -> Arrays:
        """Return the initial "log_r1" and "log_r2" (for "power", "logit_r2"), float64 (heads,).

        Parameters of any value give valid kernels: r1 = exp(log_r1) and r2 = exp(log_r2), or for
        "power" r2 = 2 / (1 + exp(-logit_r2)).

        KERPLE's authors draw the initial r1 and r2 from (0, 2) and (0, 1), and for "power" from
        (0, 1) and (0, 2). Here these ranges are cut into one part for each head, and a head begins
        in the middle of its part.
        """
        r1, r2 = self._initial(heads)
        if self.kind == "log":
            return {"log_r1": np.log(r1), "log_r2": np.log(r2)}
        return {"log_r1": np.log(r1), "logit_r2": np.log(r2 / (2 - r2))}

    def learned_bias(self, length: int, parameters: Tensors, *, causal: bool = True) -> Bias:
        import torch

        r1 = parameters["log_r1"].exp()[:, None]
        first = 0 if causal else 1 - length
        distance = torch.arange(first, length, device=r1.device).abs().to(r1.dtype)
        if self.kind == "log":
            return Bias(-r1 * torch.log1p(parameters["log_r2"].exp()[:, None] * distance), first)
        return Bias(-r1 * distance ** (2 * parameters["logit_r2"].sigmoid()[:, None]), first)

    def _initial(self, heads: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the initial r1 and r2 of each head."""
        heads = checks.integer("kerple heads", heads, 1)
        middles = (np.ones(heads).cumsum() - 0.5) / heads
        return (2 * middles, middles) if self.kind == "log" else (middles, 2 * middles)
