"""Fused attention on a GPU: the products of the queries with the table, and their gradients.

Queries whose positions are equal modulo 64 have the same rows of the table in the same columns of
their products. So one matrix product serves all of them: 64 in all, one for each remainder.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import _BLOCK, clamp, edge_rows, floor_div, kernel, load, members, offset_of, store


@triton.jit
def _same_remainder(program, hidden, heads, m, n, SHARED: tl.constexpr, ROWS: tl.constexpr):
    """Return a program's remainder, batch, heads (equal unless SHARED) and indices, which exist."""
    classes = tl.minimum(m, _BLOCK)
    member, part = program % classes, program // classes
    count = tl.cdiv(m, _BLOCK)  # queries of one head
    rows = heads * count if SHARED else count
    parts = tl.cdiv(rows, ROWS)
    pair, row = part // parts, tl.arange(0, ROWS) + (part % parts) * ROWS
    b = pair if SHARED else pair // heads
    h = row // count if SHARED else row * 0 + pair % heads
    i = (row % count) * _BLOCK + member
    remainder = (member + offset_of(hidden, b, m, n)) & (_BLOCK - 1)
    return remainder, b, h, i, (row < rows) & (i < m)


@triton.jit
def _rows_at(x, b, h, i):
    """Return the addresses (i,) of rows of several heads."""
    return x.ptr + b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head + i.to(tl.int64) * x.row


@triton.jit
def _columns(terms, far, h, remainder, slot, config):
    """Return the factors (64, P_WIDTH) of the queries for one slot of 64 columns of products."""
    place, column = members(slot), tl.arange(0, config.P_WIDTH)
    # Key j of near zone z has the table row 64 z + remainder - j.
    row = terms.near_first * _BLOCK + slot * 2 * _BLOCK + remainder - place - terms.first
    there = (place < terms.near_count * _BLOCK) & (row >= 0) & (row <= terms.last - terms.first)
    at = terms.p + h.to(tl.int64) * terms.p_head + row.to(tl.int64)[:, None] * config.P_SIZE
    inside = (column < config.P_SIZE)[None, :]
    values = tl.load(at + column[None, :], mask=there[:, None] & inside, other=0.0)
    if far is not None:
        place -= terms.near_count * _BLOCK
        count = terms.columns - terms.near_count * _BLOCK
        there = (place >= 0) & (place < count)
        at = far + (remainder * count + place)[:, None] * config.P_SIZE + column[None, :]
        values += tl.load(at, mask=there[:, None] & inside, other=0.0)
    return values


@triton.jit
def _products_at(terms, b, h, heads, i, m, slot):
    """Return the indices (i, 64) of the columns of one slot, and which exist."""
    column = members(slot)
    row = (b.to(tl.int64) * heads + h) * m + i
    return row[:, None] * terms.columns + column[None, :], (column < terms.columns)[None, :]


@triton.jit
def _have_gradients(position, remainder, slot, n, hidden, terms, config):
    """Tell which products (position, 64) are of blocks that a query sees. No others are written."""
    column = members(slot)
    zone = terms.near_first + column // _BLOCK
    if terms.basis is not None:
        place = column - terms.near_count * _BLOCK
        far = floor_div(place, config.RANK)
        between = tl.where(far < terms.left_count, 0, terms.near_count)
        far += terms.near_first - terms.left_count + between
        zone = tl.where(place < 0, zone, far)
    some = column < terms.columns
    if config.CAUSAL:
        some = some & (zone >= 0)
    if hidden.window is not None:
        some = some & (zone * _BLOCK + remainder - (_BLOCK - 1) < hidden.window)
    block = floor_div(position, _BLOCK)[:, None] - zone[None, :]
    return (block >= 0) & (block < tl.cdiv(n, _BLOCK)) & some[None, :]


