"""What an encoding does to queries, keys and scores, for torch: shared by nn, hf and fairseq.

attention.py    one class for each entry point of an encoding; `position_encoding` picks it
rotation.py     frequencies that are fixed or follow the length, and the rotation [R]
angles.py       cos and sin of positions
tables.py       constant tables, made once for a length
compiled.py     the same inside of a compiler's graph
absolute.py     vectors added to token embeddings
precision.py    parameters that stay in float32
"""

from .attention import (
    Cached,
    Learned,
    PositionEncoding,
    Relative,
    Slopes,
    check_learned,
    position_encoding,
)
from .rotation import Rotated, Rotation

__all__ = [
    "Cached",
    "Learned",
    "PositionEncoding",
    "Relative",
    "Rotated",
    "Rotation",
    "Slopes",
    "check_learned",
    "position_encoding",
]
