"""Cases of rope_table [R], against the same angles in NumPy, PyTorch and Hugging Face.

wavepe's angles are exact. NumPy and PyTorch round the product in float64. Hugging Face computes in
float32, and its error grows with the position. Counted are the bytes of the two tables, written
once. Most of the time goes into cos and sin, so the share of the copy bandwidth is small for all.

Rivals
    hf       LlamaRotaryEmbedding of transformers: float32, each angle twice; it is not judged
    numpy    cos and sin of the float64 product, cast to float32
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

from .case import Call, Case, Compiler, judge

BOUND = "half a float32 ulp of 1, 2^-24, plus 2^-38 for the float64 product of the judge"


def with_numpy(positions: np.ndarray, inv_freq: np.ndarray) -> tuple[np.ndarray, ...]:
    angle = positions[:, None] * inv_freq
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def with_torch(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, ...]:
    angle = positions[:, None] * inv_freq
    return angle.cos().float(), angle.sin().float()


def hugging_face(positions: Tensor, d: int, notes: list[str]) -> Call | None:
    try:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    except ImportError as error:
        notes.append(f"hf left out: {error}")
        return None
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=d, num_attention_heads=1))
    x = torch.zeros(1)
    return lambda: rotary(x, positions[None])


def cases(quick: bool, compiler: Compiler) -> Iterator[Case]:
    """Yield all cases; each is made when it is asked for."""
    d = 16 if quick else 128
    inv_freq, _ = wavepe.rope_frequencies(d)
    frequencies = torch.from_numpy(inv_freq)
    lengths = (32, 64) if quick else (2048, 16384)
    for length in lengths:
        array = np.arange(length)
        positions = torch.from_numpy(array)
        angle = array[:, None] * inv_freq
        notes: list[str] = []
        common = {
            "size": f"{length} x {d // 2} pairs",
            "dtype": "float32",
            "work": 2 * 4 * angle.size,
            "unit": "GB/s",
            "judge": judge((np.cos(angle), np.sin(angle)), (2.0**-24 + 2.0**-38,) * 2),
            "bound": BOUND,
            "memory": ("warm",),
        }
        yield Case(
            op="ops.rope_table",
            ours=lambda t=positions: ops.rope_table(t, frequencies),
            rivals={
                "hf": hugging_face(positions, d, notes),
                "numpy": lambda t=array: with_numpy(t, inv_freq),
                "eager": lambda t=positions: with_torch(t, frequencies),
                "compile": compiler(with_torch, positions, frequencies),
            },
            floor=("hf",),
            headline=("warm",) if length == lengths[-1] else (),
            notes=notes,
            **common,
        )
        yield Case(
            op="wavepe.rope_table",
            ours=lambda t=array: wavepe.rope_table(t, inv_freq),
            rivals={"numpy": lambda t=array: with_numpy(t, inv_freq)},
            **common,
        )
