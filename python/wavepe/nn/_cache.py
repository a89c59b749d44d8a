"""Cache of keys and values, for generation token by token."""

from __future__ import annotations

import copy
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..common import checks
from ..ops._common import INTEGERS
from ..positions import CacheState

_FIRST_CAPACITY = 64


class KVCache:
    """Keep keys and values of previous tokens for all attention modules of a model.

    Pass one cache per batch of sequences to every `Attention` or `SelfAttention` of the model. Each
    module finds its own part in it. Keys are kept with the rotation that they had, together with
    key masks and positions.

    Generate under ``torch.inference_mode()`` or ``torch.no_grad()``. Then new tokens are written in
    place, and storage grows by doubling. With gradients recorded, each step copies the cache, and
    gradients flow through it.

    ``copy.deepcopy`` makes a branch, such as a second continuation of one prompt. A module that is
    used at several depths of a model needs a cache for each of them.

    Examples
    --------
    >>> import torch
    >>> from wavepe.nn import KVCache, SelfAttention
    >>> attention = SelfAttention(32, heads=4).eval()
    >>> x = torch.randn(1, 6, 32)
    >>> cache = KVCache()
    >>> with torch.inference_mode():
    ...     prompt = attention(x[:, :5], cache=cache)
    ...     step = attention(x[:, 5:], cache=cache)
    >>> cache.length
    6
    """

    def __init__(self) -> None:
        self._by_module: WeakKeyDictionary[nn.Module, CachedTokens] = WeakKeyDictionary()

    @property
    def length(self) -> int:
        """The number of tokens that every module has cached."""
        return min((tokens.length for tokens in self._by_module.values()), default=0)

    def reset(self) -> None:
        """Empty the cache. The next batch may have any size."""
        self._by_module.clear()

    def reorder(self, indices: Tensor) -> None:
        """Replace row b of the batch by row indices[b], as beam search needs it.

        `indices` is an integer Tensor (B',); rows may be repeated, and B' may differ from B.
        RuntimeError for another tensor, IndexError if a cache on the CPU has no such row.
        """
        if not isinstance(indices, Tensor) or indices.dim() != 1 or indices.dtype not in INTEGERS:
            raise RuntimeError(f"wavepe: indices must be an integer Tensor (B,), got {indices!r}")
        for tokens in self._by_module.values():
            tokens.reorder(indices.to(torch.int64))

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens and drop the others.

        TypeError, ValueError unless `length` is an integer from 0 to the length of the cache.
        """
        length = checks.integer("length", length, 0)
        if length > self.length:
            raise ValueError(f"length must be at most {self.length}, as cached, got {length}")
        for tokens in self._by_module.values():
            tokens.crop(length)

    def __repr__(self) -> str:
        return f"KVCache(length={self.length}, layers={len(self._by_module)})"

    def __copy__(self) -> KVCache:
        return copy.deepcopy(self)  # two caches of the same storage would overwrite each other


def tokens_of(cache: KVCache, module: nn.Module, count: int) -> CachedTokens:
    """Return a module's part for `count` new tokens; none may have more than the others."""
    by_module = cache._by_module
    tokens = by_module.get(module)
    most = max((other.length for other in by_module.values()), default=0)
    if tokens is None and most > count:
        raise RuntimeError(
            f"wavepe: the cache holds {most} tokens of other modules and none of this one: "
            "it belongs to another model; reset() it, or make a new KVCache"
        )
    if tokens is None:
        tokens = by_module[module] = CachedTokens()
    if tokens.length > cache.length:
        raise RuntimeError(
            f"wavepe: the cache holds {tokens.length} tokens of this module and {cache.length} "
            "of another: either a pass has stopped half-way (cache.crop(cache.length) undoes "
            "it), or a module is called twice in a pass (give it two caches)"
        )
    return tokens


class CachedTokens(CacheState):
    """The cached tokens of one attention module, with their key mask and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.key_mask: Tensor | None = None  # (B, n), False for a hidden token; None hides none
        self.positions: Tensor | None = None  # int64 (B, n); None: 0..n-1
        self.keys = self.values = torch.empty(0)  # (B, Hk, capacity, d)

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values, with k and v last; `commit` then counts the new tokens."""
        if self.length == 0:
            self.keys, self.values = k[:, :, :0], v[:, :, :0]
        _check_fits(self.keys, k)
        self.keys, keys = _appended(self.keys, self.length, k)
        self.values, values = _appended(self.values, self.length, v)
        return keys, values

    def commit(self, count: int, key_mask: Tensor | None, positions: Tensor | None) -> None:
        """Count the tokens that `extended` added; store the mask and positions of all tokens."""
        self.length += count
        # Copies, because the caller may write to theirs.
        self.key_mask = None if key_mask is None else key_mask.clone()
        self.positions = None if positions is None else positions.clone()

    def reorder(self, indices: Tensor) -> None:
        """Replace row b by row indices[b]."""
        for name in ("keys", "values", "key_mask", "positions"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, indices.to(tensor.device)))

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.length = min(self.length, length)
        for name in ("key_mask", "positions"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor[:, : self.length] if self.length else None)


def _check_fits(keys: Tensor, k: Tensor) -> None:
    same = keys.shape[:2] == k.shape[:2] and keys.shape[3] == k.shape[3]
    if not same or keys.dtype != k.dtype or keys.device != k.device:
        raise RuntimeError(
            "wavepe: the cache holds keys (B, Hk, n, d) of shape "
            f"{(*keys.shape[:2], 'n', keys.shape[3])}, {keys.dtype} on {keys.device}; got "
            f"{tuple(k.shape)}, {k.dtype} on {k.device}: reset() it for another batch"
        )


def _appended(storage: Tensor, length: int, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return storage with `new` written from `length` on, and the part of it in use."""
    stop = length + new.shape[2]
    # With gradients, attention has saved the keys and values, so they may not be overwritten.
    if torch.is_grad_enabled():
        storage = torch.cat([storage[:, :, :length], new], dim=2)
    else:
        if storage.shape[2] < stop or storage.is_inference():
            old, capacity = storage, max(stop, 2 * storage.shape[2], _FIRST_CAPACITY)
            # Outside inference mode, because an inference tensor could not be written to later.
            with torch.inference_mode(False), torch.no_grad():
                storage = old.new_empty((*old.shape[:2], capacity, old.shape[3]))
            storage[:, :, :length].copy_(old[:, :, :length])
        storage[:, :, length:stop].copy_(new)
    return storage, storage[:, :, :stop]
