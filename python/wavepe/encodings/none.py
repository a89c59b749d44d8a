"""No position encoding (NoPE): the causal mask alone tells the positions apart."""

from __future__ import annotations

import dataclasses

from .base import Encoding, register_encoding


@register_encoding
@dataclasses.dataclass(frozen=True)
class NoPE(Encoding):
    """No position encoding: score = q.k / sqrt(d), q and k unrotated, nothing added.

    The control of the comparisons in [W]; all methods raise NotImplementedError.
    """

    name = "none"
    entry = "none"
