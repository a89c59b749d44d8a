"""What an encoding does to queries, keys and scores, for torch: shared by nn, hf and fairseq.

attention.py    one class for each entry point of an encoding; `position_encoding` picks it
rotation.py     frequencies that are fixed or follow the length, and angles of positions [R]
absolute.py     vectors added to token embeddings
tables.py       what NumPy computes, once for a length; constant rows in a compiler's graph
compiled.py     attention with a constant table in a compiler's graph
"""

from .attention import Cached, Learned, PositionEncoding, check_learned, position_encoding
from .rotation import Rotation

__all__ = [
    "Cached",
    "Learned",
    "PositionEncoding",
    "Rotation",
    "check_learned",
    "position_encoding",
]
