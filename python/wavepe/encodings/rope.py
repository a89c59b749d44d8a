"""Rotary position encoding [R], p-RoPE [B], and a base changed at inference [F]."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from .. import _checks
from .._rope import DEFAULT_THETA, rope_frequencies, rope_table
from .base import Encoding, register_encoding, sequence_length
from .options import option, positive, share


@register_encoding
@dataclasses.dataclass(frozen=True)
class RoPE(Encoding):
    """Pair i of the head is rotated by m * theta^(-2i/d) [R].

    [R] is Su et al., arXiv 2104.09864; [B] Barbero et al., arXiv 2410.06205; [F] Oka et al.,
    "Frequency Bands in RoPE", ICLR 2026.

    Parameters
    ----------
    theta : float, optional
        The base. None is the base of the model that is patched, and 10000 elsewhere.
    fraction : float
        p-RoPE [B]: the int(fraction * d // 2) pairs of highest frequency are rotated, with the
        denominator d kept; the others stay. 1 is RoPE, 0 is no encoding.
    interleaved : bool
        Pairs (2i, 2i+1) instead of the halves' (i, i + d/2).
    inference_theta : float or "scaled", optional
        The base outside training [F]; "scaled" is theta * length / trained_length where the
        sequence is longer than the trained length.
    """

    name = "rope"
    entry = "rotary"
    inference_only = ("inference_theta",)

    theta: float | None = option(None, positive())
    fraction: float = option(1.0, share)
    interleaved: bool = False
    inference_theta: float | str | None = option(None, positive("scaled"))

    def trained_as(self) -> RoPE:
        """Without `inference_theta`, and with the base written out.

        rope and rope:theta=10000 are the same model to train, so they must compare equal here.
        """
        theta = DEFAULT_THETA if self.theta is None else self.theta
        return dataclasses.replace(super().trained_as(), theta=theta)

    def frequencies(
        self,
        head_dim: int,
        *,
        length: int | None = None,
        trained_length: int | None = None,
        training: bool = False,
    ) -> tuple[np.ndarray, float]:
        """The angle per position of each pair, and the factor on cosines and sines.

        Parameters
        ----------
        head_dim : int
            The head size d, even.
        length, trained_length : int, optional
            Of the current sequence and of training; inference_theta="scaled" needs both.
        training : bool
            Take `theta`, whatever `inference_theta` says.

        Returns
        -------
        inv_freq : ndarray, float64 (head_dim/2,)
            Zero for the pairs that `fraction` leaves alone.
        attention_factor : float
        """
        theta = DEFAULT_THETA if self.theta is None else self.theta
        if not training and self.inference_theta is not None:
            theta = self._inference_base(theta, length, trained_length)
        inv_freq, factor = rope_frequencies(head_dim, theta)
        rotated = int(self.fraction * head_dim // 2)
        return np.where(np.arange(inv_freq.size) < rotated, inv_freq, 0.0), factor

    def rope_table(
        self,
        positions: ArrayLike,
        head_dim: int,
        *,
        length: int | None = None,
        trained_length: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines of the pairs, as inference uses them, float32 (..., head_dim/2).

        `length`, by default the largest position + 1, and `trained_length` serve
        inference_theta="scaled". A cached decoding step passes the length of the whole sequence.
        """
        if self.inference_theta == "scaled":
            length = sequence_length(self, positions, length)
        inv_freq, factor = self.frequencies(head_dim, length=length, trained_length=trained_length)
        return rope_table(positions, inv_freq, attention_factor=factor)

    def _inference_base(
        self, theta: float, length: int | None, trained_length: int | None
    ) -> float:
        if self.inference_theta != "scaled":
            return float(self.inference_theta)
        for key, value in (("length", length), ("trained_length", trained_length)):
            if value is None:
                raise ValueError(f"{self} needs {key}=, the number of tokens; got None")
            _checks.integer(f"{self.name} {key}", value, 1)
        return theta * length / trained_length if length > trained_length else theta
