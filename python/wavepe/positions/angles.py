"""Angles of rotary embedding for torch: float64 frequencies, cosines and sines of positions [R]."""

from __future__ import annotations

import numpy as np

from .. import ops, rope_table  # ops first: it says how to get torch

import torch  # isort: skip
from torch import Tensor  # isort: skip

from .tables import LARGEST_TABLE, build_once, keep_by_length, wide  # isort: skip


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

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Frequencies) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    def on(self, device: torch.device) -> Tensor:
        """Return inv_freq on that device."""
        if device.type == "cpu":
            return self.inv_freq
        if torch.compiler.is_compiling():
            return self.inv_freq.to(device)
        return build_once(_copy, self, device)


def _copy(frequencies: Frequencies, device: torch.device) -> Tensor:
    return frequencies.inv_freq.to(device)


def angles(
    frequencies: Frequencies,
    q: Tensor,
    positions: Tensor | None,
    *,
    precision: str = "exact",
    start: int = 0,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin for queries and keys at `positions`.

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
    dtype, device = wide(q), q.device
    if positions is None:
        stop = start + q.shape[-2]
        if not torch.compiler.is_compiling() and (
            keep and type(q) is Tensor and stop <= LARGEST_TABLE
        ):
            cos, sin = _first_rows(stop, frequencies, precision, device, dtype)
            return cos[start:stop], sin[start:stop]
        positions = torch.arange(start, stop, device=device)
    return ops.rope_table(
        positions,
        frequencies.on(device),
        attention_factor=frequencies.factor,
        precision=precision,
        dtype=dtype,
    )


@keep_by_length
def _first_rows(
    count: int,
    frequencies: Frequencies,
    precision: str,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    cos, sin = rope_table(
        np.arange(count),
        frequencies.array,
        attention_factor=frequencies.factor,
        precision=precision,
        dtype=np.float64 if dtype == torch.float64 else np.float32,
    )
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)
