"""Notes on caches that name the encoding which filled them; another one is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .absolute import AddAbsolute
from .families import argument_names
from .layers import StoredSpec, spec_text
from .passes import Args, Kwargs, Pass, caches_in
from .rotary import RopeRotation

Parts = Sequence[RopeRotation | AddAbsolute]
ENCODING = "_wavepe_encoding"  # attribute of a cache


class CacheGuard:
    """Refuse a cache whose keys were computed with another encoding."""

    names: tuple[str, ...] = ()
    hint = ""  # another remedy for the error

    def __init__(self, initial: str | None, current: str = "", parts: Parts = ()) -> None:
        self.initial = initial  # the name of what filled a cache without a note; None: unknown
        self.current = current  # the name of the encoding, without the parts
        self.parts = parts  # whose frequencies may change between passes: each pass names them

    @classmethod
    def of(cls, spec: StoredSpec, parts: Parts) -> CacheGuard:
        """Return the guard of a patched model; keys of `parts` depend on more than the spec."""
        current = spec_text(spec)
        names = [part.constant_cache_name for part in parts]
        initial = None if None in names else "; ".join([current, *filter(None, names)])
        guard = cls(initial, current, parts)
        if any(part.follows_length for part in parts):  # `fix_length` may end that
            guard.hint = ", or call wavepe.hf.fix_length(model, length) before the first token"
        return guard

    def attach(self, module: nn.Module) -> list[Any]:
        """Register the hooks of a module that this guard alone watches; return their handles."""
        self.names = argument_names(module)
        return [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, with_kwargs=True),
        ]

    def _before(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self.before(Pass(self.names, args, kwargs))

    def _after(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        self.after(Pass(self.names, args, kwargs), output)

    def encoding(self, pass_: Pass) -> str:
        """Name the encoding of this pass and its frequencies."""
        names = [self.current]
        for part in self.parts:
            name = part.constant_cache_name
            names.append(part.name(pass_.positions, pass_.length()) if name is None else name)
        return "; ".join(names)

    def before(self, pass_: Pass) -> None:
        """Note the encoding on the cache; ValueError if its keys are of another encoding."""
        cache = pass_.cache
        if cache is None or (pass_.compiling and torch.compiler.is_exporting()):
            return
        now, noted = self.encoding(pass_), getattr(cache, ENCODING, None)
        if noted == now:
            return
        then = self.initial if noted is None else noted
        if then != now and pass_.cached > 0:
            raise ValueError(
                f"the {int(pass_.cached)} cached keys were computed with "
                f"{then or 'unknown frequencies'}, but this call uses {now}: start from an empty "
                f"cache, or pass use_cache=False{self.hint}"
            )
        setattr(cache, ENCODING, now)

    def after(self, pass_: Pass, output: Any) -> None:
        """Note the encoding on a cache that the module has created."""
        if pass_.cache is None and not (pass_.compiling and torch.compiler.is_exporting()):
            for cache in caches_in(output):
                setattr(cache, ENCODING, self.encoding(pass_))
