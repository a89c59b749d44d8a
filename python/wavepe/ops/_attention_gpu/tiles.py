"""Fused attention on a GPU: functions of the Triton kernels for one tile of queries and keys.

Keys are taken in blocks of 64, one or two in a tile. A query at position t = i + offset and the
keys of block b are in the zone ``t // 64 - b``. All deltas of a zone lie within 63 of
``64 * zone``. Another kernel runs before the attention. It computes ``products[i, ...]``, from
which each tile adds the relative terms of its zones. So a tile reads rows that begin at a multiple
of 64 numbers for every position.

- In a near zone, ``products`` holds ``q_i . p[64 * zone + t % 64 - j]`` for each of the 64 keys j
  of the block. Zones near the diagonal are near, and so are all zones of a differentiable table.
- In a far zone a constant table is smooth. Here ``products`` holds ``rank`` numbers. Their product
  with a basis (rank, 64) gives the 64 terms (see `zones`).
- Beyond the table there is no term (beyond="zero"), or one number for each query (beyond="edge").

A tile is (queries, keys), or (keys, queries) if T is true. The gradients of keys and values are
products with the transposed tile, which tensor cores then read from registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .zones import BLOCK

LEAST = 16  # the smallest size that a tensor core multiplies; smaller sizes and ranks are padded
FARTHEST = 1 << 29  # larger positions are set to this, so that sums of a few fit 32 bits
# Triton would compile a kernel again for a length that is 1 or a multiple of 16, while a model
# generates text. In tuples it does: there integers that follow the lengths are `odd`.
kernel = triton.jit(do_not_specialize=["heads", "group", "m", "n", "splits"])
_BLOCK = tl.constexpr(BLOCK)
_LEAST = tl.constexpr(LEAST)
_LOG2E = tl.constexpr(1.4426950408889634)
_FARTHEST = tl.constexpr(FARTHEST)

# The level of a tile says what its scores need.
_PLAIN = tl.constexpr(0)  # q k^T
_FAR = tl.constexpr(1)  # also the products of far zones
_FULL = tl.constexpr(2)  # everything, masks included
_LEVELS = tl.constexpr((2, 0, 1, 2, 1, 0, 2))  # of the seven ranges of key_phases


def odd(x: int) -> int:
    """Return 2x + 1, whose half a kernel takes, so that it serves every x but 0 alike."""
    return 2 * x + 1


class Rows(NamedTuple):
    """A tensor (B, H, rows, size) as a pointer and strides; the stride of `size` is 1."""

    ptr: Any
    batch: Any
    head: Any
    row: Any


class Hidden(NamedTuple):
    """Masks of pairs of a query and a key; each tensor may be None. Strides are `odd`."""

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


class ScoreTerms(NamedTuple):
    """Terms added to q k^T in the scores; each tensor may be None. Those of bias are `odd`."""

    products: Any  # (B, H, m, columns): near zones, then far ones
    columns: Any
    basis: Any  # (rank, 64)
    near_first: Any  # the first near zone
    near_count: Any  # number of near zones
    left_count: Any  # number of far zones before the near ones
    right_count: Any  # number of far zones after them
    p: Any  # (rows, c) or (H, rows, c)
    p_head: Any  # stride of a head; 0 if all heads use one table
    first: Any  # delta of the table's first row
    last: Any  # delta of its last row
    slopes: Any  # (H,)
    bias: Any  # (w,) or (H, w)
    bias_head: Any
    bias_first: Any
    bias_last: Any
    softcap: Any
    sinks: Any  # (H,)


class Dropout(NamedTuple):
    """Dropout. Rows are counted in the whole call, so that chunks of heads change no result."""

    seed: Any  # one int64, or None
    threshold: Any
    factor: Any
    row: Any  # number of the chunk's first row in the call, `odd`
    batch: Any  # number of rows of a batch, `odd`


class Saved(NamedTuple):
    """Numbers of each query (B, H, m) that the backward's first kernel saves for the others."""

    lse: Any  # in base 2; +inf, which makes all weights 0, for a query that sees no key
    sums: Any  # dO . out - d lse
    low: Any  # with beyond="edge", as in `Queries`
    high: Any


class Config(NamedTuple):
    """Constants for which a kernel is compiled."""

    SIZE: tl.constexpr  # head size
    WIDTH: tl.constexpr  # the next power of two
    V_SIZE: tl.constexpr
    V_WIDTH: tl.constexpr
    P_SIZE: tl.constexpr  # columns of the table
    P_WIDTH: tl.constexpr
    CAUSAL: tl.constexpr
    EDGE: tl.constexpr  # beyond="edge": the first and last row of p stand for all rows outside
    BIAS_EDGE: tl.constexpr
    RANK: tl.constexpr
    PHASES: tl.constexpr  # 4 if the table has rows on one side of the diagonal only, else 7
    MASK_ALIGNED: tl.constexpr  # 16 entries of the mask may be loaded at once
    KEYS: tl.constexpr  # of a tile: 64 or 128
    BARE: tl.constexpr  # a score is a product times a positive scale, and nothing more


