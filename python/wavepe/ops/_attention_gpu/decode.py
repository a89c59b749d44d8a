"""Fused attention on a GPU: few queries of many keys, as when a model generates text.

The keys of a key head are split among programs. A program has the queries of all query heads that
read the key head, so it loads each key once, and rows of the table as they lie: for one query those
of 64 keys follow each other. Another kernel merges the splits, in their order.

The number of splits does not follow n. So one plan serves all lengths, and splits may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._attention_checks import Arguments
from . import launches
from .bounds import key_phases
from .chunk import Chunk, rows_of
from .products import _rows_at
from .tiles import (
    _BLOCK,
    _FULL,
    _LOG2E,
    LEAST,
    Queries,
    Rows,
    clamp,
    divisor_and_lse,
    floor_div,
    kernel,
    load_keys,
    load_values,
    members,
    more_weights,
    odd,
    offset_of,
    scores,
    scores_unit,
    visible,
)

MOST = 16  # queries
_ROWS = 64  # the most rows of a program, one for each query and query head; half if they are wide
_WIDE = 256  # bytes; of wider rows of keys fewer fit into shared memory
_PROGRAMS = 2  # for each multiprocessor: all of them run at once
_SPLITS = 128  # the most splits, because a program merges all of a query's


# ---- what changes from token to token -----------------------------------------------------------


def lengths(arguments: Sequence[Any]) -> tuple[Sequence[Any], list[int], dict[int, Any]]:
    """Return what is needed of the arguments, integers that follow n, and parts of a signature.

    A plan is for all calls of equal parts: they stand, by their place, for the shapes and strides
    of the arguments that follow n. A call that is not served has none. Arguments may be wrong.
    """
    call = Arguments(*arguments)
    q, k, v, mask = call.q, call.k, call.v, call.key_mask
    served = q.dim() == k.dim() == v.dim() == 4 and 0 < q.shape[2] <= MOST and all(q.shape)
    served = served and call.mask is None and not call.dropout_p and k.stride(3) == v.stride(3) == 1
    if not (served and v.shape[3] and (mask is None or (mask.dim() == 2 and mask.stride(1) == 1))):
        return arguments, [], {}
    n, strides = k.shape[2], [*k.stride()[:2], *v.stride()[:2]]
    parts: dict[int, tuple[Any, ...]] = {}
    if mask is not None:
        strides.append(odd(0 if mask.shape[0] == 1 else mask.stride(0)))
        parts[13] = mask.shape[0], mask.shape[1] == n
    parts[1] = *k.shape[:2], k.shape[3], k.stride(2), n if call.segments is not None else None
    kinds = ((x % 16 == 0, x == 1, x >> 31 > 0) for x in strides)  # what Triton compiles for
    parts[2] = *v.shape[:2], v.shape[2] == n, v.shape[3], v.stride(2), *kinds
    rest = call._replace(zones=None) if call.zones else arguments  # a table with zones has its rows
    return rest, [n, *strides], parts


def attend(call: Arguments, numbers: Sequence[int], out: Tensor, lse: Tensor) -> None:
    """Compute out (B, H, m, dv) and lse (B, H, m), which are contiguous."""
    chunk = Chunk(call, slice(0, call.k.shape[0]), slice(0, call.k.shape[1]))
    n, k_batch, k_head, v_batch, v_head, *of_mask = numbers
    k = Rows(chunk.k, k_batch, k_head, chunk.k.stride(2))
    v = Rows(chunk.v, v_batch, v_head, chunk.v.stride(2))
    hidden = chunk.hidden._replace(key_mask_batch=(*of_mask, odd(0))[0])
    count, sizes = chunk.group * chunk.m, chunk.config
    widest = max(x.value for x in (sizes.WIDTH, sizes.V_WIDTH, sizes.P_WIDTH))
    wide = widest * chunk.q.itemsize > _WIDE
    rows = min(max(triton.next_power_of_2(count), LEAST), _ROWS // (2 if wide else 1))
    programs = chunk.batch * (chunk.heads // chunk.group) * -(-count // rows)
    splits = max(min(_PROGRAMS * launches.multiprocessors(out.device) // programs, _SPLITS), 1)
    part, part_lse = out, lse
    if splits > 1:
        both = lse.new_empty(lse.numel() * splits * (chunk.dv + 1))
        part, part_lse = both.split([both.numel() - lse.numel() * splits, lse.numel() * splits])
    one = (count if chunk.terms.p_head else chunk.m) == 1
    warps = 8 if out.dtype == torch.float32 else 4
    stages = 2 if wide or launches.capability(out.device) == 8 else 3
    launches.launch(
        attention_splits, (programs * splits,), rows_of(chunk.q), k, v, rows_of(chunk.q_rel),
        part, part_lse, hidden, chunk.terms, chunk.config, chunk.heads, chunk.group, chunk.m, n,
        chunk.scale, splits, ROWS=rows, ONE=one, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        launches.launch(
            merge_splits, (lse.numel(),), part, part_lse, out, lse, splits, SIZE=chunk.dv,
            WIDTH=launches.width(chunk.dv), SPLITS=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip


# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def _load(x, b, h, i, there, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows (i, WIDTH) of x, of one head or each of its own: 0 where not `there`."""
    column = tl.arange(0, WIDTH)
    mask = there[:, None] & (column < SIZE)[None, :]
    return tl.load(_rows_at(x, b, h, i)[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _table_rows(b, h, row, terms, config):
    """Return rows of the table of h, one head or one for each row."""
    table = Rows(terms.p, 0, terms.p_head, config.P_SIZE)
    there = (row >= 0) & (row <= terms.last - terms.first)
    return _load(table, b, h, row, there, config.P_SIZE, config.P_WIDTH)


@triton.jit
def _products(relative, x, number, offset, head, group, block, terms, config, ONE: tl.constexpr):
    """Return the products (rows, 64) with the table's rows for the keys of a block."""
    row = offset - members(block) - terms.first
    if ONE:
        rows = _table_rows(x.b, head, row, terms, config)
        products = tl.dot(relative, tl.trans(rows), input_precision="ieee")
    else:  # each query and, unless the heads use one table, each head has rows of its own
        products = tl.zeros((relative.shape[0], _BLOCK), tl.float32)
        tables = tl.where(terms.p_head > 0, group * x.m, x.m)
        for each in range(tables):
            rows = _table_rows(x.b, head + each // x.m, row + each % x.m, terms, config)
            of_all = tl.dot(relative, tl.trans(rows), input_precision="ieee")
            products = tl.where((number % tables == each)[:, None], of_all, products)
    return products


@kernel
def attention_splits(
    q, k, v, r, out, lse, hidden, terms, config, heads, group, m, n, scale, splits,
    ROWS: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Write out (B, H, m, splits, dv) and lse (B, H, m, splits), each of some of the keys.

    The sinks belong to the first split. ONE: the queries of a program have one place and one table.
    """
    split, place = tl.program_id(0) % splits, tl.program_id(0) // splits
    count = group * m
    parts = tl.cdiv(count, ROWS)
    pair, number = place // parts, tl.arange(0, ROWS) + (place % parts) * ROWS
    b, hk = pair // (heads // group), pair % (heads // group)
    there = number < count
    i, head = number % m, hk * group
    h = tl.minimum(head + number // m, heads - 1)
    row = (b.to(tl.int64) * heads + h) * m + i
    offset = offset_of(hidden, b, m, n)
    queries = _load(q, b, h, i, there, config.SIZE, config.WIDTH)
    unit = scores_unit(scale, config)
    relative = queries
    if r.ptr is not None:
        relative = _load(r, b, h, i, there, config.P_SIZE, config.P_WIDTH)
    low = tl.zeros((ROWS,), tl.float32)
    high = low
    if config.EDGE:
        wide, last_row = relative.to(tl.float32), i * 0 + terms.last - terms.first
        low = tl.sum(wide * _table_rows(b, h, i * 0, terms, config), 1)
        high = tl.sum(wide * _table_rows(b, h, last_row, terms, config), 1)
    x = Queries(b, h[:, None], i, m, i + offset, row, low, high)

    bounds = key_phases(offset, offset + m - 1, n, hidden, terms, config)
    each = tl.cdiv(bounds[7] - bounds[0], splits)
    begin = bounds[0] + split * each
    stop = tl.minimum(begin + each, bounds[7])
    first, last = begin, begin  # blocks of keys with rows of the table
    if terms.p is not None:
        first = clamp(floor_div(offset - terms.last, _BLOCK), begin, stop)
        last = clamp(floor_div(offset + m - 1 - terms.first, _BLOCK) + 1, first, stop)
    ends = (begin, first, last, stop)
    acc = tl.zeros((ROWS, config.V_WIDTH), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    if terms.sinks is not None:
        peak = tl.where(split == 0, tl.load(terms.sinks + h) * _LOG2E, peak)
    total = tl.where(peak == float("-inf"), 0.0, 1.0)
    for phase in tl.static_range(3):
        if phase == 2 or terms.p is not None:
            for block in range(ends[phase], ends[phase + 1]):
                keys = load_keys(k, b, hk, block, n, hidden, config, _FULL)
                term = None
                if phase == 1:
                    term = _products(
                        relative, x, number, offset, head, group, block, terms, config, ONE
                    )
                s = scores(queries, keys, x, block, terms, None, scale, config, _FULL, False, term)
                seen = visible(x, block, n, hidden, config, _FULL, False)
                s = tl.where(seen, s, float("-inf"))
                weights, shrink, peak, total = more_weights(s, unit, peak, total)
                values = load_values(v, b, hk, block, n, hidden, config, _FULL)
                acc = acc * shrink[:, None]
                acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    total, new_lse = divisor_and_lse(peak, total)
    at, column = row * splits + split, tl.arange(0, config.V_WIDTH)
    tl.store(lse + at, new_lse, there)
    mask = there[:, None] & (column < config.V_SIZE)[None, :]
    at = out + (at * config.V_SIZE)[:, None] + column[None, :]
    tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


@kernel
def merge_splits(
    part, part_lse, out, lse, splits, SIZE: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Write out and lse of a query from those of its splits."""
    query = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    each = tl.load(part_lse + query * splits + split, split < splits, float("-inf")) * _LOG2E
    peak = tl.max(each, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(each - peak)
    total = tl.sum(weights, 0)
    total, new_lse = divisor_and_lse(peak, total)
    at = part + ((query * splits + split) * SIZE)[:, None] + column[None, :]
    seen = (each != float("-inf"))[:, None] & (column < SIZE)[None, :]
    acc = tl.sum(weights[:, None] * tl.load(at, seen, 0.0), 0) / total
    tl.store(out + query * SIZE + column, acc.to(out.dtype.element_ty), column < SIZE)
    tl.store(lse + query, new_lse)
