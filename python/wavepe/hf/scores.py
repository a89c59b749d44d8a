"""What relative and slope encodings add to the attention scores of a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ..encodings import Encoding
from .learned import MODULE
from .tables import relative_table


class RelativeScore:
    """q.p_delta, for an encoding with the entry point "relative" ([W], [S], [X])."""

    def __init__(self, encoding: Encoding, head_dim: int) -> None:
        encoding.table(1, head_dim)  # raises where the encoding does not fit the head size
        self.spec = str(encoding)

    def bias(self, query: Tensor, keys: int) -> Tensor:
        """What is added to (query * scaling).k, the last query standing on the last key.

        Parameters
        ----------
        query : Tensor, float32 or float64 (B, H, m, d)
            Already multiplied by the attention's scaling.
        keys : int
            Number of keys n.

        Returns
        -------
        Tensor (B, H, m, n)
        """
        table = relative_table(self.spec, keys, query).to(query.dtype)
        return ops.relative_bias(query, table, keys)


class LearnedScore:
    """q.p_delta, with a table that is learned [W]: `owner.position_encoding`."""

    def __init__(self, encoding: Encoding, owner: nn.Module) -> None:
        self.spec = str(encoding)
        self.owner = owner

    def bias(self, query: Tensor, keys: int) -> Tensor:
        """As `RelativeScore.bias`."""
        table, first, beyond = getattr(self.owner, MODULE)(keys)
        table = table.to(query.device, query.dtype)
        return ops.relative_bias(query, table, keys, first=first, beyond=beyond)


class SlopeScore:
    """-slope_h * delta, for an encoding with the entry point "slope" [A]."""

    def __init__(self, encoding: Encoding, heads: int) -> None:
        self.spec = str(encoding)
        self.slopes = torch.from_numpy(encoding.slopes(heads))

    def bias(self, query: Tensor, keys: int) -> Tensor:
        """As `RelativeScore.bias`; of `query` only shape, dtype and device count.

        Returns
        -------
        Tensor (1, H, m, n)
        """
        # The slopes are the queries and the distances the table of a relative term of size 1.
        slopes = self.slopes.to(query.device, query.dtype)
        distance = torch.arange(keys, device=query.device, dtype=query.dtype)
        slopes = slopes[:, None, None].expand(-1, query.shape[-2], 1)
        return ops.relative_bias(slopes, -distance[:, None], keys)[None]


Score = RelativeScore | LearnedScore | SlopeScore
