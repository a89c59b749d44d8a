"""Encodings applied to embeddings, queries, keys and scores in torch, for nn, hf and fairseq.

attention.py    the encoding of an attention layer as a module
scores.py       what an encoding adds to the scores of a layer
learned.py      parameters, and the terms computed from them
rotation.py     rotary frequencies, fixed or following the length, and angles of positions [R]
self_extend.py  far keys at positions that the model has met in training [J]
decay.py        a decay that the input decides, as columns of queries and keys [G]
absolute.py     vectors that are added to token embeddings, computed once [operators of a compiler]
tables.py       tables and biases as tensors, computed once for a length [operators of a compiler]
tokens.py       positions of tokens
requests.py     requests of a server in one row
"""

from .attention import CacheState, PositionEncoding
from .learned import Learned, LearnedCache, LearnedTerms, Terms, named_as_in
from .requests import Lengths, Requests
from .rotation import FrequencySchedule, Rotated
from .scores import Scores
from .tokens import TokenIndices

__all__ = [
    "CacheState", "FrequencySchedule", "Learned", "LearnedCache", "LearnedTerms", "Lengths",
    "PositionEncoding", "Requests", "Rotated", "Scores", "Terms", "TokenIndices", "named_as_in",
]  # fmt: skip
