"""Positions that are not counted: trees, gaps, pruned caches.

Terms of the scores count distances in tokens. That is right where each position is one more than
that of the token before. Elsewhere (siblings of a tree share a position, PoSE leaves gaps) the
distances come from the positions. That takes tensors of queries x keys.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops._common import wide
from ..ops._compiler import wants_standard
from ..ops._relative_table import RelativeTable
from ..ops._scores import rows_at
from ..ops._torch_private import assert_async
from ..positions.tokens import largest_so_far, token_positions, value_before
from . import masks
from .call import Call

NOTE = "_wavepe_positions"  # attribute of a cache: a `_Note`
POSITIONS = "wavepe_positions"  # argument of a base model: a `KeyPositions`
TOKENS_AT = "wavepe_tokens_at"  # argument of a base model: position_ids for layers that get none
UNKNOWN = -(1 << 62)  # shift of a row of which no token is known: all were padding, or others' keys
# The positions of the passes that run in this thread, by their model.
_passing = threading.local()


class KeyPositions(NamedTuple):
    """The positions of a pass that are not counted.

    Attributes
    ----------
    queries : int64 Tensor (B, m)
    keys : int64 Tensor (B, tokens so far)
    """

    queries: Tensor
    keys: Tensor


class _Known(NamedTuple):
    """The positions of the tokens in a cache: `keys`, or index + `shift` if they are counted."""

    length: int
    shift: Tensor  # (B|1, 1); `UNKNOWN` where the cache may hold anything
    keys: Tensor | None = None  # (B, length)


class _Note:
    """Hold what is known of a cache.

    transformers' exporters take each tensor in `vars` of what a cache holds for an input of the
    program. Here `vars` is empty.
    """

    __slots__ = ("__dict__", "known")

    def __init__(self, known: _Known) -> None:
        self.known = known


def add_positions(call: Call) -> None:
    """Add `KeyPositions` to the arguments of a base model, if its positions are not counted.

    Where reading values would wait for the device, and in compiled models without a cache, such
    positions fail an assertion.

    Raises
    ------
    ValueError
        Keys were taken out of the cache, so their positions are unknown.
    """
    tokens = call.tokens
    readable = tokens is not None and tokens.ndim > 1 and tokens.numel() > 0
    if torch.compiler.is_compiling():
        if readable and call.cache is None and not wants_standard():
            _assert_counted(call)
        return
    _passing.known = getattr(_passing, "known", {})
    _passing.known.pop(id(call.module), None)
    if tokens is None or not readable:
        return  # the model raises the error
    found = _look(call, tokens)
    if found is not None:
        _passing.known[id(call.module)] = found
        if found.keys is not None:
            positions = found.keys[:, -tokens.shape[1] :]
            call.kwargs[POSITIONS] = KeyPositions(positions, found.keys)


def _assert_counted(call: Call) -> None:
    """Assert in a compiler's graph that positions are counted; no value is read meanwhile."""
    positions = call.kwargs.get("position_ids")
    if positions is None or positions.ndim != 2:
        return
    mask = _padding(call.kwargs.get("attention_mask"), positions.shape[1])
    shift = positions - torch.arange(positions.shape[1], device=positions.device)
    good, _ = _counted(mask, positions, shift, torch.full_like(shift[:, :1], UNKNOWN))
    assert_async(good.all(), "wavepe: in a compiled model positions must rise by 1 per token")


def note_positions(module: nn.Module, cache: Any) -> None:
    """Note the positions of a pass that has ended on its cache."""
    if torch.compiler.is_compiling():
        return
    found = getattr(_passing, "known", {}).pop(id(module), None)
    if found is not None and cache is not None:
        setattr(cache, NOTE, _Note(found))


