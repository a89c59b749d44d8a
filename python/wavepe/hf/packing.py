"""Packed sequences: several in one row, none of which sees another.

transformers finds them by positions that start again, but only without a cache and without a mask,
and a model in evaluation mode makes a cache. This hook of the base model finds them in any case,
and by the keyword cu_seq_lens_q that collators make for flash attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import families, masks
from .cache_guard import PACKED


class FindPacked:
    """Forward pre-hook of a base model: masks for packed sequences, instead of silence."""

    def __init__(self, base: nn.Module) -> None:
        self.names = families.argument_names(base)

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        kwargs = dict(zip(self.names, args, strict=False)) | kwargs
        tokens = kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
        if tokens is None or isinstance(mask, dict) or (mask is not None and mask.ndim != 2):
            return None  # the model says what is wrong, or the mask says what is seen
        if cache is not None and hasattr(cache, PACKED):
            if cache.get_seq_length() > 0:
                raise ValueError(
                    "the cache holds packed sequences, and what follows belongs to none of them: "
                    "generate from one sequence a row"
                )
            delattr(cache, PACKED)  # it was emptied since
        compiling = torch.compiler.is_compiling()
        given = (mask, cache, kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q"))
        if masks.waits(tokens.device) and not compiling and all(x is None for x in given):
            return (), kwargs | {"attention_mask": masks.nothing_hidden(tokens.device)}
        # A cache of packed sequences must be known for one.
        cached = cache is not None or (kwargs.get("use_cache") is not False and not module.training)
        look = masks.may_look(tokens.device, module.config) or (cached and not compiling)
        begins = self._begins(kwargs, tokens, mask, cache, look)
        if begins is None:
            return None
        padding = None if mask is None else mask[:, : tokens.shape[1]]
        if not look:
            # What a tensor holds decides nothing here: all is numbered, be it one sequence.
            if cache is not None:
                return None
            return (), kwargs | {"attention_mask": masks.numbered(begins, padding, look)}
        if cache is not None and cache.get_seq_length() > 0:
            starts = begins[:, 1:].any(0).nonzero().flatten() + 1
            raise ValueError(
                f"packed sequences, new ones at {starts[:8].tolist()}, cannot follow the "
                f"{int(cache.get_seq_length())} tokens of a cache: pass use_cache=False"
            )
        if cache is not None:
            setattr(cache, PACKED, True)
        elif kwargs.get("use_cache") is not True:
            kwargs["use_cache"] = False  # it could not be continued
        else:
            raise ValueError("packed sequences cannot be continued: pass use_cache=False")
        return (), kwargs | {"attention_mask": masks.numbered(begins, padding, look)}

    def _begins(
        self, kwargs: dict[str, Any], tokens: Tensor, mask: Tensor | None, cache: Any, look: bool
    ) -> Tensor | None:
        """Find where sequences begin, (B, n); None where it is known that there is one a row."""
        rows, length = tokens.shape[:2]
        if kwargs.get("cu_seq_lens_q") is not None:
            begins = _from_lengths(kwargs, rows, length, tokens.device, look)
            if look and not begins[:, 1:].any():
                return None
            if kwargs.get("position_ids") is None:
                place = torch.arange(length, device=tokens.device)
                start = torch.where(begins[0], place, 0).cummax(0).values
                kwargs["position_ids"] = (place - start)[None]
            return begins
        positions = kwargs.get("position_ids")
        if positions is None or length < 2:
            return None
        if positions.ndim != 2 or positions.shape[1] != length:
            return None
        if torch.compiler.is_compiling() and cache is not None:
            return None
        positions = positions.to(tokens.device).expand(rows, -1)
        real = torch.ones((rows, length), dtype=torch.bool, device=tokens.device)
        if mask is not None:
            first = 0 if cache is None else int(cache.get_seq_length())
            if mask.shape[1] < first + length:
                return None
            real = mask[:, first : first + length].bool().to(tokens.device)
        begins = _restarts(positions, real)
        return None if look and not begins[:, 1:].any() else begins


def _restarts(positions: Tensor, real: Tensor) -> Tensor:
    """Find tokens whose position is not beyond that of the token before, past padding, (B, n).

    A gap begins no sequence: positions may be drawn at random, or tokens have been left out.
    """
    place = torch.arange(real.shape[1], device=real.device).expand_as(real)
    last = torch.where(real, place, -1).cummax(-1).values
    before = torch.cat((torch.full_like(last[:, :1], -1), last[:, :-1]), -1)
    step = positions - positions.gather(-1, before.clamp(min=0))
    return real & (before >= 0) & (step <= 0)


def _from_lengths(
    kwargs: dict[str, Any], rows: int, length: int, device: torch.device, look: bool
) -> Tensor:
    """Read the keyword cu_seq_lens_q: 0, and the end of each sequence of the one row.

    What it holds is checked where one may `look`.
    """
    ends, same = kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k")
    if not isinstance(ends, Tensor):
        raise TypeError(f"cu_seq_lens_q must be a tensor, got {type(ends).__name__}")
    if rows != 1:
        raise ValueError(f"cu_seq_lens_q needs one row of packed sequences, got {rows}")
    if look:
        if same is not None and not torch.equal(ends, same):
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ: keys of a cache are packed")
        given = ends.tolist()
        if ends.ndim != 1 or given[:1] != [0] or given[-1] != length or given != sorted(given):
            raise ValueError(
                f"cu_seq_lens_q must go up from 0 to the number of tokens {length}, got {given}"
            )
    place = torch.arange(length, device=device)
    return torch.isin(place, ends.to(device))[None]
