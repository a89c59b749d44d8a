"""One pass through a base model: its arguments are read here, and nowhere else in `hf`.

A `Pass` travels through transformers' keyword arguments to every layer. It also finds packed
sequences (several in one row, none of which sees another) and refuses positions that an encoding
cannot take. transformers finds packed sequences only without a cache and without a mask, and a
model in evaluation mode creates a cache.

The kernels measure distance in tokens, which is right only if positions increase by one per token.
Rotations and added vectors take any positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ..encodings import Encoding
from ..ops._compiler import is_compiling, wants_standard
from ..ops._torch_private import assert_async
from ..positions import LearnedCache, Rotated, Terms
from ..positions.tokens import largest_so_far, token_positions, value_before
from . import families, masks

PASS = "wavepe_pass"  # argument of a base model and of its layers
# Attributes of caches.
PACKED = "_wavepe_packed"
SHIFTS = "_wavepe_shifts"  # of each row, position - index of its tokens; absent: all are 0


class Pass:
    """The arguments of one pass through a base model, or through a layer that stands alone.

    Attributes
    ----------
    kwargs : dict of str to value
        All arguments by name; what is changed here is what the module gets. Its hook takes the
        dict out, because the dict will hold this object.
    tokens : Tensor (B, m, ...), optional
        The ids, embeddings or hidden states.
    cache : cache of transformers, optional
    cached : int or Tensor ()
        The number of tokens in the cache, or in its entry of the `layer`; a tensor in static ones.
    queries_last : bool
        Whether the queries are the last keys in every layer.
    positions : Tensor (B|1, m), optional
        None: they count from `cached`.
    mask : optional
        The caller's.
    compiling : bool
    ran, waiting : bool
        Whether an attention layer has begun, and whether the last one to begin has not called the
        attention function: then another program has left the encoding out.
    hidden, angles, offset, learned
        Of the layer that runs: its input, its angles, the index of the key at the position of the
        first query (None: the queries come last), and what its cache had to know already.
    terms : dict of int to Terms
        What the module of shared parameters has returned for a number of keys, without gradients.
    kept : LearnedCache, optional
        The learned terms of the generation, without gradients.
    offsets : dict of str to offset
        Layer type -> `offset` of the layer whose keys others reuse.
    """

    hidden: Tensor | None = None
    angles: Any = None
    rotated: Rotated | None = None
    offset: int | Tensor | None = None
    learned: Terms | None = None
    kept: LearnedCache | None = None
    ran = waiting = False
    shifts: list[int | None] | None = None

    def __init__(
        self,
        names: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layer: int | None = None,
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
                self.cached = _cached_tokens(value, layer, kwargs.get("cache_position"))
                break
            if name == "cache":
                raise ValueError(
                    "continuous batching uses a paged cache, which the attention 'wavepe' cannot "
                    "read: generate without continuous batching, or load the model with another "
                    "attn_implementation"
                )
        self.queries_last = self.cache is None or type(self.cache) is DynamicCache
        self.positions: Tensor | None = kwargs.get("position_ids")
        self.mask: Any = kwargs.get("attention_mask")
        self.weights: bool | None = kwargs.get("output_attentions")
        self.compiling = is_compiling()
        self.offsets: dict[str, int | Tensor] = {}
        self.terms: dict[int, Terms] = {}

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

    # ---- packed sequences, and positions that no kernel can take ----

    def read_sequences(self, base: nn.Module, counting: Encoding | None) -> None:
        """Tell attention of packed sequences, and refuse positions that do not count tokens.

        Parameters
        ----------
        base : Module
        counting : Encoding, optional
            An encoding of some layer that measures distances in tokens.
        """
        tokens, cache, mask = self.tokens, self.cache, self.mask
        if tokens is None or tokens.ndim < 2 or not tokens.numel():
            return  # the model raises the error
        packs = mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)
        if packs and cache is not None and hasattr(cache, PACKED):
            _leave_packed(cache)
        ends = self.kwargs.get("cu_seq_lens_q")
        device, compiling = tokens.device, self.compiling
        waits = masks.reading_waits(device) and not compiling
        if waits and mask is cache is self.positions is ends is None:
            self._set_mask(masks.nothing_hidden(device))
            return
        if tokens.shape[1] == 1 and ends is None:
            if counting is not None and not (compiling or waits) and not self._is_next():
                self._check_start(counting)
            return
        # A cache with packed sequences must be marked.
        makes_cache = self.kwargs.get("use_cache") is not False and not base.training
        read = masks.may_read_values(device, base.config)
        read = read or ((cache is not None or makes_cache) and not compiling)
        begins, usual = self._look(counting, read or not (waits or compiling))
        if packs and ends is not None:
            begins = self._from_lengths(ends, read)
        if packs and begins is not None and not (read and not begins[:, 1:].any()):
            self._pack(begins, read)
        if counting is not None and not (usual or waits or compiling):
            self._check_start(counting)

    def _is_next(self) -> bool:
        """Return whether this one token goes on where the cache ends, which no note corrects."""
        if self.cache is not None and hasattr(self.cache, SHIFTS):
            return False
        if self.positions is None:
            return True
        rows = self.positions.tolist()
        return rows.count([int(self.cached)]) == len(rows)

    def _look(self, counting: Encoding | None, read: bool) -> tuple[Tensor | None, bool]:
        """Return a bool tensor (B, m), True where positions begin a sequence again, or None.

        Also return whether positions are known to be the indices of the tokens. Padding is skipped.
        A gap in the positions does not begin a sequence.
        """
        tokens, positions, cache = self.tokens, self.positions, self.cache
        assert tokens is not None
        rows, count = tokens.shape[:2]
        if self.compiling and cache is not None:
            return None, True
        noted = cache is not None and hasattr(cache, SHIFTS)
        if positions is None and not (noted and counting is not None):
            return None, True
        if positions is None:
            positions = self.counted_positions()
        if (
            positions.ndim != 2
            or positions.shape[1] != count
            or positions.shape[0] not in (1, rows)
        ):
            return None, True  # the model raises the error
        positions = positions.to(tokens.device)
        index = torch.arange(count, device=tokens.device)
        waits = masks.reading_waits(tokens.device)
        usual = (index + self.cached).expand_as(positions)
        if read and not noted and not waits and torch.equal(positions, usual):
            return None, True
        known = self._real()
        real = torch.ones((rows, count), dtype=torch.bool, device=tokens.device)
        if known is not None:
            real = known[:, -count:].to(tokens.device)
        last = largest_so_far(torch.where(real, index.expand_as(real), -1))
        before = value_before(last, -1)
        step = positions - positions.expand(rows, -1).gather(-1, before.clamp(min=0))
        after = real & (before >= 0)
        begins = after & (step <= 0)
        if counting is not None:
            pairs = isinstance(self.mask, Tensor) and self.mask.ndim == 4 and known is None
            good = ~after | (step == index - before)
            good = good if pairs else good | begins  # a mask of queries x keys packs nothing
            if waits or self.compiling:
                if not (self.compiling and wants_standard()):
                    where = "a compiled model" if self.compiling else "a model on this device"
                    says = f"wavepe: in {where} positions must rise by 1 per token"
                    assert_async(good.amin(), says)
            elif not good.all():
                raise self._gap(counting, positions.expand(rows, -1), good, before)
        return (None if self.mask is not None and known is None else begins), False

    def _gap(
        self, counting: Encoding, positions: Tensor, good: Tensor, before: Tensor
    ) -> ValueError:
        row, column = (~good).nonzero()[0].tolist()
        last = int(before[row, column])
        hint = ""
        if last < column - 1:
            hint = "let attention_mask hide no tokens between others, "
        return ValueError(
            f"{counting} measures distances in tokens, so positions must rise by 1 per token; row "
            f"{row} of position_ids has {int(positions[row, column])} after "
            f"{int(positions[row, last])}: {hint}give position_ids without gaps and branches, or "
            "take an encoding that only rotates or adds vectors"
        )

    def _check_start(self, counting: Encoding) -> None:
        """Raise ValueError if positions do not go on where those of the keys in the cache end."""
        tokens: Any = self.tokens
        rows, count = tokens.shape[:2]
        positions, known = self.counted_positions(), self._real()
        if (
            positions.ndim != 2
            or positions.shape[1] != count
            or positions.shape[0] not in (1, rows)
        ):
            return  # the model raises the error
        first = torch.zeros((rows, 1), dtype=torch.int64)
        seen, usual = [True] * rows, [0] * rows
        if known is not None:
            new = known[:, -count:]
            first, seen = new.int().argmax(1, keepdim=True), new.any(1).tolist()
            # `generate` pads on the left, and counts the real tokens.
            padded = (known[:, 1:] >= known[:, :-1]).all(1)
            usual = torch.where(padded, -(~known).sum(1), 1 << 62).tolist()
        place = positions.expand(rows, -1).gather(1, first) - first - self.cached
        shifts: list[int | None] = place[:, 0].tolist()
        for row, before in enumerate(self._noted_shifts(rows)):
            if not seen[row]:
                shifts[row] = before
            elif before is not None and shifts[row] not in (before, usual[row]):
                raise ValueError(
                    f"{counting} measures distances in tokens, and the positions of the "
                    f"{int(self.cached)} cached keys are not known: position "
                    f"{int(positions.expand(rows, -1)[row, first[row, 0]])} does not follow them, "
                    "so keys were taken out of the cache, or a program filled it by hand; continue "
                    f"at position {int(self.cached) + before}, or pass use_cache=False"
                )
        self.shifts = shifts

    def _noted_shifts(self, rows: int) -> list[int | None]:
        """Return position - index of the keys in each row of the cache; None: it may be any."""
        if not int(self.cached):
            return [None] * rows
        shifts: list[int | None] = getattr(self.cache, SHIFTS, [0])
        if len(shifts) == rows:
            return shifts
        # The rows were repeated or chosen.
        return shifts[:1] * rows if len(set(shifts)) == 1 else [None] * rows

    def note_shifts(self, output: Any) -> None:
        """Note on the cache how far the positions of this pass are from the indices."""
        shifts = self.shifts
        if shifts is None or self.compiling:
            return
        cache = self.cache if self.cache is not None else next(iter(caches_in(output)), None)
        if any(shift != 0 for shift in shifts):
            if cache is not None:
                setattr(cache, SHIFTS, shifts)
        elif hasattr(cache, SHIFTS):
            delattr(cache, SHIFTS)

    def _real(self) -> Tensor | None:
        """Return which tokens so far are no padding, bool (B, n); None if the mask does not say."""
        mask, tokens = self.mask, self.tokens
        if isinstance(mask, dict):  # made in advance, for each type of layer
            made = [value for value in mask.values() if isinstance(value, Tensor)]
            mask = max(made, key=lambda value: value.shape[-1], default=None)
        if not isinstance(mask, Tensor) or tokens is None:
            return None
        if mask.ndim != 2 and not (mask.ndim == 4 and mask.shape[1:3] == (1, 1)):
            return None
        total = self.cached + tokens.shape[1]
        if mask.shape[-1] < total:
            return None
        return (mask.flatten(1)[:, :total] != 0).expand(tokens.shape[0], -1)

    def _from_lengths(self, ends: Any, read: bool) -> Tensor:
        """Return a bool tensor (1, m), True where sequences begin, from cu_seq_lens_q.

        It holds 0 and the end of each sequence of the only row. Its values are checked if `read`.
        """
        tokens, same = self.tokens, self.kwargs.get("cu_seq_lens_k")
        assert tokens is not None
        rows, count = tokens.shape[:2]
        if not isinstance(ends, Tensor):
            raise TypeError(f"cu_seq_lens_q must be a tensor, got {type(ends).__name__}")
        if rows != 1:
            raise ValueError(f"cu_seq_lens_q needs one row of packed sequences, got {rows} rows")
        if read:
            if same is not None and not torch.equal(ends, same):
                raise ValueError(
                    "cu_seq_lens_q and cu_seq_lens_k must be equal: packed sequences cannot follow "
                    "the keys of a cache"
                )
            values = ends.tolist()
            rises = ends.ndim == 1 and values[:1] == [0] and values == sorted(values)
            if not rises or values[-1] != count:
                raise ValueError(
                    f"cu_seq_lens_q must rise from 0 to the number of tokens, {count}; got {values}"
                )
        index = torch.arange(count, device=tokens.device)
        begins = torch.isin(index, ends.to(tokens.device))[None]
        if self.positions is None and not (read and not begins[:, 1:].any()):
            start = largest_so_far(torch.where(begins[0], index, 0))
            self.set_positions((index - start)[None])
        return begins

    def _pack(self, begins: Tensor, read: bool) -> None:
        """Give the module a mask of packed sequences, which begin at these tokens."""
        cache, tokens = self.cache, self.tokens
        assert tokens is not None
        padding = None if self.mask is None else self.mask[:, : tokens.shape[1]]
        if not read:
            # Nothing may depend on values, so a row of one sequence gets a mask too.
            if cache is None:
                self._set_mask(masks.segment_mask(begins, padding))
            return
        if cache is not None and self.cached > 0:
            starts = begins[:, 1:].any(0).nonzero().flatten() + 1
            raise ValueError(
                f"packed sequences (new ones begin at {starts[:8].tolist()}) cannot follow the "
                f"{int(self.cached)} tokens of a cache: pass use_cache=False"
            )
        if cache is not None:
            setattr(cache, PACKED, True)
        elif self.kwargs.get("use_cache") is not True:
            self.kwargs["use_cache"] = False  # packed sequences cannot be continued
        else:
            raise ValueError("packed sequences cannot be continued: pass use_cache=False")
        self._set_mask(masks.segment_mask(begins, padding))

    def _set_mask(self, mask: Tensor | None) -> None:
        self.mask = self.kwargs["attention_mask"] = mask


def measures_tokens(encoding: Encoding) -> bool:
    """Return whether an encoding measures distances in tokens, whatever the positions are."""
    adds = {"table", "slopes", "bias", "input_decay"}
    extends = getattr(encoding.rotary, "self_extend", None) is not None
    return (
        not adds.isdisjoint((*encoding.terms, *encoding.learns))
        or encoding.has_vectors
        or encoding.window is not None
        or extends
    )


def caches_in(output: Any) -> Iterable[Any]:
    """Return the caches in the output of a base model."""
    values = output.values() if isinstance(output, Mapping) else output
    return filter(families.is_cache, values if isinstance(values, Iterable) else ())


def _cached_tokens(cache: Any, layer: int | None, places: Tensor | None) -> int | Tensor:
    """Return the number of tokens in a cache, or in its entry of a layer."""
    if layer is None:
        cached = cache.get_seq_length()
    else:
        cached = getattr(cache, "get_query_offset", cache.get_seq_length)(layer)
    if not isinstance(cached, Tensor):
        return cached
    # Static caches go on counting in their tensor; those of transformers 5.0 miscount.
    return cached.clone() if places is None else places[0]


def _leave_packed(cache: Any) -> None:
    """Raise ValueError if a cache holds packed sequences; it may have been emptied since."""
    if cache.get_seq_length() > 0:
        raise ValueError(
            "the cache holds packed sequences, and new tokens would belong to none of them: to "
            "generate, give each sequence its own row"
        )
    delattr(cache, PACKED)
