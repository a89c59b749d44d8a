"""Encodings applied to embeddings, queries, keys and scores in torch, for nn, hf and fairseq."""

from .attention import CacheState, PositionEncoding
from .learned import Learned, LearnedCache, LearnedTerms, Terms, named_as_in
from .requests import Lengths, Requests
from .rotation import FrequencySchedule, Rotated
from .scores import Scores, left_by
from .tokens import TokenIndices

__all__ = [
    "CacheState", "FrequencySchedule", "Learned", "LearnedCache", "LearnedTerms", "Lengths",
    "PositionEncoding", "Requests", "Rotated", "Scores", "Terms", "TokenIndices", "left_by",
    "named_as_in",
]  # fmt: skip