@kernel
def table_products(
    r, far, products, hidden, terms, config, heads, m, n, SHARED: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Write products (B, H, m, columns) of r with the table; a program has some of the columns."""
    program = tl.program_id(0)
    remainder, b, h, i, there = _same_remainder(program, hidden, heads, m, n, SHARED, ROWS)
    column = tl.arange(0, config.P_WIDTH)
    mask = there[:, None] & (column < config.P_SIZE)[None, :]
    queries = tl.load(_rows_at(r, b, h, i)[:, None] + column[None, :], mask=mask, other=0.0)
    for slot in range(tl.program_id(1), tl.cdiv(terms.columns, _BLOCK), tl.num_programs(1)):
        columns = _columns(terms, far, tl.min(h, 0), remainder, slot, config)
        values = tl.dot(queries, tl.trans(columns), input_precision="ieee")
        if products.dtype.element_ty == tl.float16:  # an overflow to inf would become NaN later
            finite = tl.abs(values) < float("inf")
            values = tl.where(finite, clamp(values, -65504.0, 65504.0), values)
        at, inside = _products_at(terms, b, h, heads, i, m, slot)
        tl.store(products + at, values.to(products.dtype.element_ty), mask=there[:, None] & inside)


@kernel
def table_backward_queries(
    dproducts, dedges, far, part, dr, scale, hidden, terms, config, heads, m, n,
    SHARED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write dr: the gradients of the products times the table, scaled, plus `part` if given."""
    program = tl.program_id(0)
    remainder, b, h, i, there = _same_remainder(program, hidden, heads, m, n, SHARED, ROWS)
    head, position = tl.min(h, 0), i + offset_of(hidden, b, m, n)
    acc = tl.zeros((ROWS, config.P_WIDTH), tl.float32)
    if dproducts is not None:
        for slot in range(tl.cdiv(terms.columns, _BLOCK)):
            at, _ = _products_at(terms, b, h, heads, i, m, slot)
            written = _have_gradients(position, remainder, slot, n, hidden, terms, config)
            gradients = tl.load(dproducts + at, mask=there[:, None] & written, other=0.0)
            columns = _columns(terms, far, head, remainder, slot, config)
            acc = tl.dot(gradients, columns, acc, input_precision="ieee")
    if dedges is not None:
        low, high = edge_rows(terms, head, config.P_SIZE, config.P_WIDTH)
        at = dedges + 2 * ((b.to(tl.int64) * heads + h) * m + i)
        acc += tl.load(at, mask=there, other=0.0)[:, None] * low[None, :]
        acc += tl.load(at + 1, mask=there, other=0.0)[:, None] * high[None, :]
    acc *= scale
    column = tl.arange(0, config.P_WIDTH)
    mask = there[:, None] & (column < config.P_SIZE)[None, :]
    if part.ptr is not None:
        acc += tl.load(_rows_at(part, b, h, i)[:, None] + column[None, :], mask=mask, other=0.0)
    at = _rows_at(dr, b, h, i)[:, None] + column[None, :]
    tl.store(at, acc.to(dr.ptr.dtype.element_ty), mask=mask)


@kernel
def table_backward(
    r, dproducts, dedges, dp, scale, hidden, terms, config, heads, m, n, ROWS: tl.constexpr
):  # fmt: skip
    """Write dp (B, H, rows, d) of each batch and head; a program has 64 rows of the table."""
    count = terms.last - terms.first + 1
    blocks = tl.cdiv(count, _BLOCK)
    pair = tl.program_id(0) // blocks
    b, h = pair // heads, pair % heads
    row = members(tl.program_id(0) % blocks)
    offset = offset_of(hidden, b, m, n)
    used = row < count
    if hidden.window is not None:
        used = used & (row + terms.first < hidden.window)
    acc = tl.zeros((_BLOCK, config.P_WIDTH), tl.float32)
    for block in range(tl.cdiv(m, ROWS)):
        i = tl.arange(0, ROWS) + block * ROWS
        position = (i + offset)[None, :]
        start = (b.to(tl.int64) * heads + h) * m + i
        gradients = tl.zeros((_BLOCK, ROWS), r.ptr.dtype.element_ty)
        if dproducts is not None:
            key = position - terms.first - row[:, None]
            slot = floor_div(position, _BLOCK) - floor_div(key, _BLOCK) - terms.near_first
            at = (start * terms.columns)[None, :] + slot * _BLOCK + (key & (_BLOCK - 1))
            there = (slot >= 0) & (slot < terms.near_count) & (key >= 0) & (key < n)
            there = there & used[:, None] & (i < m)[None, :]
            gradients = tl.load(dproducts + at, mask=there, other=0.0)
        if dedges is not None:
            low = tl.load(dedges + 2 * start, mask=i < m, other=0.0)[None, :]
            high = tl.load(dedges + 2 * start + 1, mask=i < m, other=0.0)[None, :]
            edges = tl.where((row == 0)[:, None], low, 0.0)
            edges += tl.where((row == count - 1)[:, None], high, 0.0)
            gradients = (gradients.to(tl.float32) + edges).to(gradients.dtype)
        queries = load(r, b, h, None, i, i < m, config.P_SIZE, config.P_WIDTH)
        acc = tl.dot(gradients, queries, acc, input_precision="ieee")
    store(dp, b, h, row, count, acc * scale, config.P_SIZE, config.P_WIDTH)
