"""Rotary encodings: frequencies in float64, fixed or following the length, and rotations [R]."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..arrays.rope import rope_table
from ..encodings import Encoding, RoPE
from ..ops._common import wide
from ..ops._compiler import disable
from ..ops._device_constant import DeviceConstant
from .requests import at_each_length, current
from .tables import FIX_LENGTH, LARGEST_TABLE, cached_by_length, refuse_trace

# A length below and one above every threshold that a scaling type may have.
SHORT, LONG = 1, 1 << 40
MOST_LENGTHS = 1024  # of requests, whose frequencies are kept


class Frequencies(DeviceConstant):
    """The radians per position of each pair, in float64, and the factor on cosines and sines.

    The tensor is not a buffer of a module, so casts of a module do not reach it. `label` names the
    frequencies in messages. `kept` says that other calls will use the same frequencies, so that
    their angles are worth keeping.
    """

    kept = False

    def __init__(self, inv_freq: np.ndarray, factor: float, label: str) -> None:
        super().__init__(np.array(inv_freq, np.float64))
        self.factor, self.label = float(factor), label
        self.key = (*self.key, self.factor)

    def __reduce__(self) -> tuple[Any, ...]:
        return Frequencies, (self.array, self.factor, self.label), {"kept": self.kept}


class FrequencySchedule:
    """The frequencies of a rotary encoding, which may follow the length and the training mode."""

    def __init__(
        self, encoding: Encoding, head_dim: int, trained_length: int | None, label: str = ""
    ) -> None:
        self.rope = cast(RoPE, encoding)  # `register_encoding` asks rotary classes to be like RoPE
        self.head_dim, self.trained_length = head_dim, trained_length
        self._label = label or str(encoding)
        self._by_length: dict[tuple[int, bool], Frequencies] = {}
        self.fix(None)
        self.pairs = len(self.at(SHORT, True).array)  # those of frequency 0 included
        # Whether they follow the length or the training mode: cached keys may be rotated otherwise.
        self.changes = self.fixed[True] is None or self.fixed[True] != self.fixed[False]
        if not self.changes:
            for frequencies in self.fixed.values():
                cast(Frequencies, frequencies).label = self._label

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies follow the length, in training or in evaluation."""
        return None in self.fixed.values()

    def fix(self, length: int | None) -> None:
        """Use the frequencies of `length` tokens from now on; None: those of each sequence."""
        self.length = length
        # The key is the training mode. The value is None if the frequencies follow the length.
        self.fixed = {
            training: self._same_for_all(training) if length is None else self.at(length, training)
            for training in (True, False)
        }

    def at(self, length: int, training: bool) -> Frequencies:
        """Return the frequencies of a sequence of `length` tokens."""
        inv_freq, factor = self.rope.frequencies(
            self.head_dim, length=length, trained_length=self.trained_length, training=training
        )
        mode = "training" if training else "evaluation"
        return Frequencies(inv_freq, factor, f"{self._label} at length {length} in {mode}")

    def angles(self, positions: Tensor, x: Tensor, training: bool) -> tuple[Tensor, Tensor]:
        """Return cos and sin, (1|B, L, h), of positions (1|B, L), in the compute type of x."""
        frequencies = self.fixed[training]
        lengths = None if frequencies or torch.compiler.is_compiling() else current.lengths
        if lengths is None:
            frequencies = frequencies or self.of_longest(1, positions, training)
            factor, dtype = frequencies.factor, wide(x)
            inv_freq = frequencies.on(x)
            return ops.rope_table(positions, inv_freq, attention_factor=factor, dtype=dtype)
        parts = at_each_length(
            lengths,
            positions,
            lambda length: self._kept(length, training),
            lambda row, frequencies: angles(frequencies, x, row),
        )
        cos, sin = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        return cos, sin

    def _kept(self, length: int, training: bool) -> Frequencies:
        """Return the frequencies of a request, which asks for them in each of its steps."""
        if len(self._by_length) > MOST_LENGTHS:
            self._by_length.clear()
        key = length, training
        kept = self._by_length.get(key)  # another thread may clear them
        if kept is None:
            self._by_length[key] = kept = self.at(*key)
        return kept

    def needed(self, length: int, positions: Tensor | None, training: bool) -> Frequencies:
        """Return the frequencies for a call: fixed ones, or those of `of_longest`."""
        return self.fixed[training] or self.of_longest(length, positions, training)

    @disable("this RoPE follows the length: NumPy computes its frequencies")
    def of_longest(self, length: int, positions: Tensor | None, training: bool) -> Frequencies:
        """Return the frequencies of the longest sequence in `positions`, or of `length` tokens."""
        if torch.compiler.is_exporting():
            raise RuntimeError(
                f"wavepe: the frequencies of {self._label} depend on the length, so an exported "
                f"program cannot compute them: {FIX_LENGTH}"
            )
        if positions is not None:
            length = int(positions.to(torch.int64).max()) + 1 if positions.numel() else 1
        return self.at(max(length, 1), training)

    def _same_for_all(self, training: bool) -> Frequencies | None:
        short, long = (self.at(length, training) for length in (SHORT, LONG))
        short.kept = True
        return short if short == long else None


def angles(
    frequencies: Frequencies,
    q: Tensor,
    positions: Tensor | None,
    *,
    precision: str = "exact",
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (L, h) or (1|B, L, h), for queries and keys q (B, H, L, d).

    `positions` are integers (L,) or (B|1, L); None is start..start+L-1. Results are float64 for
    float64 q, otherwise float32.
    """
    refuse_trace(frequencies.label)
    dtype, device = wide(q), q.device
    if positions is None:
        stop = start + q.shape[-2]
        # A compiler is asked first: it would make a bound of the length out of the comparison.
        keep = not torch.compiler.is_compiling() and frequencies.kept and type(q) is Tensor
        if keep and stop <= LARGEST_TABLE:
            cos, sin = _first_rows(stop, frequencies, precision, device, dtype)
            return cos[start:stop], sin[start:stop]
        positions = torch.arange(start, stop, device=device)
    return ops.rope_table(
        positions,
        frequencies.on(q),
        attention_factor=frequencies.factor,
        precision=precision,
        dtype=dtype,
    )


@cached_by_length
def _first_rows(
    count: int, frequencies: Frequencies, precision: str, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    cos, sin = rope_table(
        np.arange(count),
        frequencies.array,
        attention_factor=frequencies.factor,
        precision=precision,
        dtype=np.float64 if dtype == torch.float64 else np.float32,
    )
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)


class Rotated(NamedTuple):
    """How queries were rotated, for the terms that read them without the rotation."""

    cos: Tensor  # (m, h) or (1|B, m, h)
    sin: Tensor
    interleaved: bool = False
    unrotated_q: Tensor | None = None  # without it, the queries are rotated back

    def rotate(self, x: Tensor) -> Tensor:
        """Return x (1, H, 1, d), rotated as the queries were: (1|B, H, m, d)."""
        batch = self.cos.shape[0] if self.cos.dim() == 3 else 1
        x = x.expand(batch, -1, self.cos.shape[-2], -1)
        return ops.rope(x, self.cos, self.sin, interleaved=self.interleaved)

    def unrotate(self, q: Tensor) -> Tensor:
        """Return the queries before the rotation."""
        if self.unrotated_q is not None:
            return self.unrotated_q.to(q.dtype)
        cos, sin = (x.to(wide(q)) for x in (self.cos, self.sin))
        size = cos * cos + sin * sin  # not 1 with an attention factor, and after rounding
        return ops.rope(q, cos / size, sin / size, interleaved=self.interleaved, inverse=True)
