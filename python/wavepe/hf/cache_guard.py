"""Notes on caches: how their keys were rotated, and whether they hold packed sequences."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

# Attributes of caches.
ROTATION = "_wavepe_rotation"
PACKED = "_wavepe_packed"


class CacheGuard:
    """Forward hooks of a module that is given a cache: they refuse keys of another rotation.

    Attributes
    ----------
    initial : str or None
        How the keys of a cache without a note were rotated; None is unknown.
    current : str
        How keys are rotated now.
    """

    def __init__(self, initial: str | None, current: str = "") -> None:
        self.initial, self.current = initial, current

    def attach(self, module: nn.Module) -> list[Any]:
        """Register the hooks, and return their handles."""
        return [
            module.register_forward_pre_hook(self.before, with_kwargs=True),
            module.register_forward_hook(self.after, with_kwargs=True),
        ]

    def rotation(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Name the rotation of this call's keys."""
        return self.current

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ValueError where the cache holds keys of another rotation; else note this one."""
        cache = cache_of(args, kwargs)
        if cache is None or torch.compiler.is_exporting():
            return
        now = self.rotation(module, args, kwargs)
        then = getattr(cache, ROTATION, self.initial)
        if then != now and (count := _length(cache)) > 0:
            raise ValueError(
                f"the {int(count)} cached keys were rotated with {then or 'unknown frequencies'}, "
                f"and this call rotates with {now}: start from an empty cache, or pass "
                "use_cache=False"
            )
        if _is_cache(cache) and getattr(cache, ROTATION, None) != now:
            setattr(cache, ROTATION, now)

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note the rotation on a cache that the module has made itself."""
        if cache_of(args, kwargs) is not None or torch.compiler.is_exporting():
            return
        values = output.values() if isinstance(output, Mapping) else output
        for cache in filter(_is_cache, values if isinstance(values, Iterable) else ()):
            setattr(cache, ROTATION, self.rotation(module, args, kwargs))


def cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the cache among the arguments of a call, or None."""
    cache = kwargs.get("past_key_values")
    return next(filter(_is_cache, args), None) if cache is None else cache


def named(label: str, *frequencies: bytes) -> str:
    """Name a rotation for messages; equal names are equal frequencies."""
    digest = hashlib.sha256(b"".join(frequencies)).hexdigest()
    return f"{label} (frequencies {digest[:12]})"


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")  # some models have a class of their own


def _length(cache: Any) -> Any:
    """Return the number of tokens in a cache; transformers < 5 takes tuples, too."""
    return cache.get_seq_length() if _is_cache(cache) else len(cache)
