"""No position encoding (NoPE): a model learns positions from the causal mask alone."""

from __future__ import annotations

import dataclasses

from .base import Encoding, known


@dataclasses.dataclass(frozen=True)
class NoPE(Encoding):
    """Use no position encoding: score = q.k / sqrt(d), with q and k unchanged.

    It is the control in comparisons of encodings. All methods raise NotImplementedError.
    """

    name = "none"


known[NoPE.name] = NoPE  # not by `register_encoding`, which asks for a method
