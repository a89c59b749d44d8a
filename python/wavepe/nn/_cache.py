"""Keys and values of tokens that were seen, for generation token by token."""

from __future__ import annotations

import copy
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .. import _checks
from ..ops._common import INTEGERS
from ..positions import Cached

_FIRST_CAPACITY = 64


class KVCache:
    """Keys and values of the tokens that a model has seen, for all its `SelfAttention` modules.

    One cache belongs to one batch of sequences. Pass it to every module in turn; each finds its own
    part. Storage grows by doubling, and new tokens are written in place where nothing is recorded
    for a gradient, so generate under ``torch.inference_mode()`` or ``torch.no_grad()``; else each
    step copies what is kept, and gradients go through it. Keys are kept as they were rotated, and
    key masks and positions are kept too. ``copy.deepcopy`` makes a branch.

    A module that stands at several depths of a model needs a cache for each of them.

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
        self._layers: WeakKeyDictionary[nn.Module, CachedTokens] = WeakKeyDictionary()

    @property
    def length(self) -> int:
        """The number of tokens that every module has seen."""
        return min((layer.length for layer in self._layers.values()), default=0)

    def reset(self) -> None:
        """Forget everything; the next batch may have any size."""
        self._layers.clear()

    def reorder(self, indices: Tensor) -> None:
        """Let row b become what row indices[b] was, as beam search asks for.

        Parameters
        ----------
        indices : integer Tensor (B',)
            Rows may be repeated, and their number may change. On the CPU they are checked; the
            check of a device would be waited for.

        Raises
        ------
        RuntimeError
            No integer Tensor (B',), or a row that the cache does not have.
        """
        if not isinstance(indices, Tensor) or indices.dim() != 1:
            given = tuple(indices.shape) if isinstance(indices, Tensor) else type(indices).__name__
            raise RuntimeError(f"wavepe: indices must be an integer Tensor (B,), got {given}")
        if indices.dtype not in INTEGERS:
            raise RuntimeError(f"wavepe: indices must be integers, got {indices.dtype}")
        indices = indices.to(torch.int64)
        rows = min((len(layer.keys) for layer in self._layers.values()), default=None)
        if rows is not None and indices.numel() and indices.device.type == "cpu":
            low, high = int(indices.min()), int(indices.max())
            if low < 0 or high >= rows:
                raise RuntimeError(
                    f"wavepe: indices must be rows of the cache, 0..{rows - 1}; got {low}..{high}"
                )
        for layer in self._layers.values():
            layer.reorder(indices)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        length = _checks.integer("length", length, 0)
        if length > self.length:
            raise ValueError(f"the cache holds {self.length} tokens, cannot keep {length}")
        for layer in self._layers.values():
            layer.crop(length)

    def __repr__(self) -> str:
        return f"KVCache(length={self.length}, layers={len(self._layers)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        branch = type(self).__new__(type(self))
        memo[id(self)] = branch
        branch.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return branch

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a KVCache cannot be pickled, nor copied without its tensors: it knows modules by "
            "identity; copy.deepcopy makes a branch"
        )

    def _layer(self, module: nn.Module, count: int) -> CachedTokens:
        """Return the part of one module, which may not be ahead of the others."""
        layer = self._layers.get(module)
        seen = max((other.length for other in self._layers.values()), default=0)
        if layer is None and seen > count:
            raise RuntimeError(
                f"wavepe: the cache holds {seen} tokens of other modules and none of this one: "
                "it belongs to another model; reset() it, or make a new KVCache"
            )
        if layer is None:
            layer = self._layers[module] = CachedTokens()
        if layer.length > self.length:
            raise RuntimeError(
                f"wavepe: the cache holds {layer.length} tokens of this SelfAttention and "
                f"{self.length} of another: a pass has stopped half-way (cache.crop(cache.length) "
                "undoes it), or a module is called twice in a pass (give it two caches)"
            )
        return layer


class CachedTokens(Cached):
    """What one attention module has seen.

    Attributes
    ----------
    key_mask : bool Tensor (B, n) or None
        False: hidden; None: all are seen.
    positions : int64 Tensor (B, n) or None
        None: 0..n-1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.key_mask: Tensor | None = None
        self.positions: Tensor | None = None
        self.keys = self.values = torch.empty(0)  # (B, Hk, capacity, d)

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return kept keys and values with these after them; they count from `commit` on."""
        if self.length == 0:
            self.keys, self.values = k[:, :, :0], v[:, :, :0]
        _check_fits(self.keys, k)
        self.keys, keys = _appended(self.keys, self.length, k)
        self.values, values = _appended(self.values, self.length, v)
        return keys, values

    def commit(self, count: int, key_mask: Tensor | None, positions: Tensor | None) -> None:
        """Count the tokens that `extended` added; mask and positions are those of all."""
        self.length += count
        # A copy: the caller may write into theirs.
        self.key_mask = None if key_mask is None else key_mask.clone()
        self.positions = None if positions is None else positions.clone()

    def reorder(self, indices: Tensor) -> None:
        for name in ("keys", "values", "key_mask", "positions"):
            kept = getattr(self, name)
            if kept is not None:
                kept = kept.index_select(0, indices.to(kept.device))
                setattr(self, name, kept)

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)
        for name in ("key_mask", "positions"):
            kept = getattr(self, name)
            if kept is not None:
                setattr(self, name, kept[:, : self.length] if self.length else None)


def _check_fits(kept: Tensor, k: Tensor) -> None:
    same = kept.shape[:2] == k.shape[:2] and kept.shape[3] == k.shape[3]
    if not same or kept.dtype != k.dtype or kept.device != k.device:
        raise RuntimeError(
            "wavepe: the cache holds keys (B, Hk, n, d) of shape "
            f"{(*kept.shape[:2], 'n', kept.shape[3])}, {kept.dtype} on {kept.device}; got "
            f"{tuple(k.shape)}, {k.dtype} on {k.device}: reset() it for another batch"
        )


def _appended(storage: Tensor, length: int, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return storage with `new` from `length` on, and what of it is in use."""
    stop = length + new.shape[2]
    if torch.is_grad_enabled():  # attention saves keys and values for any gradient, of q too
        storage = torch.cat([storage[:, :, :length], new], dim=2)
    else:
        if storage.shape[2] < stop or storage.is_inference():
            storage = _grown(storage, length, stop)
        storage[:, :, length:stop].copy_(new)
    return storage, storage[:, :, :stop]


def _grown(storage: Tensor, length: int, needed: int) -> Tensor:
    capacity = max(needed, 2 * storage.shape[2], _FIRST_CAPACITY)
    # An inference tensor could not be written to outside inference mode.
    with torch.inference_mode(False), torch.no_grad():
        grown = storage.new_empty((*storage.shape[:2], capacity, storage.shape[3]))
    grown[:, :, :length].copy_(storage[:, :, :length])
    return grown
