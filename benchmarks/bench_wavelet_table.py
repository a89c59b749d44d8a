"""Cases of wavelet_table [W] (ricker), against the same expression in NumPy and PyTorch.

All compute in float64 and round to float32 once. Counted are the bytes of the table, written once.
Most of the time goes into exp, so the share of the copy bandwidth is small for all.

Rivals
    numpy    (1 - u^2) exp(-u^2 / 2) in float64, cast to float32
    eager    the same in PyTorch
    compile  torch.compile of eager
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import wavepe
import wavepe.ops as ops
from torch import Tensor

from .case import Case, Compiler, judge

BOUND = "half a float32 ulp of the result, plus 8 x 2^-53 (1 + u^2)^2 exp(-u^2/2) of float64"
_SUBNORMAL = 2.0**-149


def with_numpy(offsets: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    u = (offsets[:, None] - shift) / scale
    return ((1 - u * u) * np.exp(-0.5 * u * u)).astype(np.float32)


def with_torch(offsets: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    u = (offsets[:, None] - shift) / scale
    return ((1 - u * u) * torch.exp(-0.5 * u * u)).float()


def table_judge(rows: int, scale: np.ndarray, shift: np.ndarray):
    u = (np.arange(rows)[:, None] - shift) / scale
    exact = (1 - u * u) * np.exp(-u * u / 2)
    bound = 2.0**-24 * abs(exact) + 2.0**-50 * (1 + u * u) ** 2 * np.exp(-u * u / 2) + _SUBNORMAL
    return judge((exact,), (bound,))


def cases(quick: bool, compiler: Compiler) -> Iterator[Case]:
    """Yield all cases; each is made when it is asked for."""
    d, scales = (16, 4) if quick else (128, 8)
    scale, shift = wavepe.wavelet_grid(d, scales=scales)
    scale64, shift64 = torch.from_numpy(scale), torch.from_numpy(shift)
    scale32, shift32 = scale64.float(), shift64.float()
    sizes = (32, 64) if quick else (2048, 4096)
    for rows in sizes:
        offsets = np.arange(rows)
        positions = torch.from_numpy(offsets)
        common = {
            "size": f"{rows} x {d}, {scales} scales",
            "dtype": "float32",
            "work": 4 * rows * d,
            "unit": "GB/s",
            "judge": table_judge(rows, scale, shift),
            "bound": BOUND,
        }
        yield Case(
            op="ops.wavelet_table",
            ours=lambda t=positions: ops.wavelet_table(t, scale32, shift32),
            rivals={
                "numpy": lambda t=offsets: with_numpy(t, scale, shift),
                "eager": lambda t=positions: with_torch(t, scale64, shift64),
                "compile": compiler(with_torch, positions, scale64, shift64),
            },
            headline=("warm",) if rows == sizes[-1] else (),
            **common,
        )
        yield Case(
            op="wavepe.wavelet_table",
            ours=lambda t=offsets: wavepe.wavelet_table(t, scale, shift),
            rivals={"numpy": lambda t=offsets: with_numpy(t, scale, shift)},
            memory=("warm",),
            **common,
        )
