"""Fused attention on a GPU: the arguments of the kernels for a chunk, a part of a call's heads.

What a call holds beside its results is computed chunk by chunk, so that it is a small part of the
GPU's memory. Nothing here reads a value from the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from .._attention_checks import Arguments
from .._common import check
from .._scores import default_scale
from . import kernels, launches, products
from .tiles import FARTHEST, LEAST, Config, Dropout, Hidden, Rows, ScoreTerms, odd
from .zones import BLOCK, zone_range

LEAST_BYTES = 1 << 28  # of `chunk_bytes`
_PROGRAMS = 4  # for each multiprocessor
_TINY = torch.finfo(torch.float32).tiny


def unit_stride(x: Any) -> Any:
    """Return x with a last stride of 1: itself, or a contiguous copy."""
    if x is None or x.dim() == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1:
        return x
    return x.contiguous()


def rows_of(x: Any) -> Rows:
    """Return a tensor (B, H, rows, size), or None, as `Rows`."""
    if x is None:
        return Rows(None, 0, 0, 0)
    x = unit_stride(x)
    return Rows(x, *x.stride()[:3])


def _batch_stride(x: Any) -> int:
    return odd(0 if x is None or x.dim() == 0 or x.shape[0] == 1 else x.stride(0))


# ---- zones --------------------------------------------------------------------------------------


class Zones(NamedTuple):
    """The zones of a table that hold rows: near ones, and far ones of low rank on both sides."""

    near_first: int  # the first near zone
    near_count: int
    left_count: int  # number of far zones before the near ones
    right_count: int  # number of far zones after them
    rank: int

    @property
    def columns(self) -> int:
        """The number of products of a query."""
        return self.near_count * BLOCK + (self.left_count + self.right_count) * self.rank

    @classmethod
    def of(cls, call: Arguments) -> Zones:
        """Return the zones of a call's table."""
        rank = LEAST
        if call.p is None or not call.p.numel():
            return cls(0, 0, 0, 0, rank)
        first, last = _deltas(call.first, call.p.shape[-2])
        lowest, highest = zone_range(first, last)
        if call.zones:
            marker, far, _ = call.zones
            left, count, rank = marker.shape[0], far.shape[1], far.shape[2]
            near = highest - lowest + 1 - count
            return cls(lowest + left, near, left, count - left, rank)
        if call.causal:
            lowest = max(lowest, 0)
        if call.window is not None:
            highest = min(highest, call.window // BLOCK + 1)
        return cls(lowest, max(highest - lowest + 1, 0), 0, 0, rank)


def _deltas(first: int, count: int) -> tuple[int, int]:
    """Return the deltas of the first and the last row, which the kernels hold in 32 bits."""
    check(
        -FARTHEST <= first <= FARTHEST - count,
        f"on a GPU the deltas of a table must lie within +-2^29, got {count} rows from {first} on",
    )
    return first, first + count - 1


# ---- chunks of heads ----------------------------------------------------------------------------


@functools.cache
def chunk_bytes(device: torch.device) -> int:
    """Return the most that a chunk holds beside its results, unless one key head needs more."""
    if device.type != "cuda":
        return LEAST_BYTES
    return max(LEAST_BYTES, torch.cuda.get_device_properties(device).total_memory // 32)


def bias_tiles(m: int, n: int) -> int:
    """Return how many diagonals of blocks a head has; the bias gets a tile of each."""
    return -(-m // BLOCK) + -(-n // BLOCK) - 1


def chunks(call: Arguments, gradients: bool, bias_grad: bool = False) -> Iterator[Chunk]:
    """Return the chunks of a call: whole batches, or some key heads of one batch."""
    batch, heads, m, _ = call.q.shape
    key_heads, n = call.k.shape[1:3]
    if not batch * heads:
        return
    each = m * Zones.of(call).columns * call.q.itemsize * (2 if gradients else 1)
    if gradients and call.p is not None:
        each += call.p.shape[-2] * call.p.shape[-1] * 4  # the gradient of the table, for one head
    if bias_grad:
        each += bias_tiles(m, n) * BLOCK * BLOCK * 4
    most = chunk_bytes(call.q.device) // max(each * (heads // key_heads), 1)  # key heads
    batches, heads_at_once = max(most // key_heads, 1), max(min(most, key_heads), 1)
    for b in range(0, batch, batches):
        for h in range(0, key_heads, heads_at_once):
            yield Chunk(
                call, slice(b, min(b + batches, batch)), slice(h, min(h + heads_at_once, key_heads))
            )


class Chunk:
    """A part of the batches and key heads of a call, and the kernels' arguments for it."""

    def __init__(self, call: Arguments, batch: slice, key_heads: slice) -> None:
        self.group = call.q.shape[1] // call.k.shape[1]
        self.batch_slice, self.key_head_slice = batch, key_heads
        self.head_slice = slice(key_heads.start * self.group, key_heads.stop * self.group)
        self.q, self.k, self.v = self.queries(call.q), self.keys(call.k), self.keys(call.v)
        self.q_rel = self.queries(call.q_rel)
        self.r = self.q if self.q_rel is None else self.q_rel
        self.batch, self.heads, self.m, self.d = self.q.shape
        self.n, self.dv = self.k.shape[2], self.v.shape[3]
        self.scale = default_scale(self.q) if call.scale is None else call.scale
        self.zones = Zones.of(call)
        self.far = call.zones[1] if call.zones else None
        self.hidden = self._hidden(call)
        self.terms = self._terms(call)
        self.dropout = self._dropout(call)
        self.edge = self.terms.p is not None and call.beyond == "edge"
        c = self.d if call.p is None else call.p.shape[-1]
        self.bias_edge = call.bias_beyond == "edge"
        others = (self.terms.slopes, self.terms.bias, self.terms.softcap)
        bare = self.scale >= _TINY and all(x is None for x in others)
        one_sided = not self.zones.columns or (call.causal and self.zones.near_first <= 0)
        options = (
            self.d, launches.width(self.d), self.dv, launches.width(self.dv),
            c, launches.width(c), call.causal, self.edge, self.bias_edge, self.zones.rank,
            4 if one_sided else 7, self.mask_aligned, BLOCK, bare,
        )  # fmt: skip
        self.config = Config(*map(tl.constexpr, options))

    # ---- the chunk's part of the call's tensors

    def queries(self, x: Any) -> Any:
        """Return the chunk's part of a tensor (B, H, ...), or None."""
        return None if x is None else x[self.batch_slice, self.head_slice]

    def keys(self, x: Tensor) -> Tensor:
        """Return the chunk's part of a tensor (B, Hk, ...)."""
        return x[self.batch_slice, self.key_head_slice]

    def slice_heads(self, x: Any, dims: int) -> Any:
        """Return the chunk's heads of x; all of x if it has fewer than `dims` axes, so no heads."""
        return x if x is None or x.dim() < dims else x[self.head_slice]

    # ---- the kernels' arguments

    def _hidden(self, call: Arguments) -> Hidden:
        key_mask, segments, offset, mask = (
            unit_stride(x if x is None or x.dim() == 0 or x.shape[0] == 1 else x[self.batch_slice])
            for x in (call.key_mask, call.segments, call.offset, call.mask)
        )
        if mask is not None:
            mask = mask if mask.shape[1] == 1 else mask[:, self.head_slice]
            mask = mask.expand(self.batch, self.heads, -1, -1)
        window = None if call.window is None else min(call.window, FARTHEST)
        rows = rows_of(mask)
        # Not for a few queries of a model that generates text: n changes from step to step.
        self.mask_aligned = self.m >= BLOCK and not any(
            size % 16 for size in ((0 if mask is None else mask.data_ptr()), *rows[1:])
        )
        return Hidden(
            window, key_mask, _batch_stride(key_mask), segments, _batch_stride(segments),
            rows.ptr, odd(rows.batch), odd(rows.head), odd(rows.row), offset, _batch_stride(offset),
        )  # fmt: skip

    def _terms(self, call: Arguments) -> ScoreTerms:
        p, bias = self.slice_heads(call.p, 3), self.slice_heads(call.bias, 2)
        slopes = self.slice_heads(call.slopes, 1)
        p = None if p is None or not p.numel() else p.contiguous()
        bias = None if bias is None or not bias.shape[-1] else bias.contiguous()
        p_range = _deltas(call.first, 0 if p is None else p.shape[-2])
        bias_range = _deltas(call.bias_first, 0 if bias is None else bias.shape[-1])
        zones = self.zones
        return ScoreTerms(
            None, zones.columns, call.zones[2] if call.zones else None,
            zones.near_first, zones.near_count, zones.left_count, zones.right_count,
            p, 0 if p is None or p.dim() == 2 else p.stride(0), *p_range,
            None if slopes is None else slopes.float().contiguous(),
            bias, odd(0 if bias is None or bias.dim() == 1 else bias.stride(0)),
            odd(bias_range[0]), odd(bias_range[1]),
            call.softcap, self.slice_heads(call.sinks, 1),
        )  # fmt: skip

    def _dropout(self, call: Arguments) -> Dropout:
        if not call.dropout_p:
            return Dropout(None, 0, 0.0, odd(0), odd(0))
        _, heads, m, _ = call.q.shape
        kept = 1 - call.dropout_p
        return Dropout(
            call.seed,
            min(math.floor(call.dropout_p * 2.0**32), 2**32 - 1),
            1 / kept if kept else 0.0,
            odd((self.batch_slice.start * heads + self.head_slice.start) * m),
            odd(heads * m),
        )

    # ---- launches

    def over_tiles(self, kernel: Any, role: str, programs: int, *arguments: Any) -> None:
        """Launch a kernel of `kernels`; `arguments` are those after v."""
        tuning = self.tuning(role)
        config = self.config._replace(KEYS=tl.constexpr(tuning.pop("KEYS", BLOCK)))
        launches.launch(
            kernel, (programs,), rows_of(self.q), rows_of(self.k), rows_of(self.v), *arguments,
            self.hidden, self.terms, self.dropout, config, self.heads, self.group, self.m, self.n,
            self.scale, **tuning,
        )  # fmt: skip

    def over_queries(self, kernel: Any, role: str, *arguments: Any) -> None:
        """Launch a kernel with a program for each block of queries; `arguments` follow r."""
        rows = self.tuning(role)["ROWS"]
        programs = self.batch * self.heads * -(-self.m // rows)
        self.over_tiles(kernel, role, programs, rows_of(self.q_rel), *arguments)

    def over_remainders(self, kernel: Any, slots: int, *arguments: Any) -> None:
        """Launch a kernel of `products`. If heads use one table, all their rows go together.
        A program has all slots of its rows, unless there would be too few programs."""
        shared = self.terms.p.dim() == 2
        tuning = self.tuning("products")
        each = -(-self.m // BLOCK) * (self.heads if shared else 1)
        parts = -(-each // tuning["ROWS"]) * self.batch * (1 if shared else self.heads)
        programs = min(BLOCK, self.m) * parts
        few = _PROGRAMS * launches.multiprocessors(self.q.device) // max(programs, 1)
        launches.launch(
            kernel, (programs, min(slots, few + 1)), *arguments, self.hidden, self.terms,
            self.config, self.heads, self.m, self.n, SHARED=shared, **tuning,
        )  # fmt: skip

    def tuning(self, role: str) -> dict[str, int]:
        """Return the options for launching a kernel of this role."""
        tiles = self.hidden.mask is not None or self.terms.bias is not None
        widest = max(self.d, self.dv, self.config.P_SIZE.value)
        return launches.tuning(role, self.q, launches.width(widest), tiles)

    def compute_products(self) -> None:
        """Compute the products of the queries with the table, which the tiles read."""
        if not self.zones.columns:
            return
        # float16 has more digits than bfloat16. Its smaller range does no harm: a score beyond it
        # takes all the weight.
        dtype = torch.float32 if self.q.dtype == torch.float32 else torch.float16
        shape = (self.batch, self.heads, self.m, self.zones.columns)
        out = self.q.new_empty(shape, dtype=dtype)
        slots = -(-self.zones.columns // BLOCK)
        self.over_remainders(products.table_products, slots, rows_of(self.r), self.far, out)
        self.terms = self.terms._replace(products=out)

    def attend(self, out: Tensor, lse: Tensor) -> None:
        """Compute the chunk's out and lse."""
        self.compute_products()
        self.over_queries(kernels.attention_forward, "forward", rows_of(out), lse)
