"""Notes on caches: which encoding filled them, and whether they hold packed sequences."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Cache

from .families import cache_in, is_cache
from .layers import StoredSpec, spec_text

if TYPE_CHECKING:
    from .absolute import AddAbsolute
    from .rotary import RopeRotation

# Attributes that are set on caches.
ENCODING = "_wavepe_encoding"
STOCK = "_wavepe_stock"
PACKED = "_wavepe_packed"


class CacheGuard:
    """Forward hooks that refuse a cache whose keys were computed with another encoding.

    Attributes
    ----------
    initial : str or None
        Name of the encoding and frequencies that a cache without a note has; None: unknown.
    current : str
        Name of the encoding and frequencies that the module has now.
    hint : str
        Another remedy, which the error message adds.
    """

    hint = ""

    def __init__(self, initial: str | None, current: str = "") -> None:
        self.initial, self.current = initial, current

    def attach(self, module: nn.Module) -> list[Any]:
        """Register the hooks, and return their handles."""
        return [
            module.register_forward_pre_hook(self.before, with_kwargs=True),
            module.register_forward_hook(self.after, with_kwargs=True),
        ]

    def encoding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Name the encoding of this call."""
        return self.current

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the encoding on the cache; ValueError if its keys are of another encoding."""
        cache = cache_of(args, kwargs)
        if cache is None or torch.compiler.is_exporting():
            return
        now = self.encoding(args, kwargs)
        then = getattr(cache, ENCODING, self.initial)
        if then != now and (count := _length(cache)) > 0:
            raise ValueError(
                f"the {int(count)} cached keys were computed with {then or 'unknown frequencies'}, "
                f"but this call uses {now}: start from an empty cache, or pass "
                f"use_cache=False{self.hint}"
            )
        if is_cache(cache) and getattr(cache, ENCODING, None) != now:
            setattr(cache, ENCODING, now)

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note the encoding on a cache that the module has created."""
        if cache_of(args, kwargs) is not None or torch.compiler.is_exporting():
            return
        values = output.values() if isinstance(output, Mapping) else output
        for cache in filter(is_cache, values if isinstance(values, Iterable) else ()):
            setattr(cache, ENCODING, self.encoding(args, kwargs))


class EncodingGuard(CacheGuard):
    """The `CacheGuard` of a patched model.

    Parameters
    ----------
    spec : str or dict
        The encoding.
    parts : list of RopeRotation or AddAbsolute
        Parts of the encoding whose keys depend on more than the spec, such as the sequence length.
    names : tuple of str
        Names of the positional arguments of the guarded module.
    """

    def __init__(
        self, spec: StoredSpec, parts: list[RopeRotation | AddAbsolute], names: tuple[str, ...]
    ) -> None:
        self.spec, self.parts, self.names = spec, parts, names
        steady = all(one.steady_name for one in parts)
        if any(one.follows_length for one in parts):
            self.hint = ", or call wavepe.hf.fix_length(model, length) before the first token"
        super().__init__(self.encoding((), {}) if steady else None)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse the caches of the stock model as well."""
        cache = cache_of(args, kwargs)
        if hasattr(cache, STOCK):
            delattr(cache, STOCK)
            setattr(cache, ENCODING, "the stock model's own encoding")
        super().before(module, args, kwargs)

    def encoding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Name the encoding of this call and its frequencies."""
        position_ids, length = None, 1
        if not all(one.steady_name for one in self.parts):
            kwargs = dict(zip(self.names, args, strict=False)) | kwargs
            position_ids, cache = kwargs.get("position_ids"), cache_of(args, kwargs)
            tokens = [kwargs.get(key) for key in ("input_ids", "inputs_embeds", "hidden_states")]
            length = next((x.shape[1] for x in tokens if x is not None), 1)
            length += 0 if cache is None else int(_length(cache))
        found = [one.name(position_ids, length) for one in self.parts]
        # The names of rope alone contain the spec.
        spec = [] if found and isinstance(self.spec, str) else [spec_text(self.spec)]
        return "; ".join(spec + found)


def cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the cache among the arguments of a call, or None."""
    cache = cache_in(kwargs)
    return next(filter(is_cache, args), None) if cache is None else cache


def mark_stock_caches() -> None:
    """Mark every cache that exists before a patch: a patched model refuses their keys."""
    for value in gc.get_objects():
        if issubclass(type(value), Cache) and not hasattr(value, ENCODING):
            setattr(value, STOCK, True)


def frequency_name(label: str, *frequencies: bytes) -> str:
    """Return a name for messages; equal names mean equal frequencies."""
    digest = hashlib.sha256(b"".join(frequencies)).hexdigest()
    return f"{label} (frequencies {digest[:12]})"


def _length(cache: Any) -> Any:
    """Return the number of tokens in a cache, or in the tuples that transformers < 5 also takes."""
    if is_cache(cache):
        return cache.get_seq_length()
    return cache[0][0].shape[-2] if cache else 0
