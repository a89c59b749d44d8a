"""Fused attention on a GPU: what its Triton kernels do to one tile of queries and keys.

Keys are taken in blocks of 64. For a query at position t = i + offset and keys of block b, the
zone is ``t // 64 - b``: all deltas of a zone lie within 63 of ``64 * zone``. A kernel before the
attention computes ``products[i, ...]``, what the relative term is made of, by zones. So every tile
of the attention reads rows that begin at a multiple of 64 numbers, whatever the query's position:

- near the diagonal, and for tables that are differentiated: ``q_i . p[64 * zone + t % 64 - j]`` for
  the 64 keys j of the block;
- far from it a constant table is smooth, and ``rank`` numbers times a basis (rank, 64) give the
  64 terms, see `zones`;
- beyond the table: nothing (beyond="zero"), or one number a query (beyond="edge").

A tile is (queries, keys), or (keys, queries) where T is true: the gradients of keys and values are
products with its transpose, which tensor cores take from registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .zones import BLOCK

LEAST = 16  # what a tensor core multiplies at once; smaller sizes and ranks are padded
FARTHEST = 1 << 29  # positions beyond count as this: sums of a few fit 32 bits
_BLOCK = tl.constexpr(BLOCK)
_LEAST = tl.constexpr(LEAST)
_LOG2E = tl.constexpr(1.4426950408889634)
_FARTHEST = tl.constexpr(FARTHEST)

# What a tile needs: nothing but q k^T; low-rank products too; or everything, masks included.
_PLAIN = tl.constexpr(0)
_FAR = tl.constexpr(1)
_FULL = tl.constexpr(2)
_LEVELS = tl.constexpr((2, 0, 1, 2, 1, 0, 2))  # of the seven ranges of blocks, see key_phases


class Rows(NamedTuple):
    """A tensor (B, H, rows, size) by its strides; the stride of size is 1."""

    ptr: Any
    batch: Any
    head: Any
    row: Any


class Hidden(NamedTuple):
    """Which pairs are hidden; each tensor may be None."""

    window: Any  # int
    key_mask: Any  # (B, n) bool
    key_mask_batch: Any  # stride
    segments: Any  # (B, n)
    segments_batch: Any
    mask: Any  # (B, H, m, n) bool, and its strides
    mask_batch: Any
    mask_head: Any
    mask_row: Any
    offset: Any  # (B,); None is n - m
    offset_batch: Any


class Terms(NamedTuple):
    """What is added to q k^T; each tensor may be None."""

    products: Any  # (B, H, m, columns): near zones, then far ones
    columns: Any
    basis: Any  # (rank, 64)
    near_first: Any  # the first near zone
    near: Any  # how many zones are near
    left: Any  # how many far zones lie before them
    right: Any  # and after
    p: Any  # (rows, d) or (H, rows, d)
    p_head: Any  # stride of a head; 0 where all share one table
    first: Any  # delta of the table's first row
    last: Any  # and of its last
    slopes: Any  # (H,)
    bias: Any  # (w,) or (H, w)
    bias_head: Any
    bias_first: Any
    bias_last: Any
    softcap: Any


class Dropout(NamedTuple):
    """Rows of the whole call are counted, so that a chunk of heads drops the same weights."""

    seed: Any  # one int64, or None
    threshold: Any
    factor: Any
    row: Any  # number of the first row
    batch: Any  # rows a batch


class Options(NamedTuple):
    """What a kernel is compiled for."""

    SIZE: tl.constexpr  # head size, and the power of two that has room for it
    WIDTH: tl.constexpr
    V_SIZE: tl.constexpr
    V_WIDTH: tl.constexpr
    CAUSAL: tl.constexpr
    EDGE: tl.constexpr  # p's rows at both ends stand for all beyond
    BIAS_EDGE: tl.constexpr
    RANK: tl.constexpr
    PHASES: tl.constexpr  # 4 where only one side of the diagonal has a table, else 7


class Queries(NamedTuple):
    """The queries of a tile."""

    b: Any
    h: Any
    i: Any  # (rows,)
    m: Any
    position: Any  # i + offset
    row: Any  # number in a contiguous (B, H, m)
    low: Any  # products with the table's first row, for beyond="edge"
    high: Any  # and its last


# ---- indices ------------------------------------------------------------------------------------


@triton.jit
def floor_div(x, N: tl.constexpr):
    """x // N for a power of two; Triton's own division rounds towards zero."""
    return (x & -N) // N


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def members(block):
    """(64,) numbers of the members of a block."""
    return tl.arange(0, _BLOCK) + block * _BLOCK


