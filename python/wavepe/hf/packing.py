"""Packed sequences: several sequences in one row, none of which sees another.

transformers finds them where the positions start again, but only if there is no cache and no mask.
A model in evaluation mode creates a cache. This module finds them in all cases. It also reads the
keyword cu_seq_lens_q, which collators for flash attention pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..positions.tokens import largest_so_far, value_before
from . import masks
from .cache_guard import PACKED
from .call import Call


def add_packed_mask(call: Call) -> None:
    """Add the mask of packed sequences to the arguments of a base model, if there are some."""
    kwargs, tokens, cache = call.kwargs, call.tokens, call.cache
    mask = kwargs.get("attention_mask")
    if tokens is None or isinstance(mask, dict) or (mask is not None and mask.ndim != 2):
        return  # the model raises the error, or the mask alone decides
    if cache is not None and hasattr(cache, PACKED):
        if cache.get_seq_length() > 0:
            raise ValueError(
                "the cache holds packed sequences, and new tokens would belong to none of them: to "
                "generate, give each sequence its own row"
            )
        delattr(cache, PACKED)  # the cache was emptied since
    compiling = torch.compiler.is_compiling()
    given = (mask, cache, kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q"))
    if masks.reading_waits(tokens.device) and not compiling and all(x is None for x in given):
        kwargs["attention_mask"] = masks.nothing_hidden(tokens.device)
        return
    # A cache with packed sequences must be marked.
    training = call.module.training
    cached = cache is not None or (kwargs.get("use_cache") is not False and not training)
    read = masks.may_read_values(tokens.device, call.module.config) or (cached and not compiling)
    begins = _begins(call, tokens, mask, read)
    if begins is None:
        return
    padding = None if mask is None else mask[:, : tokens.shape[1]]
    if not read:
        # Nothing may depend on values, so a row of one sequence gets a mask too.
        if cache is None:
            kwargs["attention_mask"] = masks.segment_mask(begins, padding, read)
        return
    if cache is not None and cache.get_seq_length() > 0:
        starts = begins[:, 1:].any(0).nonzero().flatten() + 1
        raise ValueError(
            f"packed sequences (new ones begin at {starts[:8].tolist()}) cannot follow the "
            f"{int(cache.get_seq_length())} tokens of a cache: pass use_cache=False"
        )
    if cache is not None:
        setattr(cache, PACKED, True)
    elif kwargs.get("use_cache") is not True:
        kwargs["use_cache"] = False  # packed sequences cannot be continued
    else:
        raise ValueError("packed sequences cannot be continued: pass use_cache=False")
    kwargs["attention_mask"] = masks.segment_mask(begins, padding, read)


def _begins(call: Call, tokens: Tensor, mask: Tensor | None, read: bool) -> Tensor | None:
    """Return a bool tensor (B, n), True where sequences begin; None if no row is packed."""
    kwargs, cache = call.kwargs, call.cache
    rows, length = tokens.shape[:2]
    if kwargs.get("cu_seq_lens_q") is not None:
        begins = _from_lengths(kwargs, rows, length, tokens.device, read)
        if read and not begins[:, 1:].any():
            return None
        if kwargs.get("position_ids") is None:
            index = torch.arange(length, device=tokens.device)
            start = largest_so_far(torch.where(begins[0], index, 0))
            kwargs["position_ids"] = (index - start)[None]
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
    return None if read and not begins[:, 1:].any() else begins


def _restarts(positions: Tensor, real: Tensor) -> Tensor:
    """Return a bool tensor (B, n): does the position fall or stay the same after the last token?

    Padding is skipped. A gap in the positions does not begin a sequence: positions may be drawn at
    random, or tokens may be left out.
    """
    index = torch.arange(real.shape[1], device=real.device).expand_as(real)
    last = largest_so_far(torch.where(real, index, -1))
    before = value_before(last, -1)
    step = positions - positions.gather(-1, before.clamp(min=0))
    return real & (before >= 0) & (step <= 0)


def _from_lengths(
    kwargs: dict[str, Any], rows: int, length: int, device: torch.device, read: bool
) -> Tensor:
    """Return a bool tensor (1, n), True where sequences begin, from the keyword cu_seq_lens_q.

    It holds 0 and the end of each sequence of the only row. Its values are checked if `read`.
    """
    ends, same = kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k")
    if not isinstance(ends, Tensor):
        raise TypeError(f"cu_seq_lens_q must be a tensor, got {type(ends).__name__}")
    if rows != 1:
        raise ValueError(f"cu_seq_lens_q needs one row of packed sequences, got {rows} rows")
    if read:
        if same is not None and not torch.equal(ends, same):
            raise ValueError(
                "cu_seq_lens_q and cu_seq_lens_k must be equal: packed sequences cannot follow the "
                "keys of a cache"
            )
        given = ends.tolist()
        if ends.ndim != 1 or given[:1] != [0] or given[-1] != length or given != sorted(given):
            raise ValueError(
                f"cu_seq_lens_q must rise from 0 to the number of tokens, {length}; got {given}"
            )
    index = torch.arange(length, device=device)
    return torch.isin(index, ends.to(device))[None]
