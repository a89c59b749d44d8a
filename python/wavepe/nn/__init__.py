"""Modules for torch models of one's own."""

from .. import ops as _ops  # noqa: F401 - first: it says what brings torch
from ._absolute import AbsoluteEncoding
from ._attention import Attention
from ._cache import KVCache
from ._rotary import Rotary
from ._self_attention import SelfAttention

__all__ = ["AbsoluteEncoding", "Attention", "KVCache", "Rotary", "SelfAttention"]

for _public in (AbsoluteEncoding, Attention, KVCache, Rotary, SelfAttention):
    _public.__module__ = __name__  # the path in pickles
