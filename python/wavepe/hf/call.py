"""The arguments of one pass through a base model, read once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .families import cache_in, is_cache


class Call:
    """The arguments of a call of a module.

    Attributes
    ----------
    module : Module
    kwargs : dict of str to value
        All arguments by name; what is changed here is what the module gets.
    cache : cache of transformers, or None
    """

    def __init__(
        self, module: Any, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.module = module
        self.kwargs = dict(zip(names, args, strict=False)) | kwargs
        self.cache = cache_in(self.kwargs)
        if self.cache is None:  # under a name that only its family knows
            self.cache = next(filter(is_cache, args), None)

    @property
    def tokens(self) -> Tensor | None:
        """The ids, embeddings or hidden states (B, L, ...)."""
        for name in ("input_ids", "inputs_embeds", "hidden_states"):
            found = self.kwargs.get(name)
            if found is not None:
                return found
        return None
