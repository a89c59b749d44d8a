"""Absolute encodings as a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..common import checks
from ..encodings import Encoding
from ..encodings import encoding as read_encoding
from ..positions.absolute import AbsoluteVectors
from ._sequences import check_shape, checked_rows


class AbsoluteEncoding(nn.Module):
    """Add the vectors of an absolute encoding to token embeddings.

    Put it before the first layer of a model. The module has no parameters and no buffers, so a cast
    of the model does not change it. TypeError or ValueError if an argument is wrong, or if the
    encoding is not absolute or does not fit `dim`.

    Parameters
    ----------
    encoding : str, dict or Encoding
        An absolute encoding, as `wavepe.encoding` reads it: sinusoidal, binary, integer,
        normalised, or your own.
    dim : int
        Size of a token embedding.
    trained_length : int, optional
        Length of the sequences in training, for an encoding that needs it.
    """

    def __init__(
        self,
        encoding: str | Mapping[str, Any] | Encoding,
        dim: int,
        *,
        trained_length: int | None = None,
    ) -> None:
        super().__init__()
        self.encoding = read_encoding(encoding)
        self.dim = checks.integer("dim", dim, 1)
        if trained_length is not None:
            trained_length = checks.integer("trained_length", trained_length, 1)
        for part in self.encoding.parts:
            if not part.adds or part.in_attention:
                raise ValueError(
                    f"the encoding must be absolute and nothing else, got '{self.encoding}': what "
                    f"acts in attention, here '{part}', belongs in wavepe.nn.Attention"
                )
        self._vectors = AbsoluteVectors(self.encoding, self.dim, trained_length)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return x plus the vectors of its positions, a Tensor of x's shape and dtype.

        Parameters
        ----------
        x : Tensor (B, L, dim)
            Token embeddings. RuntimeError for another shape.
        positions : integer Tensor (L,) or (B|1, L), optional
            Positions of the tokens; None is 0..L-1. If the encoding depends on the length of a
            sequence, the length is the largest position of a row + 1.
        """
        check_shape("x", x, "B", "L", self.dim)
        if positions is None:
            vectors = self._vectors.of_range(0, x.shape[1], x.device)
        else:
            positions = checked_rows("positions", positions, *x.shape[:2]).to(torch.int64)
            vectors = self._vectors(positions)
        return x + vectors.to(x.device, x.dtype)

    def extra_repr(self) -> str:
        return f"'{self.encoding}', dim={self.dim}"
