"""Torch modules with position encodings, for your own models."""

from .. import ops as _ops  # noqa: F401 - first, because its error says how to install torch
from ._absolute import AbsoluteEncoding
from ._attention import Attention
from ._cache import KVCache
from ._rotary import Rotary
from ._self_attention import SelfAttention

__all__ = ["AbsoluteEncoding", "Attention", "KVCache", "Rotary", "SelfAttention"]

for _public in (AbsoluteEncoding, Attention, KVCache, Rotary, SelfAttention):
    _public.__module__ = __name__  # so that pickles hold the public path
