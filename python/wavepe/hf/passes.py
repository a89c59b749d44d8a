"""One pass through a base model: its arguments are read here, and nowhere else in `hf`.

A `Pass` travels through transformers' keyword arguments to every layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from ..positions import LearnedCache, Requests, Rotated, Terms
from ..positions.tokens import token_positions
from . import families, masks

# The arguments of a module's forward, as hooks take and return them.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

PASS = "wavepe_pass"  # argument of a base model and of its layers


class Pass:
    """The arguments of one pass through a base model, or through a layer that stands alone.

    `kwargs` holds all arguments by name, and what is changed there is what the module gets. Its
    hook takes the dict out, because the dict will hold this object. Without `positions`, tokens
    count from `cached`: the number of tokens in the cache, or in its entry of the `layer`.
    """

    # of the layer that runs: its input, its angles, the index of the key at the position of the
    # first query (None: the queries come last), and what its cache had to know already
    hidden: Tensor | None = None
    angles: Any = None
    rotated: Rotated | None = None
    offset: int | Tensor | None = None
    learned: Terms | None = None
    kept: LearnedCache | None = None  # learned terms of the generation, without gradients
    # An attention layer has begun; the last to begin has not called the attention function yet.
    ran = waiting = False
    _parts: tuple[Tensor, masks.MaskParts] | None = None
    paged: Any = None  # the cache of continuous batching
    requests: Requests | None = None  # in its row
    packed = False  # whether the tokens may be several sequences
    shifts: list[int | None] | None = None  # see sequences.py

    def __init__(
        self, names: tuple[str, ...], args: Args, kwargs: Kwargs, layer: int | None = None
    ) -> None:
        if args:
            kwargs = dict(zip(names, args, strict=False)) | kwargs
        self.kwargs = kwargs
        self.tokens: Tensor | None = None
        for name in ("input_ids", "inputs_embeds", "hidden_states"):
            if kwargs.get(name) is not None:
                self.tokens = kwargs[name]
                break
        self.cache: Any = None
        self.cached: int | Tensor = 0
        for name in families.CACHE_NAMES:
            value = kwargs.get(name)
            if value is None:
                continue
            if hasattr(value, "get_seq_length"):
                self.cache = value
                if layer is None:
                    self.cached = value.get_seq_length()
                else:
                    self.cached = getattr(value, "get_query_offset", value.get_seq_length)(layer)
                break
            if name == "cache":  # that of continuous batching, whose requests share a row
                self.paged, self.kept = value, LearnedCache.of(value)
        if isinstance(self.cached, Tensor):
            # Static caches go on counting in their tensor; those of transformers 5.0 miscount.
            places = kwargs.get("cache_position")
            self.cached = self.cached.clone() if places is None else places[0]
        # whether the queries are the last keys in every layer
        self.queries_last = self.cache is None or type(self.cache) is DynamicCache
        self.positions: Tensor | None = kwargs.get("position_ids")
        self.mask: Any = kwargs.get("attention_mask")
        self.sequence_ends: Any = kwargs.get("cu_seq_lens_q")
        self.key_ends: Any = kwargs.get("cu_seq_lens_k")
        self.use_cache: bool | None = kwargs.get("use_cache")
        self.weights: bool | None = kwargs.get("output_attentions")
        self.compiling = torch.compiler.is_compiling()
        self.reused: dict[str, Any] = {}  # by type, what layers keep for those that reuse keys
        self.terms: dict[int, Terms] = {}  # number of keys -> shared terms, without gradients

    def mask_parts(self, mask: Tensor) -> masks.MaskParts:
        """Return `masks.mask_parts` of a mask, which most layers share."""
        if self._parts is None or mask is not self._parts[0]:
            self._parts = mask, masks.mask_parts(mask)
        return self._parts[1]

    def set_mask(self, mask: Tensor | None) -> None:
        """Give the module another mask."""
        self.mask = self.kwargs["attention_mask"] = mask

    def set_positions(self, positions: Tensor | None) -> None:
        """Give the module other positions."""
        self.positions = self.kwargs["position_ids"] = positions

    def counted_positions(self) -> Tensor:
        """Return the positions (B|1, m) of the tokens."""
        if self.positions is not None:
            return self.positions
        tokens: Any = self.tokens
        return torch.arange(tokens.shape[1], device=tokens.device)[None] + self.cached

    def length(self) -> int:
        """Return the number of tokens so far; 1 for a pass without tokens."""
        return int(self.cached) + (1 if self.tokens is None else self.tokens.shape[1])

    def positions_by_mask(self) -> Tensor | None:
        """Return the positions (B, m), where a mask (B, cached + m) counts them."""
        tokens, mask = self.tokens, self.mask
        if tokens is None or tokens.ndim < 2 or not isinstance(mask, Tensor) or mask.ndim != 2:
            return None
        count = tokens.shape[1]
        return token_positions(mask)[:, -count:] if mask.shape[1] == self.cached + count else None

    def widest_mask(self) -> Tensor | None:
        """Return the mask, or the widest of those made in advance for each type of layer."""
        if not isinstance(self.mask, dict):
            return self.mask if isinstance(self.mask, Tensor) else None
        tensors = [mask for mask in self.mask.values() if isinstance(mask, Tensor)]
        return max(tensors, key=lambda mask: mask.shape[-1], default=None)

    def real_tokens(self) -> Tensor | None:
        """Return a mask of real tokens so far, bool (B, n); None if the mask does not say."""
        mask, tokens = self.widest_mask(), self.tokens
        if mask is None or tokens is None or mask.ndim not in (2, 4) or masks.has_pairs(mask):
            return None
        total = self.cached + tokens.shape[1]
        real = mask.flatten(1)[:, :total] != 0
        if mask.shape[-1] < total:
            if mask.ndim == 2:
                return None  # the model raises the error
            # Windows have dropped the first keys of a static cache, and nobody asks for those.
            real = pad(real, (int(total - mask.shape[-1]), 0), value=True)
        return real.expand(tokens.shape[0], -1)


def caches_in(output: Any) -> Iterable[Any]:
    """Return the caches in the output of a base model."""
    values = output.values() if isinstance(output, Mapping) else output
    values = values if isinstance(values, Iterable) else ()
    return (value for value in values if hasattr(value, "get_seq_length"))
