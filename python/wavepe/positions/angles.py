"""Angles of rotary embedding for torch: float64 frequencies, cosines and sines of positions [R]."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .. import ops, rope_table  # ops first: it says how to get torch

import torch  # isort: skip
from torch import Tensor  # isort: skip

from ..ops._common import wide  # isort: skip
from .tables import FIRST_CAPACITY, LARGEST_TABLE  # isort: skip


def angles(
    frequencies: Frequencies,
    q: Tensor,
    positions: Tensor | None,
    *,
    precision: str = "exact",
    start: int = 0,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """cos and sin for queries and keys at `positions`.

    Parameters
    ----------
    q : Tensor (B, H, L, d)
        Gives length, device and dtype.
    positions : integer Tensor (L,) or (B|1, L), optional
        None is start..start+L-1.
    keep : bool
        Whether other calls will ask for the same frequencies.

    Returns
    -------
    (cos, sin) : Tensors (L, h) or (1|B, L, h), float64 for float64 q, else float32
    """
    dtype = wide(q)
    if positions is None:
        stop = start + q.shape[-2]
        if not torch.compiler.is_compiling() and (
            keep and type(q) is Tensor and stop <= LARGEST_TABLE
        ):
            cos, sin = kept_tables(frequencies, precision, q.device, dtype).first(stop)
            return cos[start:], sin[start:]
        positions = torch.arange(start, stop, device=q.device)
    return ops.rope_table(
        positions,
        frequencies.on(q.device),
        attention_factor=frequencies.factor,
        precision=precision,
        dtype=dtype,
    )


def sequence_length(positions: Tensor) -> int:
    """The length of the longest sequence in `positions`."""
    return int(positions.to(torch.int64).max()) + 1 if positions.numel() else 1


class Frequencies:
    """Radians per position of each pair, in float64, and the factor on cosines and sines.

    No module holds the tensor as its own: casts of a module do not reach it.
    """

    def __init__(self, inv_freq: np.ndarray, factor: float, label: str) -> None:
        self.factor, self.label = float(factor), label  # `label` is for messages
        self.array = np.array(inv_freq, np.float64)
        self.key = (self.array.tobytes(), self.factor)
        with torch.inference_mode(False):
            self.inv_freq = torch.from_numpy(self.array)
        self._copies: dict[torch.device, Tensor] = {}

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Frequencies) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copies": {}}

    def on(self, device: torch.device) -> Tensor:
        """inv_freq there."""
        if device.type == "cpu":
            return self.inv_freq
        if torch.compiler.is_compiling():
            return self.inv_freq.to(device)
        if device not in self._copies:
            with torch.inference_mode(False):
                self._copies[device] = self.inv_freq.to(device)
        return self._copies[device]


class _Tables:
    """cos and sin of positions 0, 1, 2, ..., as many as were asked for so far."""

    def __init__(
        self, frequencies: Frequencies, precision: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.frequencies, self.precision = frequencies, precision
        self.device, self.dtype = device, dtype
        self.rows: tuple[Tensor, Tensor] | None = None

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        rows = self.rows  # once: another thread may replace it
        present = 0 if rows is None else len(rows[0])
        if rows is None or present < count:
            rows = self._make(max(count, min(2 * present, LARGEST_TABLE), FIRST_CAPACITY))
            if type(rows[0]) is Tensor:  # no fake tensor of a tracer
                self.rows = rows
        return rows[0][:count], rows[1][:count]

    def _make(self, capacity: int) -> tuple[Tensor, Tensor]:
        cos, sin = rope_table(
            np.arange(capacity),
            self.frequencies.array,
            attention_factor=self.frequencies.factor,
            precision=self.precision,
            dtype=np.float64 if self.dtype == torch.float64 else np.float32,
        )
        # Kept for the next caller, who may train: an inference tensor could not be saved there.
        with torch.inference_mode(False):
            return torch.from_numpy(cos).to(self.device), torch.from_numpy(sin).to(self.device)


# The modules of all layers share them; equal frequencies are equal keys.
@functools.lru_cache(maxsize=16)
def kept_tables(
    frequencies: Frequencies, precision: str, device: torch.device, dtype: torch.dtype
) -> _Tables:
    return _Tables(frequencies, precision, device, dtype)