class Queries(NamedTuple):
    """The queries of a tile."""

    b: Any
    h: Any
    i: Any  # (rows,)
    m: Any
    position: Any  # i + offset
    row: Any  # number in a contiguous (B, H, m)
    low: Any  # with beyond="edge": products with the table's first row
    high: Any  # with beyond="edge": products with its last row


# ---- indices ------------------------------------------------------------------------------------


@triton.jit
def floor_div(x, N: tl.constexpr):
    """Return x // N for a power of two N; Triton's own division rounds towards zero."""
    return (x & -N) // N


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def members(block, SIZE: tl.constexpr = _BLOCK):
    """Return the indices (SIZE,) of the keys (or queries) of a block."""
    return tl.arange(0, SIZE) + block * SIZE


@triton.jit
def grad_queries(x, T: tl.constexpr):
    """Return x (queries,) with the axes of a tile."""
    return x[None, :] if T else x[:, None]


@triton.jit
def grad_keys(x, T: tl.constexpr):
    """Return x (keys,) with the axes of a tile."""
    return grad_queries(x, not T)


@triton.jit
def multiply(q, k, add, T: tl.constexpr):
    """Return q k^T, or its transpose if T, plus the tile `add`, which may be None."""
    if T:
        product = tl.dot(k, tl.trans(q), add, input_precision="ieee")
    else:
        product = tl.dot(q, tl.trans(k), add, input_precision="ieee")
    return product


