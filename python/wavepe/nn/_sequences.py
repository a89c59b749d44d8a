"""What the tokens of a batch are to one another: hidden, packed, and in which order."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._common import INTEGERS, check_tensors
from ..ops._torch_private import assert_async
from ._cache import CachedTokens

# Messages are made where they are needed: a compiler would fix the sizes they print.


def joined_key_mask(
    key_mask: Tensor | None, layer: CachedTokens | None, batch: int, count: int
) -> Tensor | None:
    """Return the mask (B|1, cached + count) of all tokens; None where nothing is hidden."""
    seen = 0 if layer is None else layer.length
    kept = None if layer is None else layer.key_mask
    if key_mask is None:
        return None if kept is None else torch.cat([kept, kept.new_ones((len(kept), count))], 1)
    check_tensors(key_mask=key_mask)
    if key_mask.dtype != torch.bool:
        raise RuntimeError(
            f"wavepe: key_mask must be bool, True for what may be seen; got {key_mask.dtype}"
        )
    good = key_mask.dim() == 2 and key_mask.shape[0] in (1, batch)
    if good and key_mask.shape[1] == seen + count:
        return key_mask.expand(batch, -1)
    if not good or key_mask.shape[1] != count:
        cached = f" or {(batch, seen + count)}, cached tokens included" if seen else ""
        raise RuntimeError(
            f"wavepe: key_mask must be (B, L), here {(batch, count)}{cached}; got "
            f"{tuple(key_mask.shape)}"
        )
    kept = key_mask.new_ones((batch, seen)) if kept is None else kept
    return torch.cat([kept, key_mask.expand(batch, -1)], 1)


def joined_positions(
    positions: Tensor | None, layer: CachedTokens | None, batch: int, count: int
) -> Tensor | None:
    """Return int64 (B|1, cached + count), or None where every token's position is its index."""
    kept = None if layer is None else layer.positions
    if positions is None:
        if kept is not None:
            raise RuntimeError(
                "wavepe: positions were given for the cached tokens: give those of the new ones too"
            )
        return None
    positions = checked_rows("positions", positions, batch, count).to(torch.int64)
    if layer is None:
        return positions
    positions = positions.expand(batch, -1)
    if kept is None:
        kept = torch.arange(layer.length, device=positions.device).expand(batch, -1)
    return torch.cat([kept, positions], 1)


def check_order(
    positions: Tensor, key_mask: Tensor | None, segments: Tensor | None, contiguous: bool
) -> None:
    """Raise where the positions of a sequence do not rise; its hidden tokens may have any.

    Only on the CPU: to look at those of a device is to wait for it.

    Parameters
    ----------
    positions : int64 Tensor (B|1, n)
    key_mask : bool Tensor (B|1, n), optional
    segments : integer Tensor (B|1, n), optional
        Each is a sequence.
    contiguous : bool
        Positions must rise as the indices do.
    """
    n = positions.shape[1]
    if n < 2 or positions.device.type != "cpu":
        return
    here = torch.arange(1, n, device=positions.device)
    before = (here - 1)[None]
    if key_mask is not None:  # the last one before that is seen, or -1
        before = torch.where(key_mask[:, :-1], before, -1).cummax(1).values
    step = positions[:, 1:] - _taken(positions, before)
    good = step == here - before if contiguous else step > 0
    if key_mask is not None:
        good = good | ~key_mask[:, 1:] | (before < 0)
    if segments is not None:
        good = good | (segments[:, 1:] != _taken(segments, before))
    how = "must go up by 1, as this encoding counts distances in tokens"
    message = (
        f"wavepe: the positions of a row {how if contiguous else 'must rise'}; pass segments= for "
        "several sequences in one row, key_mask= for padding"
    )
    if torch.compiler.is_compiling():
        assert_async(good.all(), message)
    elif not good.all():
        raise RuntimeError(message)


def _taken(x: Tensor, before: Tensor) -> Tensor:
    rows = before.shape[0] if x.shape[0] == 1 else x.shape[0]
    return x.expand(rows, -1).gather(1, before.clamp(min=0).expand(rows, -1))


def check_shape(name: str, x: Tensor, *shape: int | str) -> None:
    """Raise where x is no Tensor of that shape; a word stands for any size."""
    check_tensors(**{name: x})
    good = x.dim() == len(shape)
    for size, needed in zip(x.shape, shape, strict=False):
        good = good and (isinstance(needed, str) or size == needed)
    if not good:
        needed = ", ".join(map(str, shape))
        raise RuntimeError(f"wavepe: {name} must be ({needed}), got {tuple(x.shape)}")


def checked_rows(name: str, x: Tensor, batch: int, count: int) -> Tensor:
    """Return integers (L,) or (B|1, L) as (B|1, L)."""
    check_tensors(**{name: x})
    if x.dtype not in INTEGERS:
        raise RuntimeError(f"wavepe: {name} must hold integers, got {x.dtype}")
    good = x.dim() in (1, 2) and x.shape[-1] == count
    if not good or (x.dim() == 2 and x.shape[0] not in (1, batch)):
        raise RuntimeError(
            f"wavepe: {name} must be (L,) or (1|B, L), here ({count},) or (1|{batch}, {count}); "
            f"got {tuple(x.shape)}"
        )
    return x if x.dim() == 2 else x[None]
