"""Rotary encodings in attention: which frequencies a call needs, and the rotation itself [R]."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .. import ops
from ..encodings import Encoding, RoPE
from .angles import Frequencies, angles
from .attention import Cached, PositionEncoding

# Any two lengths beyond every threshold that a scaling type may have.
SHORT, LONG = 1, 1 << 40


class Rotation:
    """The frequencies of a rotary encoding: the same for all lengths, or those of a length.

    Attributes
    ----------
    rope : RoPE
    pairs : int
        Pairs of a head's dims that rotate, those by 0 included.
    changes : bool
        A cache may hold keys of another rotation: frequencies follow the length or the mode.
    """

    def __init__(
        self,
        encoding: Encoding,
        head_dim: int,
        trained_length: int | None,
        label: str | None = None,
    ) -> None:
        self.rope = cast(RoPE, encoding)  # as `register_encoding` asks of a user's own
        self.head_dim, self.trained_length = head_dim, trained_length
        self._label = label or str(encoding)
        # By training mode; None where the frequencies follow the length.
        self._fixed = {training: self._same_for_all(training) for training in (True, False)}
        self.pairs = len(self.at(SHORT, True).array)
        self.changes = self._fixed[True] is None or self._fixed[True] != self._fixed[False]
        if not self.changes:
            for frequencies in self._fixed.values():
                cast(Frequencies, frequencies).label = self._label

    def fixed(self, training: bool) -> Frequencies | None:
        """Return the frequencies of all lengths; None where they follow the length."""
        return self._fixed[training]

    def at(self, length: int, training: bool) -> Frequencies:
        """Return the frequencies of a sequence of `length` tokens."""
        inv_freq, factor = self.rope.frequencies(
            self.head_dim, length=length, trained_length=self.trained_length, training=training
        )
        mode = "training" if training else "evaluation"
        return Frequencies(inv_freq, factor, f"{self._label} at length {length} in {mode}")

    @torch.compiler.disable(reason="this RoPE follows the length: its frequencies are made eagerly")
    def of_longest(self, length: int, positions: Tensor | None, training: bool) -> Frequencies:
        """Return those of the longest sequence in `positions`; of `length` without them."""
        if positions is not None:
            length = int(positions.to(torch.int64).max()) + 1 if positions.numel() else 1
        return self.at(max(length, 1), training)

    def _same_for_all(self, training: bool) -> Frequencies | None:
        short, long = (self.at(length, training) for length in (SHORT, LONG))
        return short if short == long else None


class Rotated(PositionEncoding):
    """Queries and keys rotated by their positions [R]."""

    def __init__(self, encoding: Encoding, head_dim: int, trained_length: int | None) -> None:
        super().__init__(encoding)
        try:
            self._rotation = Rotation(encoding, head_dim, trained_length)
        except ValueError as error:
            if trained_length is not None or "trained_length" not in str(error):
                raise
            raise ValueError(f"{error} (max_length of SelfAttention is trained_length)") from None
        pairs = self._rotation.pairs
        if 2 * pairs > head_dim:
            raise ValueError(f"{encoding} rotates {2 * pairs} dims, more than head_dim={head_dim}")

    def rotated(
        self, q: Tensor, k: Tensor, positions: Tensor | None, layer: Cached | None
    ) -> tuple[Tensor, Tensor]:
        start = 0 if layer is None else layer.length
        found = self._rotation.fixed(self.training)
        keep = found is not None
        if found is None:
            found = self._rotation.of_longest(start + k.shape[-2], positions, self.training)
        if layer is not None:
            _check_cache(layer, found)
            layer.frequencies = found
        cos, sin = angles(found, k, positions, start=start, keep=keep)
        how = {"interleaved": self._rotation.rope.interleaved}
        if q.shape[-2] == k.shape[-2]:
            return ops.rope_qk(q, k, cos, sin, **how)
        last = k.shape[-2] - q.shape[-2]
        q = ops.rope(q, cos[..., last:, :], sin[..., last:, :], **how)
        return q, ops.rope(k, cos, sin, **how)

    def cached(self, length: int) -> Cached:
        layer = super().cached(length)
        found = self._rotation.fixed(self.training)
        layer.frequencies = found or self._rotation.of_longest(length, None, self.training)
        return layer


def _check_cache(layer: Cached, now: Frequencies) -> None:
    then = layer.frequencies
    if layer.length and then is not None and then != now:
        raise RuntimeError(
            f"wavepe: the {layer.length} cached keys were rotated for {then.label}, this call "
            f"rotates for {now.label}: reset() the cache, and compute the whole sequence anew"
        )