@triton.jit
def load(x, b, h, first, row, there, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows first + row (row, WIDTH) of x: 0 from column SIZE on, and where not `there`.
    If `first`, unless None, alone changes in a loop, addresses take registers, not instructions."""
    column = tl.arange(0, WIDTH)
    start = x.ptr + b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head
    if first is None:
        at = start + row.to(tl.int64)[:, None] * x.row + column[None, :]
    else:
        start += tl.cast(first, tl.int64) * x.row
        at = start + (row.to(tl.int64)[:, None] * x.row + column[None, :])
    if there is not None:
        values = tl.load(at, mask=there[:, None] & (column < SIZE)[None, :], other=0.0)
    elif SIZE < WIDTH:
        values = tl.load(at, mask=(column < SIZE)[None, :], other=0.0)
    else:
        values = tl.load(at)
    return values


@triton.jit
def load_each(at, there, other):
    """Return numbers: `other` where `there` is false, unless it is None."""
    return tl.load(at) if there is None else tl.load(at, mask=there, other=other)


@triton.jit
def store(x, b, h, row, rows, values, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    start = x.ptr + b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head
    at = start + row.to(tl.int64)[:, None] * x.row + column[None, :]
    mask = (row < rows)[:, None] & (column < SIZE)[None, :]
    tl.store(at, values.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def offset_of(hidden, b, m, n):
    """Return the position of query 0."""
    if hidden.offset is None:
        offset = n - m
    else:
        offset = tl.load(hidden.offset + b * (hidden.offset_batch >> 1)).to(tl.int64)
        offset = clamp(offset, -_FARTHEST, _FARTHEST).to(tl.int32)
    return offset


# ---- who sees whom ------------------------------------------------------------------------------


@triton.jit
def _seen_keys(hidden, b, j, n):
    """Tell which keys j exist and are not hidden by key_mask."""
    inside = j < n
    if hidden.key_mask is not None:
        start = hidden.key_mask + b.to(tl.int64) * (hidden.key_mask_batch >> 1)
        shown = tl.load(start + j, inside, 0)
        inside = inside & (shown != 0)
    return inside


@triton.jit
def _load_block(
    x, b, h, block, n, hidden, config, SIZE: tl.constexpr, WIDTH: tl.constexpr, LEVEL: tl.constexpr
):
    """Return a block (KEYS, WIDTH) of k or v, with zeros for hidden keys, which may hold NaN."""
    there = None
    if hidden.key_mask is not None:
        there = _seen_keys(hidden, b, members(block, config.KEYS), n)
    elif LEVEL == _FULL:
        there = members(block, config.KEYS) < n
    if LEVEL == _FULL:
        values = load(x, b, h, None, members(block, config.KEYS), there, SIZE, WIDTH)
    else:
        row = tl.arange(0, config.KEYS)
        values = load(x, b, h, block * config.KEYS, row, there, SIZE, WIDTH)
    return values


@triton.jit
def load_keys(k, b, h, block, n, hidden, config, LEVEL: tl.constexpr):
    return _load_block(k, b, h, block, n, hidden, config, config.SIZE, config.WIDTH, LEVEL)


@triton.jit
def load_values(v, b, h, block, n, hidden, config, LEVEL: tl.constexpr):
    return _load_block(v, b, h, block, n, hidden, config, config.V_SIZE, config.V_WIDTH, LEVEL)


@triton.jit
def visible(x, block, n, hidden, config, LEVEL: tl.constexpr, T: tl.constexpr):
    """Return a tile of bool. Causal mask, window and n hide no pair of a tile below level _FULL."""
    keys = members(block, config.KEYS)
    i, j = grad_queries(x.i, T), grad_keys(keys, T)
    delta = grad_queries(x.position, T) - j
    seen = delta == delta  # a tile of True
    if LEVEL == _FULL:
        seen = seen & (j < n)
        if config.CAUSAL:
            seen = seen & (delta >= 0)
        if hidden.window is not None:
            seen = seen & (delta < hidden.window)
    if hidden.key_mask is not None:
        seen = seen & grad_keys(_seen_keys(hidden, x.b, keys, n), T)
    if hidden.segments is not None:
        start = hidden.segments + x.b.to(tl.int64) * (hidden.segments_batch >> 1)
        query_segment = tl.load(start + i, mask=i < x.m, other=0)
        seen = seen & (query_segment == tl.load(start + j, mask=j < n, other=0))
    if hidden.mask is not None:
        start = hidden.mask + x.b.to(tl.int64) * (hidden.mask_batch >> 1)
        start += x.h.to(tl.int64) * (hidden.mask_head >> 1)
        at = start + i.to(tl.int64) * (hidden.mask_row >> 1) + j
        if config.MASK_ALIGNED:
            at = tl.multiple_of(at, (16, 1) if T else (1, 16))
        seen = seen & (tl.load(at, mask=(i < x.m) & (j < n), other=0) != 0)
    return seen


# ---- scores -------------------------------------------------------------------------------------


@triton.jit
def _far_slot(terms, zone):
    """Return the number of a zone among the far zones, and whether it is a far zone."""
    left = zone - terms.near_first + terms.left_count
    right = zone - terms.near_first - terms.near_count
    is_left = (left >= 0) & (left < terms.left_count)
    is_right = (right >= 0) & (right < terms.right_count)
    return tl.where(is_right, right + terms.left_count, left), is_left | is_right


@triton.jit
def _zones(x, block, place, SIZE: tl.constexpr, config):
    """Return the zones of queries and of the columns of a tile, `place`, SIZE for each 64 keys."""
    zone = floor_div(x.position, _BLOCK)[:, None] - block * (config.KEYS // _BLOCK)
    if config.KEYS > _BLOCK:
        zone = zone - (place // SIZE)[None, :]
    return zone


@triton.jit
def far_at(terms, x, block, config):
    """Return the indices (queries, 16 for each 64 keys) of a tile's products in far zones, and
    which exist."""
    place = tl.arange(0, config.KEYS // _BLOCK * _LEAST)
    slot, there = _far_slot(terms, _zones(x, block, place, _LEAST, config))
    start = (x.row * terms.columns + terms.near_count * _BLOCK)[:, None] + slot * config.RANK
    rank = (place % _LEAST)[None, :]
    return start + rank, there & (x.i < x.m)[:, None] & (rank < config.RANK)


@triton.jit
def near_at(terms, x, block, config):
    """Return the indices (queries, KEYS) of a tile's products in near zones, and which exist."""
    place = tl.arange(0, config.KEYS)
    slot = _zones(x, block, place, _BLOCK, config) - terms.near_first
    at = (x.row * terms.columns)[:, None] + slot * _BLOCK + (place % _BLOCK)[None, :]
    return at, (slot >= 0) & (slot < terms.near_count) & (x.i < x.m)[:, None]


@triton.jit
def basis_of(terms, config):
    """Return the basis of the far zones, with zeros in rows from RANK to 16, or None; for 128 keys
    (32, 128), with one for each 64 of them."""
    basis = None
    if terms.basis is not None:
        place = tl.arange(0, config.KEYS // _BLOCK * _LEAST)[:, None]
        key = tl.arange(0, config.KEYS)[None, :]
        there = (place % _LEAST < config.RANK) & (place // _LEAST == key // _BLOCK)
        at = terms.basis + place % _LEAST * _BLOCK + key % _BLOCK
        basis = tl.load(at, mask=there, other=0.0)
    return basis


@triton.jit
def edge_rows(terms, h, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Return the table's first and last row, which stand for all rows outside the table."""
    column = tl.arange(0, WIDTH)
    at = terms.p + h.to(tl.int64) * terms.p_head + column
    low = tl.load(at, mask=column < SIZE, other=0.0).to(tl.float32)
    end = tl.full((), SIZE, tl.int64) * (terms.last - terms.first)
    return low, tl.load(at + end, mask=column < SIZE, other=0.0).to(tl.float32)


@triton.jit
def _tanh(x):
    """Return tanh(x). Small x need a series, because 1 - exp(-2x) loses their digits."""
    e = tl.exp2(tl.abs(x) * (-2 * _LOG2E))
    large = (1 - e) / (1 + e)
    y = x * x
    small = tl.abs(x) * (1 + y * (-1 / 3 + y * (2 / 15 - y * (17 / 315))))
    t = tl.where(tl.abs(x) < 0.1, small, large)
    return tl.where(x < 0, -t, t)


@triton.jit
def scores_unit(scale, config):
    """Return the factor of `scores` in exponents of 2: one instruction multiplies and subtracts."""
    return scale * _LOG2E if config.BARE else 1.0


@triton.jit
def scores(
    q, k, x, block, terms, basis, scale, config, LEVEL: tl.constexpr, T: tl.constexpr, term=None
):
    """Return a tile of scores in base 2, softcap included, over `scores_unit`; `term` is added to
    q k^T."""
    s = multiply(q, k, term, T)
    delta = grad_queries(x.position, T) - grad_keys(members(block, config.KEYS), T)
    if terms.products is not None:
        if LEVEL >= _FAR and terms.basis is not None:
            at, there = far_at(terms, x, block, config)
            far = tl.load(terms.products + at, mask=there, other=0.0)
            s = multiply(far, tl.trans(basis), s, T)
        if LEVEL == _FULL:
            at, there = near_at(terms, x, block, config)
            near = tl.load(terms.products + at, mask=there, other=0.0).to(tl.float32)
            s += tl.trans(near) if T else near
    if config.EDGE:
        s += tl.where(delta < terms.first, grad_queries(x.low, T), 0.0)
        s += tl.where(delta > terms.last, grad_queries(x.high, T), 0.0)
    if not config.BARE:
        unit = _LOG2E if terms.softcap is None else 1 / terms.softcap
        s *= scale * unit
        if terms.slopes is not None:
            s -= (tl.load(terms.slopes + x.h) * unit) * tl.abs(delta).to(tl.float32)
        if terms.bias is not None:
            row = delta - (terms.bias_first >> 1)
            count = (terms.bias_last >> 1) - (terms.bias_first >> 1)
            at = terms.bias + x.h.to(tl.int64) * (terms.bias_head >> 1)
            if config.BIAS_EDGE:
                s += tl.load(at + clamp(row, 0, count)) * unit
            else:
                s += tl.load(at + row, mask=(row >= 0) & (row <= count), other=0.0) * unit
        if terms.softcap is not None:
            s = (terms.softcap * _LOG2E) * _tanh(s)
    return s


@triton.jit
def kept_weights(dropout, x, block, config, T: tl.constexpr):
    """Return a tile of 0 for dropped weights and 1 / (1 - dropout_p) for kept ones.

    The hash is the CPU kernel's: splitmix64 of seed and row, and a 32-bit mix with the key.
    """
    row = (dropout.row >> 1) + x.b.to(tl.int64) * (dropout.batch >> 1)
    row += x.h.to(tl.int64) * x.m + x.i
    z = tl.load(dropout.seed).to(tl.uint64) + (row + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = grad_queries(z ^ (z >> 31), T)
    y = grad_keys(members(block, config.KEYS), T).to(tl.uint32) * 0x9E3779B9 + z.to(tl.uint32)
    y = (y ^ (y >> 16)) * 0x7FEB352D
    y = y ^ (y >> 15) ^ (z >> 32).to(tl.uint32)
    y = y * 0x846CA68B
    y = y ^ (y >> 16)
    return tl.where(y.to(tl.int64) >= dropout.threshold, dropout.factor, 0.0)


# ---- softmax ------------------------------------------------------------------------------------


@triton.jit
def more_weights(s, unit, peak, total):
    """Return the weights of more scores (rows, keys), the factor on what was summed before them,
    and the largest exponent and the sum of weights with them."""
    new = tl.maximum(peak, tl.max(s, 1) * unit)
    safe = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(s * unit - safe[:, None])
    shrink = tl.exp2(peak - safe)
    return weights, shrink, new, total * shrink + tl.sum(weights, 1)


@triton.jit
def divisor_and_lse(peak, total):
    """Return what divides the weighted sum, 1 if no key was seen, and lse."""
    blind = total == 0
    total = tl.where(blind, 1.0, total)
    return total, tl.where(blind, float("-inf"), (peak + tl.log2(total)) / _LOG2E)
