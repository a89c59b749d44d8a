"""Caches of another base: what `set_theta` leaves in a model so that they are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

CACHE_TAG = "_wavepe_theta"  # on caches: with what their keys were rotated


class CacheGuard:
    """Forward hooks of the module that owns the rotary one: it refuses keys of another base.

    `at_first` names the frequencies before the first change, those of a cache without a mark;
    `filled_by` those of now, with which caches are marked.
    """

    def __init__(self, frequencies: str) -> None:
        self.at_first = self.filled_by = frequencies

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ValueError for a cache that holds keys rotated otherwise."""
        cache = kwargs.get("past_key_values")
        if cache is None:
            cache = next(filter(_is_cache, args), None)
        if cache is None or torch.compiler.is_exporting():
            return
        before = getattr(cache, CACHE_TAG, self.at_first)
        if before != self.filled_by and _holds_keys(cache):
            raise ValueError(
                f"the cached keys were rotated with {before}, and set_theta has changed that to "
                f"{self.filled_by}: start from an empty cache"
            )
        self.mark(cache)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Mark a cache that the module has made itself."""
        values = output.values() if isinstance(output, Mapping) else output
        for value in values if isinstance(values, Iterable) else ():
            self.mark(value)

    def mark(self, cache: Any) -> None:
        if _is_cache(cache) and getattr(cache, CACHE_TAG, None) != self.filled_by:
            setattr(cache, CACHE_TAG, self.filled_by)


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")  # some models have a class of their own


def _holds_keys(cache: Any) -> bool:
    """Of a cache, or of the tuples that transformers < 5 takes too."""
    return bool(cache.get_seq_length() > 0) if _is_cache(cache) else len(cache) > 0
