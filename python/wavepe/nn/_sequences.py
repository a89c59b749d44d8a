"""Check key masks, segments and positions, and join them with those of cached tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._attention_checks import check_mask
from ..ops._common import INTEGERS, check_tensors
from ..ops._torch_private import assert_async, holds
from ..positions.tokens import largest_so_far, value_before
from ._cache import CachedTokens

# Messages are made on failure only, because a compiler would fix the sizes in them.


def joined_key_mask(
    key_mask: Tensor | None, cached: CachedTokens | None, batch: int, count: int
) -> Tensor | None:
    """Return the mask (B|1, cached + count) of all tokens; None if nothing is hidden."""
    start = 0 if cached is None else cached.length
    before = None if cached is None else cached.key_mask
    if key_mask is None:
        if before is None:
            return None
        return torch.cat([before, before.new_ones((len(before), count))], 1)
    check_tensors(key_mask=key_mask)
    if key_mask.dtype != torch.bool:
        check_mask("key_mask", key_mask)
    good = key_mask.dim() == 2 and holds(key_mask.shape[0] == 1, key_mask.shape[0] == batch)
    if good and start and key_mask.shape[1] == start + count:
        return key_mask.expand(batch, -1)
    if not good or not holds(key_mask.shape[1] == count):
        longer = f" or {(batch, start + count)}, cached tokens included" if start else ""
        raise RuntimeError(
            f"wavepe: key_mask must be (B, L), here {(batch, count)}{longer}; got "
            f"{tuple(key_mask.shape)}"
        )
    key_mask = key_mask.expand(batch, -1)
    if not start:
        return key_mask
    before = key_mask.new_ones((batch, start)) if before is None else before
    return torch.cat([before, key_mask], 1)


def joined_positions(
    positions: Tensor | None, cached: CachedTokens | None, batch: int, count: int
) -> Tensor | None:
    """Return the positions of all tokens, int64 (B|1, cached + count); None if they are counted."""
    before = None if cached is None else cached.positions
    if positions is None:
        if before is not None:
            raise RuntimeError(
                "wavepe: the cached tokens were given positions: give positions for the new "
                "tokens, too"
            )
        return None
    positions = checked_rows("positions", positions, batch, count).to(torch.int64)
    if cached is None:
        return positions
    positions = positions.expand(batch, -1)
    if before is None:
        before = torch.arange(cached.length, device=positions.device).expand(batch, -1)
    return torch.cat([before, positions], 1)


def check_order(
    positions: Tensor, key_mask: Tensor | None, segments: Tensor | None, contiguous: bool
) -> None:
    """Raise RuntimeError if the positions (B|1, n) of a sequence do not rise.

    `contiguous` positions must rise exactly as the indices do. Hidden tokens may have any position.
    Positions on a device are not checked, because reading them would wait for the device.
    """
    if positions.device.type != "cpu":
        return
    here = torch.arange(positions.shape[1], device=positions.device)[None]
    visible = here if key_mask is None else largest_so_far(torch.where(key_mask, here, -1))
    before = value_before(visible, -1)  # the index of the last visible token before, or -1
    step = positions - _taken(positions, before)
    good = step == here - before if contiguous else step > 0
    good = good | (before < 0)
    if key_mask is not None:
        good = good | ~key_mask
    if segments is not None:
        good = good | (segments != _taken(segments, before))
    by_one = "must go up by 1, because this encoding counts distances in tokens"
    message = (
        f"wavepe: the positions of a row {by_one if contiguous else 'must rise'}; pass segments= "
        "for several sequences in one row, key_mask= for padding"
    )
    if torch.compiler.is_compiling():
        assert_async(good.all(), message)
    elif not good.all():
        raise RuntimeError(message)


def _taken(x: Tensor, before: Tensor) -> Tensor:
    x, before = torch.broadcast_tensors(x, before.clamp(min=0))
    return x.gather(1, before)


def check_shape(name: str, x: Tensor, *shape: int | str) -> None:
    """Raise RuntimeError unless x is a Tensor of that shape; a word stands for any size."""
    check_tensors(**{name: x})
    good = x.dim() == len(shape)
    for size, needed in zip(x.shape, shape, strict=False):
        good = good and (isinstance(needed, str) or holds(size == needed))
    if not good:
        needed = ", ".join(map(str, shape))
        raise RuntimeError(f"wavepe: {name} must be ({needed}), got {tuple(x.shape)}")


def checked_rows(name: str, x: Tensor, batch: int, count: int) -> Tensor:
    """Return an integer tensor (L,) or (B|1, L) as (B|1, L)."""
    check_tensors(**{name: x})
    if x.dtype not in INTEGERS:
        raise RuntimeError(f"wavepe: {name} must hold integers, got {x.dtype}")
    good = x.dim() in (1, 2) and holds(x.shape[-1] == count)
    if not good or (x.dim() == 2 and not holds(x.shape[0] == 1, x.shape[0] == batch)):
        raise RuntimeError(
            f"wavepe: {name} must be (L,) or (1|B, L), here ({count},) or (1|{batch}, {count}); "
            f"got {tuple(x.shape)}"
        )
    return x if x.dim() == 2 else x[None]
