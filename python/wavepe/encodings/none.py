"""No position encoding (NoPE): a model learns positions from the causal mask alone."""

from __future__ import annotations

import dataclasses

from .base import Encoding, register_encoding


@register_encoding
@dataclasses.dataclass(frozen=True)
class NoPE(Encoding):
    """Use no position encoding: score = q.k / sqrt(d), with q and k unchanged.

    It is the control in comparisons of encodings. All methods raise NotImplementedError.

    Examples
    --------
    >>> import wavepe
    >>> wavepe.encoding("none").entry
    'none'
    """

    name = "none"
    entry = "none"
