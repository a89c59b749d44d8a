"""Packed sequences, and positions that no kernel can take.

Packed sequences are several in one row, none of which sees another. transformers finds them only
without a cache and without a mask, and a model in evaluation mode creates a cache.

The kernels measure distance in tokens, which is right only if positions increase by one per token.
Rotations and added vectors take any positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..encodings import Encoding
from ..ops._compiler import wants_standard
from ..ops._torch_private import assert_async
from ..positions.tokens import largest_so_far, value_before
from . import masks
from .passes import Pass, caches_in

# Attributes of caches.
PACKED = "_wavepe_packed"
SHIFTS = "_wavepe_shifts"  # of each row, position - index of its tokens; absent: all are 0


def measures_tokens(encoding: Encoding) -> bool:
    """Return whether an encoding measures distances in tokens, whatever the positions are."""
    return bool(
        {"table", "slopes", "bias", "input_decay"} & {*encoding.terms, *encoding.learns}
        or encoding.has_vectors
        or encoding.window is not None
        or getattr(encoding.rotary, "self_extend", None) is not None
    )


def read_sequences(pass_: Pass, base: nn.Module, counting: Encoding | None) -> None:
    """Find packed sequences; refuse positions that `counting`, the encoding, cannot take."""
    tokens, cache, mask = pass_.tokens, pass_.cache, pass_.mask
    if pass_.paged or tokens is None or tokens.ndim < 2 or not tokens.numel():
        return  # known requests; or the model raises the error
    packs = mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)
    if packs and hasattr(cache, PACKED):
        if pass_.cached > 0:
            raise ValueError(
                "the cache holds packed sequences, and new tokens would belong to none of them: to "
                "generate, give each sequence its own row"
            )
        delattr(cache, PACKED)  # the cache was emptied since
    ends, noted = pass_.sequence_ends, counting is not None and hasattr(cache, SHIFTS)
    device, compiling = tokens.device, pass_.compiling
    waits = masks.reading_waits(device) and not compiling
    if waits and mask is cache is pass_.positions is ends is None:
        pass_.set_mask(masks.nothing_hidden(device))
        return
    if tokens.shape[1] == 1 and ends is None:
        if counting is not None and not (compiling or waits) and not _is_next(pass_):
            _check_start(pass_, counting, pass_.real_tokens())
        return
    if pass_.positions is ends is None and not noted:
        return  # the tokens follow each other
    # A cache with packed sequences must be marked.
    makes_cache = pass_.use_cache is not False and not base.training
    read = masks.may_read_values(device, base.config)
    read = read or ((cache is not None or makes_cache) and not compiling)
    begins, usual, known = None, True, None
    if (pass_.positions is not None or noted) and not (compiling and cache is not None):
        begins, usual, known = _look(pass_, counting, read or not (waits or compiling))
    if packs and ends is not None:
        begins = _from_lengths(pass_, read)
    if packs and begins is not None and not (read and not begins[:, 1:].any()):
        _pack(pass_, base.config, begins, read)
    if counting is not None and not (usual or waits or compiling):
        _check_start(pass_, counting, known)


def _is_next(pass_: Pass) -> bool:
    """Return whether this one token goes on where each row of the cache ends."""
    positions, shifts = pass_.positions, getattr(pass_.cache, SHIFTS, None)
    if positions is None:
        return shifts is None
    rows, cached = positions.tolist(), int(pass_.cached)
    if shifts is None:
        return rows.count([cached]) == len(rows)
    return rows == [[cached + shift] for shift in shifts if shift is not None]


def _look(
    pass_: Pass, counting: Encoding | None, read: bool
) -> tuple[Tensor | None, bool, Tensor | None]:
    """Return a bool tensor (B, m), True where positions begin a sequence again, or None.

    Also return whether positions are known to be the indices of the tokens; if not, the real tokens
    so far. Padding is skipped. A gap in the positions does not begin a sequence.
    """
    tokens: Any = pass_.tokens
    rows, count = tokens.shape[:2]
    positions = pass_.counted_positions()
    if not _fit(positions, tokens):
        return None, True, None  # the model raises the error
    positions = positions.to(tokens.device)
    index = torch.arange(count, device=tokens.device)
    waits = masks.reading_waits(tokens.device)
    usual = (index + pass_.cached).expand_as(positions)
    if read and not (waits or hasattr(pass_.cache, SHIFTS)) and torch.equal(positions, usual):
        return None, True, None
    known = pass_.real_tokens()
    real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    real = real if known is None else known[:, -count:].to(tokens.device)
    last = largest_so_far(torch.where(real, index.expand_as(real), -1))
    before = value_before(last, -1)
    step = positions - positions.expand(rows, -1).gather(-1, before.clamp(min=0))
    after = real & (before >= 0)
    begins = after & (step <= 0)
    if counting is not None:
        good = ~after | (step == index - before)
        if not masks.has_pairs(pass_.widest_mask()):  # such a mask packs nothing
            good |= begins
        if waits or pass_.compiling:
            where = "a compiled model" if pass_.compiling else "a model on this device"
            if not (pass_.compiling and wants_standard()):
                assert_async(good.amin(), f"wavepe: in {where} positions must rise by 1 per token")
        elif not good.all():
            raise _gap(counting, positions.expand(rows, -1), good, before)
    return (None if pass_.mask is not None and known is None else begins), False, known


def _fit(positions: Tensor, tokens: Tensor) -> bool:
    """Return whether there is a position for each token, or for each column."""
    rows, count = tokens.shape[:2]
    return positions.ndim == 2 and positions.shape[1] == count and positions.shape[0] in (1, rows)


def _gap(counting: Encoding, positions: Tensor, good: Tensor, before: Tensor) -> ValueError:
    """Return the error for positions that do not rise by 1; `before` has the last real tokens."""
    row, column = (~good).nonzero()[0].tolist()
    last = int(before[row, column])
    position, previous = int(positions[row, column]), int(positions[row, last])
    return ValueError(
        f"{counting} measures distances in tokens, so positions must rise by 1 per token; row "
        f"{row} of position_ids has {position} after {previous}: give position_ids without gaps "
        "and branches, and an attention_mask (batch, tokens) that hides no tokens between others, "
        "not one of queries x keys; or take an encoding that only rotates or adds vectors"
    )


def _check_start(pass_: Pass, counting: Encoding, known: Tensor | None) -> None:
    """Raise ValueError if positions do not go on where those of the keys in the cache end."""
    tokens: Any = pass_.tokens
    rows, count = tokens.shape[:2]
    positions = pass_.counted_positions()
    if not _fit(positions, tokens):
        return  # the model raises the error
    first = torch.zeros((rows, 1), dtype=torch.int64)
    seen, usual = [True] * rows, [0] * rows
    if known is not None:
        new = known[:, -count:]
        first, seen = new.int().argmax(1, keepdim=True), new.any(1).tolist()
        # `generate` pads on the left, and counts the real tokens.
        padded = (known[:, 1:] >= known[:, :-1]).all(1)
        usual = torch.where(padded, -(~known).sum(1), 1 << 62).tolist()
    place = positions.expand(rows, -1).gather(1, first) - first - pass_.cached
    shifts: list[int | None] = place[:, 0].tolist()
    noted = _noted_shifts(pass_, rows)
    for row, before in enumerate(noted):
        if not seen[row]:
            shifts[row] = before
        elif before is not None and shifts[row] not in (before, usual[row]):
            position = int(positions.expand(rows, -1)[row, first[row, 0]])
            raise ValueError(
                f"{counting} measures distances in tokens, and position {position} of row {row} "
                f"does not follow the {int(pass_.cached)} cached keys, which continue at position "
                f"{int(pass_.cached) + before}: keys were taken out of the cache, a program filled "
                "it by hand, rows were reordered without their attention_mask, or only earlier "
                "calls gave position_ids. Give the position_ids or the attention_mask of all "
                "tokens, or pass use_cache=False"
            )
    pass_.shifts = shifts


def _noted_shifts(pass_: Pass, rows: int) -> list[int | None]:
    """Return position - index of the keys in each row of the cache; None: it may be any."""
    shifts: list[int | None] = getattr(pass_.cache, SHIFTS, [0]) if int(pass_.cached) else []
    if len(shifts) == rows:
        return shifts
    # The rows were repeated or chosen.
    return shifts[:1] * rows if len(set(shifts)) == 1 else [None] * rows


def _from_lengths(pass_: Pass, read: bool) -> Tensor:
    """Return where sequences begin by cu_seq_lens_q, bool (1, m); checked if `read`."""
    tokens: Any = pass_.tokens
    ends, key_ends = pass_.sequence_ends, pass_.key_ends
    rows, count = tokens.shape[:2]
    if not isinstance(ends, Tensor):
        raise TypeError(f"cu_seq_lens_q must be a tensor, got {type(ends).__name__}")
    values = ends.flatten().tolist() if read else [0, count]
    keys = values if key_ends is None or not read else key_ends.tolist()
    risen = values == sorted(values) and values[:1] == [0] and values[-1:] == [count]
    if rows != 1 or not risen or keys != values:
        raise ValueError(
            "cu_seq_lens_q tells the packed sequences of one row without cached keys: it must be "
            f"equal to cu_seq_lens_k and rise from 0 to the number of tokens, {count}; got "
            f"{values} and {keys} for {rows} rows"
        )
    index = torch.arange(count, device=tokens.device)
    begins = torch.isin(index, ends.to(tokens.device))[None]
    if pass_.positions is None and not (read and not begins[:, 1:].any()):
        start = largest_so_far(torch.where(begins[0], index, 0))
        pass_.set_positions((index - start)[None])
    return begins


def _pack(pass_: Pass, config: Any, begins: Tensor, read: bool) -> None:
    """Give the module a mask of packed sequences, which begin at these tokens."""
    cache = pass_.cache
    if not pass_.kwargs.get("is_causal", getattr(config, "is_causal", True)):
        raise ValueError(
            "packed sequences need causal attention, got is_causal=False: give a mask of queries x "
            "keys that hides the other sequences"
        )
    if read and cache is not None:
        if pass_.cached > 0:
            starts = begins[:, 1:].any(0).nonzero().flatten() + 1
            raise ValueError(
                f"packed sequences (new ones begin at {starts[:8].tolist()}) cannot follow the "
                f"{int(pass_.cached)} tokens of a cache: pass use_cache=False"
            )
        setattr(cache, PACKED, True)
    elif read:
        if pass_.use_cache is True:
            raise ValueError("packed sequences cannot be continued: pass use_cache=False")
        pass_.kwargs["use_cache"] = False
    if read or cache is None:  # unread, a row of one sequence gets a mask, too
        numbers = begins.long().cumsum(-1) + 1  # of each token's sequence, 0 for padding
        if pass_.mask is not None:
            numbers = numbers * pass_.mask[:, : begins.shape[1]].bool()
        pass_.set_mask(numbers[:, None, None].to(masks.SEGMENTS))
        pass_.packed = True


def note_shifts(pass_: Pass, output: Any) -> None:
    """Note on the cache how far the positions of this pass are from the indices."""
    shifts: Any = pass_.shifts
    cache = pass_.cache if pass_.cache is not None else next(iter(caches_in(output)), None)
    if cache is not None and any(shift != 0 for shift in shifts):
        setattr(cache, SHIFTS, shifts)
    elif hasattr(cache, SHIFTS):
        delattr(cache, SHIFTS)
