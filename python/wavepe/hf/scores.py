"""What relative and slope encodings put into the attention scores of a layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..encodings import Encoding
from ..ops._relative_table import RelativeTable
from .learned import MODULE
from .tables import constant_table


class Terms(NamedTuple):
    """score = ((q + u).k + (q + v).p_delta) * scaling - slope * abs(delta), in names of `ops`.

    Attributes
    ----------
    p : RelativeTable or Tensor (w, d) or (H, w, d), optional
        A `RelativeTable` has its own first and beyond.
    first : int
    beyond : str
    biases : (Tensor (H, d), Tensor (H, d)), optional
        u and v.
    slopes : Tensor (H,), optional
    """

    p: RelativeTable | Tensor | None = None
    first: int = 0
    beyond: str = "zero"
    biases: tuple[Tensor, Tensor] | None = None
    slopes: Tensor | None = None


class RelativeScore:
    """q.p_delta with a constant table, for the entry point "relative" ([W], [X] without biases)."""

    def __init__(self, encoding: Encoding, head_dim: int) -> None:
        encoding.table(1, head_dim)  # raises where the encoding does not fit the head size
        self.spec = str(encoding)

    def terms(self, query: Tensor, keys: int) -> Terms:
        """What the scores of `keys` keys need.

        Parameters
        ----------
        query : Tensor (B, H, m, d)
            Gives head size, dtype and device.
        keys : int
            Number of keys n, and so of distances.
        """
        return Terms(constant_table(self.spec, query.shape[-1], keys))


class LearnedScore:
    """Tables and biases that are learned ([W], [S], [X]): `owner.position_encoding`."""

    def __init__(self, encoding: Encoding, owner: nn.Module) -> None:
        self.spec = str(encoding)
        self.owner = owner

    def terms(self, query: Tensor, keys: int) -> Terms:
        """As `RelativeScore.terms`."""
        p, first, beyond, biases = getattr(self.owner, MODULE)(keys)
        if biases is not None:
            u, v = biases
            biases = u.to(query.device, query.dtype), v.to(query.device, query.dtype)
        return Terms(p.to(query.device, query.dtype), first, beyond, biases)


class SlopeScore:
    """-slope_h * abs(delta), for an encoding with the entry point "slope" [A]."""

    def __init__(self, encoding: Encoding, heads: int) -> None:
        self.spec = str(encoding)
        self.slopes = torch.from_numpy(encoding.slopes(heads))

    def terms(self, query: Tensor, keys: int) -> Terms:
        """As `RelativeScore.terms`."""
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        return Terms(slopes=self.slopes.to(query.device, dtype))


Score = RelativeScore | LearnedScore | SlopeScore