def _look(call: Call, tokens: Tensor) -> _Known | None:
    """Return the positions of the tokens in the cache and of these."""
    positions, cache = call.kwargs.get("position_ids"), call.cache
    rows, length = tokens.shape[:2]
    waits = masks.reading_waits(tokens.device)
    if waits and (positions is None or length == 1):
        return None  # a step of a generation: nothing is worth its time on the device
    cached = _cached_tokens(call)
    note: _Note | None = getattr(cache, NOTE, None) if cached else None
    known = None if note is None else note.known
    if length == 1 and known is not None and _is_next(known, cached, positions):
        return known._replace(length=cached + 1)
    index = torch.arange(cached, cached + length, device=tokens.device)[None]
    if positions is None:  # transformers counts from the number of tokens in the cache
        if known is None or (known.keys is None and not known.shift.any()):
            return _Known(cached + length, index[:, :1] * 0)
        positions = index
    if positions.ndim != 2 or positions.shape[0] not in (1, rows) or positions.shape[1] != length:
        return None  # the model raises the error
    positions = positions.to(tokens.device, torch.int64)
    mask = _padding(call.kwargs.get("attention_mask"), cached + length)
    usual = _are_usual(mask, positions, cached)
    if known is not None and (waits or (known.keys is None and known.length < cached)):
        known = None  # compiled steps write no note
    if known is not None and known.keys is None and usual.all():
        known = None  # rows may be in another order
    if known is not None and len(known.shift) not in (1, rows):
        known = _of_other_rows(known)
    if known is not None and known.length > cached:
        known = _shortened(known, cached, positions)
    shift = positions - index
    before = torch.full_like(shift[:, :1], UNKNOWN) if known is None else known.shift
    good, last = _counted(mask, positions, shift, before)
    good = good | usual
    if waits:
        assert_async(good.amin(), "wavepe: on this device positions must rise by 1 per token")
        return None
    if not good.all() or (known is not None and known.keys is not None):
        keys = positions.expand(rows, -1)
        if cached:
            keys = torch.cat([_keys_of(known, before, cached).expand(rows, -1), keys], 1)
        return _Known(cached + length, last, keys)
    return _Known(cached + length, last)


def _cached_tokens(call: Call) -> int:
    if call.cache is None:
        return 0
    places = call.kwargs.get("cache_position")
    if places is not None and len(places):  # static caches of transformers < 5 miscount
        return int(places[0])
    return int(call.cache.get_seq_length())


def _keys_of(known: _Known | None, before: Tensor, cached: int) -> Tensor:
    """Return the positions (B|1, cached) of the tokens in a cache."""
    if known is None or known.keys is None:
        shift = before.masked_fill(before == UNKNOWN, 0)
        return torch.arange(cached, device=before.device) + shift
    more = torch.arange(1, cached - known.keys.shape[1] + 1, device=before.device)
    return torch.cat([known.keys, known.keys[:, -1:] + more], 1)  # compiled steps are not noted


def _is_next(known: _Known, cached: int, positions: Tensor | None) -> bool:
    """Return whether counted positions go on with this one token: a step of a generation."""
    if known.keys is not None or known.length != cached:
        return False
    if positions is None:
        return not known.shift.any()
    if positions.ndim != 2 or len(known.shift) not in (1, len(positions)):
        return False
    return bool((positions - known.shift == cached).all())


def _of_other_rows(known: _Known) -> _Known | None:
    """Return what is known of a cache whose rows were repeated or chosen."""
    if known.keys is not None and not (known.keys == known.keys[:1]).all():
        raise ValueError(
            f"the cache was filled with {len(known.keys)} rows, whose positions are not counted, "
            "and has another number of rows now: give all rows from the first token on"
        )
    if not (known.shift == known.shift[:1]).all():
        return None
    keys = None if known.keys is None else known.keys[:1]
    return _Known(known.length, known.shift[:1], keys)


def _shortened(known: _Known, cached: int, positions: Tensor) -> _Known:
    """Return what is known of a cache that has lost keys; ValueError if it is unknown which."""
    first, zero = positions[:, :1], positions[:, :1] * 0
    if known.keys is None:  # counted positions go on: it was cropped
        if torch.equal(*torch.broadcast_tensors(first - cached, known.shift)):
            return _Known(cached, known.shift)
    elif torch.equal(*torch.broadcast_tensors(first, known.keys[:, cached - 1 : cached] + 1)):
        return _Known(cached, known.shift, known.keys[:, :cached])
    if torch.equal(first, zero + cached):  # one path of a tree is left
        return _Known(cached, zero)
    raise ValueError(
        f"the cache holds {cached} of {known.length} keys, and the next position is "
        f"{int(first[0])}: keys were taken out of it, and this position encoding needs their "
        f"positions; continue at position {cached}, or pass use_cache=False"
    )


class _Padding(NamedTuple):
    """Which tokens are real, and whether a user's own mask of queries x keys says who sees whom."""

    real: Tensor | None = None  # bool (B, tokens so far)
    own: bool = False


def _padding(mask: Any, tokens: int) -> _Padding:
    if isinstance(mask, dict):  # made in advance, for each type of layer
        made = [one for one in mask.values() if isinstance(one, Tensor)]
        mask = max(made, key=lambda one: one.shape[-1], default=None)
    if not isinstance(mask, Tensor):
        return _Padding()
    if mask.ndim == 4 and mask.shape[1:3] != (1, 1):
        return _Padding(own=True)
    return _Padding(mask.flatten(1)[:, :tokens] != 0 if mask.shape[-1] >= tokens else None)


