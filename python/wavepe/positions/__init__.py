"""Encodings applied to queries, keys and scores in torch, for nn, hf and fairseq.

attention.py    one class for each entry point of an encoding; `position_encoding` chooses it
rotation.py     rotary frequencies, fixed or following the length, and angles of positions [R]
absolute.py     vectors that are added to token embeddings
tables.py       tensors that NumPy computes once for a length; constant rows in a compiler's graph
compiled.py     attention with a constant table in a compiler's graph
"""

from .attention import (
    CacheState,
    Learned,
    PositionEncoding,
    check_learned,
    learned_arguments,
    position_encoding,
)
from .rotation import Rotation

__all__ = [
    "CacheState",
    "Learned",
    "PositionEncoding",
    "Rotation",
    "check_learned",
    "learned_arguments",
    "position_encoding",
]