@triton.jit
def of_queries(x, T: tl.constexpr):
    """(queries,) as an axis of a tile."""
    return x[None, :] if T else x[:, None]


@triton.jit
def of_keys(x, T: tl.constexpr):
    return of_queries(x, not T)


@triton.jit
def multiply(q, k, add, T: tl.constexpr):
    """q k^T, or its transpose, plus a tile or None."""
    if T:
        product = tl.dot(k, tl.trans(q), add, input_precision="ieee")
    else:
        product = tl.dot(q, tl.trans(k), add, input_precision="ieee")
    return product


@triton.jit
def load(x, b, h, row, rows, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """(row, WIDTH) of x; 0 in columns beyond SIZE and, if MASKED, in rows beyond `rows`."""
    column = tl.arange(0, WIDTH)
    start = x.ptr + b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head
    at = start + row.to(tl.int64)[:, None] * x.row + column[None, :]
    if MASKED:
        values = tl.load(at, mask=(row < rows)[:, None] & (column < SIZE)[None, :], other=0.0)
    elif SIZE < WIDTH:
        values = tl.load(at, mask=(column < SIZE)[None, :], other=0.0)
    else:
        values = tl.load(at)
    return values


@triton.jit
def store(x, b, h, row, rows, values, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    start = x.ptr + b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head
    at = start + row.to(tl.int64)[:, None] * x.row + column[None, :]
    mask = (row < rows)[:, None] & (column < SIZE)[None, :]
    tl.store(at, values.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def offset_of(hidden, b, m, n):
    """The position of query 0."""
    if hidden.offset is None:
        offset = n - m
    else:
        offset = tl.load(hidden.offset + b * hidden.offset_batch).to(tl.int64)
        offset = clamp(offset, -_FARTHEST, _FARTHEST).to(tl.int32)
    return offset


# ---- who sees whom ------------------------------------------------------------------------------


@triton.jit
def _seen_keys(hidden, b, j, n):
    """The keys j that exist and that key_mask shows."""
    inside = j < n
    if hidden.key_mask is not None:
        shown = tl.load(hidden.key_mask + b.to(tl.int64) * hidden.key_mask_batch + j, inside, 0)
        inside = inside & (shown != 0)
    return inside


@triton.jit
def load_keys(
    x, b, h, block, n, hidden, SIZE: tl.constexpr, WIDTH: tl.constexpr, LEVEL: tl.constexpr
):
    """(64, WIDTH) of k or v; zeros where key_mask hides a key, which may hold NaN."""
    j = members(block)
    if hidden.key_mask is not None:
        j = tl.where(_seen_keys(hidden, b, j, n), j, n)
    return load(x, b, h, j, n, SIZE, WIDTH, LEVEL == _FULL or hidden.key_mask is not None)


@triton.jit
def visible(x, block, n, hidden, how, LEVEL: tl.constexpr, T: tl.constexpr):
    """A tile of bool; one that is not _FULL lies within what causal, window and n allow."""
    keys = members(block)
    i, j = of_queries(x.i, T), of_keys(keys, T)
    delta = of_queries(x.position, T) - j
    seen = delta == delta
    if LEVEL == _FULL:
        seen = seen & (j < n)
        if how.CAUSAL:
            seen = seen & (delta >= 0)
        if hidden.window is not None:
            seen = seen & (delta < hidden.window)
    if hidden.key_mask is not None:
        seen = seen & of_keys(_seen_keys(hidden, x.b, keys, n), T)
    if hidden.segments is not None:
        start = hidden.segments + x.b.to(tl.int64) * hidden.segments_batch
        own = tl.load(start + i, mask=i < x.m, other=0)
        seen = seen & (own == tl.load(start + j, mask=j < n, other=0))
    if hidden.mask is not None:
        start = hidden.mask + x.b.to(tl.int64) * hidden.mask_batch
        start += x.h.to(tl.int64) * hidden.mask_head
        at = start + i.to(tl.int64) * hidden.mask_row + j
        seen = seen & (tl.load(at, mask=(i < x.m) & (j < n), other=0) != 0)
    return seen


# ---- scores -------------------------------------------------------------------------------------


@triton.jit
def _far_slot(terms, zone):
    """The number of a zone among the far ones, and whether it is one."""
    left = zone - terms.near_first + terms.left
    right = zone - terms.near_first - terms.near
    is_left = (left >= 0) & (left < terms.left)
    is_right = (right >= 0) & (right < terms.right)
    return tl.where(is_right, right + terms.left, left), is_left | is_right


@triton.jit
def far_at(terms, x, block, how):
    """Places (queries, 16) of the far products with one block, and which exist."""
    slot, there = _far_slot(terms, floor_div(x.position, _BLOCK) - block)
    rank = tl.arange(0, _LEAST)
    at = (x.row * terms.columns + terms.near * _BLOCK + slot * how.RANK)[:, None] + rank[None, :]
    return at, (there & (x.i < x.m))[:, None] & (rank < how.RANK)[None, :]


@triton.jit
def near_at(terms, x, block):
    """Places (queries, 64) of the near products with one block, and which exist."""
    slot = floor_div(x.position, _BLOCK) - block - terms.near_first
    at = (x.row * terms.columns + slot * _BLOCK)[:, None] + tl.arange(0, _BLOCK)[None, :]
    return at, ((slot >= 0) & (slot < terms.near) & (x.i < x.m))[:, None]


@triton.jit
def basis_of(terms, how):
    """(16, 64)"""
    rank = tl.arange(0, _LEAST)[:, None]
    at = terms.basis + rank * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    return tl.load(at, mask=rank < how.RANK, other=0.0)


@triton.jit
def edge_rows(terms, h, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """The table's first and last row, which stand for all before and behind."""
    column = tl.arange(0, WIDTH)
    at = terms.p + h.to(tl.int64) * terms.p_head + column
    low = tl.load(at, mask=column < SIZE, other=0.0).to(tl.float32)
    end = tl.full((), SIZE, tl.int64) * (terms.last - terms.first)
    return low, tl.load(at + end, mask=column < SIZE, other=0.0).to(tl.float32)


@triton.jit
def _tanh(x):
    """Right for small x, too, where 1 - exp(-2x) cancels."""
    e = tl.exp2(tl.abs(x) * (-2 * _LOG2E))
    large = (1 - e) / (1 + e)
    y = x * x
    small = tl.abs(x) * (1 + y * (-1 / 3 + y * (2 / 15 - y * (17 / 315))))
    t = tl.where(tl.abs(x) < 0.1, small, large)
    return tl.where(x < 0, -t, t)


@triton.jit
def scores(q, k, x, block, terms, scale, how, LEVEL: tl.constexpr, T: tl.constexpr):
    """A tile of scores, softcap included."""
    s = multiply(q, k, None, T)
    delta = of_queries(x.position, T) - of_keys(members(block), T)
    if terms.products is not None:
        if LEVEL >= _FAR and terms.basis is not None:
            at, there = far_at(terms, x, block, how)
            far = tl.load(terms.products + at, mask=there, other=0.0)
            s = multiply(far, tl.trans(basis_of(terms, how)), s, T)
        if LEVEL == _FULL:
            at, there = near_at(terms, x, block)
            near = tl.load(terms.products + at, mask=there, other=0.0).to(tl.float32)
            s += tl.trans(near) if T else near
    if how.EDGE:
        s += tl.where(delta < terms.first, of_queries(x.low, T), 0.0)
        s += tl.where(delta > terms.last, of_queries(x.high, T), 0.0)
    s *= scale
    if terms.slopes is not None:
        s -= tl.load(terms.slopes + x.h) * tl.abs(delta).to(tl.float32)
    if terms.bias is not None:
        row = delta - terms.bias_first
        count = terms.bias_last - terms.bias_first
        at = terms.bias + x.h.to(tl.int64) * terms.bias_head
        if how.BIAS_EDGE:
            s += tl.load(at + clamp(row, 0, count))
        else:
            s += tl.load(at + row, mask=(row >= 0) & (row <= count), other=0.0)
    if terms.softcap is not None:
        s = terms.softcap * _tanh(s / terms.softcap)
    return s


@triton.jit
def kept_weights(dropout, x, block, T: tl.constexpr):
    """A tile of 0 where a weight is dropped and 1 / (1 - dropout_p) where it is kept.

    The CPU's hash: splitmix64 of seed and row gives two keys, a mix of 32 bits of them and the
    key's index the decision.
    """
    row = dropout.row + x.b.to(tl.int64) * dropout.batch + x.h.to(tl.int64) * x.m + x.i
    z = tl.load(dropout.seed).to(tl.uint64) + (row + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = of_queries(z ^ (z >> 31), T)
    y = of_keys(members(block), T).to(tl.uint32) * 0x9E3779B9 + z.to(tl.uint32)
    y = (y ^ (y >> 16)) * 0x7FEB352D
    y = y ^ (y >> 15) ^ (z >> 32).to(tl.uint32)
    y = y * 0x846CA68B
    y = y ^ (y >> 16)
    return tl.where(y.to(tl.int64) >= dropout.threshold, dropout.factor, 0.0)
