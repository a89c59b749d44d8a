"""Helpers of the tests of wavepe.nn.Rotary: inputs, scaling types, and exact results."""

import numpy as np
import oracle
import oracle_rope
import torch
from cases import BOUNDS, assert_within, unit

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "partial": {"partial_rotary_factor": 0.5, "rope_theta": 500.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": LONGROPE,
}
# The oracle's frequencies of head size 8 and factor, for a length and max_length 16.
EXACT = {
    "linear": lambda length: oracle_rope.linear(8, 1e4, 4),
    "yarn": lambda length: oracle_rope.yarn(8, 1e4, 4, 16),
    "llama3": lambda length: oracle_rope.llama3(8, 1e4, 8, 16, 1, 4),
    "proportional": lambda length: oracle_rope.proportional(8, 1e4, 0.5),
    "partial": lambda length: oracle_rope.default(4, 500),
    "dynamic": lambda length: oracle_rope.dynamic(8, 1e4, 4, length, 16),
    "longrope": lambda length: oracle_rope.longrope(8, 1e4, [1 if length <= 16 else 4] * 4, 4, 16),
}


def heads(length=6, dim=8, batch=2, dtype=None, seed=0):
    """q with four heads and k with two."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, 4, length, dim, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, 2, length, dim, generator=generator, dtype=torch.float64)
    return q.to(dtype or torch.float32), k.to(dtype or torch.float32)


def rotated(x, positions, inv_freq, factor=1.0, interleaved=False):
    """The exact result and the size of its terms, float64; positions (L,) or (B, L)."""
    cos, sin = oracle.rope_table(np.asarray(positions), inv_freq, factor)
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    x = x.double().numpy()
    return oracle.rope(x, cos, sin, interleaved), oracle.rope_terms(x, cos, sin, interleaved)


def assert_rotated(got, x, positions, inv_freq, *options):
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    exact, terms = rotated(x, positions, inv_freq, *options)
    low = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(x.dtype)
    full = (BOUNDS["rope"].units + BOUNDS["rope_table"].units) * unit(np.float32)
    full = full if x.dtype != torch.float64 else 4 * full * 2.0**-29
    assert_within(got.double().numpy(), exact, low * terms if low else full * terms)
