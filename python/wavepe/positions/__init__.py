"""Encodings applied to embeddings, queries, keys and scores in torch, for nn, hf and fairseq.

attention.py    the encoding of an attention layer as a module
scores.py       what an encoding adds to the scores of a layer
learned.py      parameters, and what encodings make of them
rotation.py     rotary frequencies, fixed or following the length, and angles of positions [R]
absolute.py     vectors that are added to token embeddings
"""

from .attention import CacheState, PositionEncoding
from .learned import Learned, LearnedTerms, Terms, named_as_in
from .rotation import FrequencySchedule
from .scores import Places, Rotated, Scores

__all__ = [
    "CacheState",
    "FrequencySchedule",
    "Learned",
    "LearnedTerms",
    "Places",
    "PositionEncoding",
    "Rotated",
    "Scores",
    "Terms",
    "named_as_in",
]
