"""Notes on caches: which encoding filled them, and whether they hold packed sequences."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ..encodings import encoding
from .call import Call
from .families import argument_names, is_cache
from .layers import StoredSpec, spec_text

if TYPE_CHECKING:
    from .absolute import AddAbsolute
    from .rotary import RopeRotation

# Attributes that are set on caches.
ENCODING = "_wavepe_encoding"
STOCK = "_wavepe_stock"
PACKED = "_wavepe_packed"


class CacheGuard:
    """Refuse a cache whose keys were computed with another encoding.

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
    names: tuple[str, ...] = ()

    def __init__(self, initial: str | None, current: str = "") -> None:
        self.initial, self.current = initial, current

    def attach(self, module: nn.Module) -> list[Any]:
        """Register the hooks of a module that this guard alone watches; return their handles."""
        self.names = argument_names(module)
        return [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, with_kwargs=True),
        ]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.before(Call(module, self.names, args, kwargs))

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        self.after(Call(module, self.names, args, kwargs), output)

    def encoding(self, call: Call) -> str:
        """Name the encoding of this call."""
        return self.current

    def before(self, call: Call) -> None:
        """Note the encoding on the cache; ValueError if its keys are of another encoding."""
        cache = call.cache
        if cache is None or torch.compiler.is_exporting():
            return
        now = self.encoding(call)
        then = getattr(cache, ENCODING, self.initial)
        if then != now and (count := cache.get_seq_length()) > 0:
            raise ValueError(
                f"the {int(count)} cached keys were computed with {then or 'unknown frequencies'}, "
                f"but this call uses {now}: start from an empty cache, or pass "
                f"use_cache=False{self.hint}"
            )
        if getattr(cache, ENCODING, None) != now:
            setattr(cache, ENCODING, now)

    def after(self, call: Call, output: Any) -> None:
        """Note the encoding on a cache that the module has created."""
        if call.cache is None and not torch.compiler.is_exporting():
            for cache in caches_in(output):
                setattr(cache, ENCODING, self.encoding(call))


class EncodingGuard(CacheGuard):
    """The `CacheGuard` of a patched model.

    Parameters
    ----------
    spec : str or dict
        The encoding.
    parts : list of RopeRotation or AddAbsolute
        Parts of the encoding whose keys depend on more than the spec, such as the sequence length.
    """

    def __init__(self, spec: StoredSpec, parts: list[RopeRotation | AddAbsolute]) -> None:
        self.parts = parts
        self.spec = [_without_frequencies(spec)] if parts else [spec_text(spec)]
        steady = all(one.steady_name for one in parts)
        if any(one.follows_length for one in parts):
            self.hint = ", or call wavepe.hf.fix_length(model, length) before the first token"
        super().__init__(self._name(None, 1) if steady else None)

    def before(self, call: Call) -> None:
        """Refuse the caches of the stock model as well."""
        if hasattr(call.cache, STOCK):
            delattr(call.cache, STOCK)
            setattr(call.cache, ENCODING, "the stock model's own encoding")
        super().before(call)

    def encoding(self, call: Call) -> str:
        """Name the encoding of this call and its frequencies."""
        positions, length = None, 1
        if not all(one.steady_name for one in self.parts):
            positions, tokens = call.kwargs.get("position_ids"), call.tokens
            length = 1 if tokens is None else tokens.shape[1]
            length += 0 if call.cache is None else int(call.cache.get_seq_length())
        return self._name(positions, length)

    def _name(self, positions: Tensor | None, length: int) -> str:
        found = [*self.spec, *(one.name(positions, length) for one in self.parts)]
        return "; ".join(filter(None, found))


def _without_frequencies(spec: StoredSpec) -> str:
    """Return a spec for the names of a guard, where a part that rotates has a name of its own."""
    if not isinstance(spec, str):
        return spec_text(spec)
    whole = encoding(spec)
    if whole.parts == (whole,):  # its part's name tells it apart
        return ""
    texts = [(part.name if part.rotates else str(part), place) for part, place in whole.placed]
    return "+".join(f"{text}@{place}" if place else text for text, place in texts)


def mark_stock_caches() -> None:
    """Mark every cache that exists before a patch: a patched model refuses their keys."""
    for value in gc.get_objects():
        if issubclass(type(value), Cache) and not hasattr(value, ENCODING):
            setattr(value, STOCK, True)


def frequency_name(label: str, *frequencies: bytes) -> str:
    """Return a name for messages; equal names mean equal frequencies."""
    digest = hashlib.sha256(b"".join(frequencies)).hexdigest()
    return f"{label} (frequencies {digest[:12]})"


def caches_in(output: Any) -> Iterable[Any]:
    """Return the caches in the output of a base model."""
    values = output.values() if isinstance(output, Mapping) else output
    return filter(is_cache, values if isinstance(values, Iterable) else ())