def _are_usual(mask: _Padding, positions: Tensor, cached: int) -> Tensor:
    """Return for which rows (B, 1) padding is on the left, and positions count the real tokens.

    That is what `generate` gives. Such rows need no note of what their cache holds.
    """
    count = positions.shape[1]
    if mask.own:
        return torch.zeros_like(positions[:, :1], dtype=torch.bool)
    if mask.real is None:
        places = torch.arange(cached, cached + count, device=positions.device)
        return torch.all(positions == places, -1, keepdim=True)
    real = mask.real.to(positions.device)
    on_the_left = torch.all(real[:, 1:] >= real[:, :-1], -1, keepdim=True)
    numbers = token_positions(real)[:, -count:]
    same = (positions == numbers) | ~real[:, -count:]
    return on_the_left & torch.all(same, -1, keepdim=True)


def _counted(
    mask: _Padding, positions: Tensor, shift: Tensor, before: Tensor
) -> tuple[Tensor, Tensor]:
    """Return where positions are counted (B, m), and the last shift of each row (B, 1).

    A packed sequence may begin at any token but the first one after a cache. Padding may have any
    position.

    Parameters
    ----------
    positions, shift : int64 Tensor (B|1, m)
        The positions, and positions - index.
    before : int64 Tensor (B|1, 1)
        The shift of the last token in the cache, or `UNKNOWN`.
    """
    count = shift.shape[1]
    real = torch.ones_like(shift, dtype=torch.bool)
    if mask.real is not None:
        real = mask.real[:, -count:].to(shift.device)
        real, shift, positions = torch.broadcast_tensors(real, shift, positions)
    place = torch.arange(count, device=shift.device).expand_as(real)
    latest = largest_so_far(torch.where(real, place, -1))  # the last real token, or -1
    first = before.expand(shift.shape[0], count)
    of_latest = torch.where(latest >= 0, shift.gather(1, latest.clamp(min=0)), first)
    latest = value_before(latest, -1)
    previous = value_before(of_latest, first)
    good = (shift == previous) | (previous == UNKNOWN) | ~real
    if not mask.own:  # else no sequences are packed
        falls = positions <= positions.gather(1, latest.clamp(min=0))
        good = good | (falls & (latest >= 0))
    return good, of_latest[:, -1:]


def of_layer(positions: KeyPositions, first: int, keys: int) -> KeyPositions:
    """Return the positions for a layer that has the keys first..first+keys-1 of all tokens.

    Unused room behind them has the position 0.
    """
    own = positions.keys[:, first : first + keys]
    return positions._replace(keys=torch.nn.functional.pad(own, (0, keys - own.shape[1])))


def by_positions(given: dict[str, Any], positions: KeyPositions) -> dict[str, Any]:
    """Return arguments of `attention_with_weights` that take distances from positions.

    Parameters
    ----------
    given : dict
        The arguments that an encoding sets, for distances up to `span` of all positions.
    positions : KeyPositions
        Those of the layer.
    """
    q = given["q"]
    delta = positions.queries.to(q.device)[:, :, None] - positions.keys.to(q.device)[:, None]
    unique, place = delta.unique(return_inverse=True)
    given = {**given, "delta": place[:, None]}
    if given["window"] is not None:
        given["window"] = int((unique < given["window"]).sum())
    p = given.pop("p", None)
    if p is not None:
        where = given.pop("first", 0), given.pop("beyond", "zero")
        if isinstance(p, RelativeTable):
            beyond = p.beyond
            p, low, _ = p.tensors(q.dtype, q.device)
            where = low, beyond
        given["p"] = rows_at(p, *where, unique)
    bias: Any = None
    if (slopes := given.pop("slopes", None)) is not None:
        bias = -slopes.to(q.device, wide(q))[:, None] * unique.abs()
    if (b := given.pop("bias", None)) is not None:
        rows = rows_at(b[..., None], given.pop("bias_first"), given.pop("bias_beyond"), unique)
        bias = rows[..., 0] if bias is None else bias + rows[..., 0]
    return given if bias is None else {**given, "bias": bias}


def span(positions: KeyPositions) -> int:
    """Return how many tokens a table must be for."""
    return max(int(positions.queries.max() - positions.keys.min()), 0) + 1
