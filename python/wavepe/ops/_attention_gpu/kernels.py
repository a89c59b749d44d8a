"""Fused attention on a GPU: the Triton kernels over tiles, forward and backward, without atomics.

In the backward each element of ``products`` belongs to one tile, which writes its gradient. The
kernels of `products` then compute the gradients of q and p from it. Sums have a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bounds import key_phases, query_phases
from .tiles import (
    _BLOCK,
    _FAR,
    _FULL,
    _LEVELS,
    _LOG2E,
    Queries,
    basis_of,
    divisor_and_lse,
    edge_rows,
    far_at,
    grad_queries,
    kept_weights,
    kernel,
    load,
    load_each,
    load_keys,
    load_values,
    members,
    more_weights,
    multiply,
    near_at,
    offset_of,
    scores,
    scores_unit,
    store,
    visible,
)


@triton.jit
def _queries(q, r, m, n, heads, hidden, terms, config, ROWS: tl.constexpr):
    """Return rows of q, their `Queries` and the bounds of `key_phases`."""
    blocks = tl.cdiv(m, ROWS)
    pair = tl.program_id(0) // blocks
    # The last queries start first: they see most.
    start = (blocks - 1 - tl.program_id(0) % blocks) * ROWS
    b, h, i = pair // heads, pair % heads, tl.arange(0, ROWS) + start
    rows = load(q, b, h, None, i, i < m, config.SIZE, config.WIDTH)
    zeros = tl.zeros((ROWS,), tl.float32)
    low, high = zeros, zeros
    if config.EDGE:
        first, last = edge_rows(terms, h, config.P_SIZE, config.P_WIDTH)
        if r.ptr is None:
            relative = rows
        else:
            relative = load(r, b, h, None, i, i < m, config.P_SIZE, config.P_WIDTH)
        low = tl.sum(relative.to(tl.float32) * first[None, :], 1)
        high = tl.sum(relative.to(tl.float32) * last[None, :], 1)
    offset = offset_of(hidden, b, m, n)
    row = (b.to(tl.int64) * heads + h) * m + i
    last = tl.minimum(start + ROWS, m) - 1
    bounds = key_phases(start + offset, last + offset, n, hidden, terms, config)
    return rows, Queries(b, h, i, m, i + offset, row, low, high), bounds


@triton.jit
def _saved_queries(
    q, grad, saved, b, h, start, m, heads, offset, config, ROWS: tl.constexpr, LEVEL: tl.constexpr
):
    """Return rows of q and of the output's gradient, and their `Queries`."""
    i = tl.arange(0, ROWS) + start
    there = (i < m) if LEVEL == _FULL else None
    rows = load(q, b, h, None, i, there, config.SIZE, config.WIDTH)
    do = load(grad, b, h, None, i, there, config.V_SIZE, config.V_WIDTH)
    row = (b.to(tl.int64) * heads + h) * m + i
    zeros = tl.zeros((ROWS,), tl.float32)
    low, high = zeros, zeros
    if config.EDGE:
        low = load_each(saved.low + row, there, 0.0)
        high = load_each(saved.high + row, there, 0.0)
    return rows, do, Queries(b, h, i, m, i + offset, row, low, high)


# ---- forward ------------------------------------------------------------------------------------


@kernel
def attention_forward(
    q, k, v, r, out, lse, hidden, terms, dropout, config, heads, group, m, n, scale,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write out (B, H, m, dv) and lse (B, H, m); a program has ROWS queries of one head."""
    queries, x, bounds = _queries(q, r, m, n, heads, hidden, terms, config, ROWS)
    basis, unit = basis_of(terms, config), scores_unit(scale, config)
    acc = tl.zeros((ROWS, config.V_WIDTH), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    if terms.sinks is not None:
        peak = tl.maximum(peak, tl.load(terms.sinks + x.h) * _LOG2E)
    total = tl.where(peak == float("-inf"), 0.0, 1.0)
    for phase in tl.static_range(config.PHASES):
        if _LEVELS[phase] != _FAR or terms.basis is not None:
            for block in range(bounds[phase], bounds[phase + 1]):
                keys = load_keys(k, x.b, x.h // group, block, n, hidden, config, _LEVELS[phase])
                s = scores(
                    queries, keys, x, block, terms, basis, scale, config, _LEVELS[phase], False
                )
                seen = visible(x, block, n, hidden, config, _LEVELS[phase], False)
                s = tl.where(seen, s, float("-inf"))
                weights, shrink, peak, total = more_weights(s, unit, peak, total)
                if dropout.seed is not None:
                    weights *= kept_weights(dropout, x, block, config, False)
                values = load_values(v, x.b, x.h // group, block, n, hidden, config, _LEVELS[phase])
                acc = acc * shrink[:, None]
                acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    total, new_lse = divisor_and_lse(peak, total)
    store(out, x.b, x.h, x.i, m, acc / total[:, None], config.V_SIZE, config.V_WIDTH)
    tl.store(lse + x.row, new_lse, x.i < m)


# ---- backward -----------------------------------------------------------------------------------


@triton.jit
def _gradient(
    queries, keys, values, do, lse, sums, x, block, n, hidden, terms, basis, dropout, scale, config,
    LEVEL: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Return tiles of weights after dropout, and of dS = P (dO v^T - sums) before softcap."""
    s = scores(queries, keys, x, block, terms, basis, scale, config, LEVEL, T)
    seen = visible(x, block, n, hidden, config, LEVEL, T)
    exponents = tl.where(seen, s, float("-inf")) * scores_unit(scale, config)
    if lse.dtype.is_ptr():  # saved; loaded before the scores it would take registers
        lse = tl.load(lse + x.row, mask=x.i < x.m, other=float("inf"))
        sums = tl.load(sums + x.row, mask=x.i < x.m, other=0.0)
    weights = tl.exp2(exponents - grad_queries(lse, T))
    dweights = multiply(do, values, None, T)
    kept = weights
    if dropout.seed is not None:
        factor = kept_weights(dropout, x, block, config, T)
        kept = weights * factor
        dweights *= factor
    ds = weights * (dweights - grad_queries(sums, T))
    if terms.softcap is not None:
        t = s * (1 / (terms.softcap * _LOG2E))
        ds *= 1 - t * t
    return kept, ds


@kernel
def attention_backward_queries(
    q, k, v, r, out, lse, grad, grad_lse, saved, dq, dproducts, dedges,
    hidden, terms, dropout, config, heads, group, m, n, scale,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write dq without the relative term, and the gradients of that term's products, not scaled.

    Also write what the other kernels read: `Saved`, dproducts for the tiles that exist, and dedges
    (B, H, m, 2), the gradients of the products with the edge rows.
    """
    queries, x, bounds = _queries(q, r, m, n, heads, hidden, terms, config, ROWS)
    there = x.i < m
    do = load(grad, x.b, x.h, None, x.i, there, config.V_SIZE, config.V_WIDTH)
    results = load(out, x.b, x.h, None, x.i, there, config.V_SIZE, config.V_WIDTH)
    sums = tl.sum(do.to(tl.float32) * results.to(tl.float32), 1)
    if grad_lse is not None:
        sums -= tl.load(grad_lse + x.row, mask=there, other=0.0)
    total = tl.load(lse + x.row, mask=there, other=float("-inf"))
    total = tl.where(total == float("-inf"), float("inf"), total * _LOG2E)
    tl.store(saved.lse + x.row, total, mask=there)
    tl.store(saved.sums + x.row, sums, mask=there)
    if config.EDGE:
        tl.store(saved.low + x.row, x.low, mask=there)
        tl.store(saved.high + x.row, x.high, mask=there)
    basis = basis_of(terms, config)
    acc = tl.zeros((ROWS, config.WIDTH), tl.float32)
    low = tl.zeros((ROWS,), tl.float32)
    high = tl.zeros((ROWS,), tl.float32)
    for phase in tl.static_range(config.PHASES):
        if _LEVELS[phase] != _FAR or terms.basis is not None:
            for block in range(bounds[phase], bounds[phase + 1]):
                keys = load_keys(k, x.b, x.h // group, block, n, hidden, config, _LEVELS[phase])
                values = load_values(v, x.b, x.h // group, block, n, hidden, config, _LEVELS[phase])
                _, ds = _gradient(
                    queries, keys, values, do, total, sums, x, block, n, hidden, terms, basis,
                    dropout, scale, config, _LEVELS[phase], False,
                )  # fmt: skip
                rounded = ds.to(keys.dtype)
                acc = tl.dot(rounded, keys, acc, input_precision="ieee")
                if config.EDGE:
                    delta = x.position[:, None] - members(block, config.KEYS)[None, :]
                    low += tl.sum(tl.where(delta < terms.first, ds, 0.0), 1)
                    high += tl.sum(tl.where(delta > terms.last, ds, 0.0), 1)
                if terms.products is not None:
                    if _LEVELS[phase] >= _FAR and terms.basis is not None:
                        rows_of_far = tl.trans(basis.to(keys.dtype))
                        far = tl.dot(rounded, rows_of_far, input_precision="ieee")
                        at, exist = far_at(terms, x, block, config)
                        tl.store(dproducts + at, far.to(keys.dtype), mask=exist)
                    if _LEVELS[phase] == _FULL:
                        at, exist = near_at(terms, x, block, config)
                        tl.store(dproducts + at, rounded, mask=exist)
    store(dq, x.b, x.h, x.i, m, acc * scale, config.SIZE, config.WIDTH)
    if config.EDGE:
        tl.store(dedges + 2 * x.row, low, mask=there)
        tl.store(dedges + 2 * x.row + 1, high, mask=there)


@kernel
def attention_backward_keys(
    q, k, v, grad, saved, dk, dv,
    hidden, terms, dropout, config, heads, group, m, n, scale,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of KEYS keys, summed over the query heads of their key head."""
    key_blocks = tl.cdiv(n, config.KEYS)
    pair, block = tl.program_id(0) // key_blocks, tl.program_id(0) % key_blocks
    b, key_head = pair // (heads // group), pair % (heads // group)
    offset = offset_of(hidden, b, m, n)
    keys = load_keys(k, b, key_head, block, n, hidden, config, _FULL)
    values = load_values(v, b, key_head, block, n, hidden, config, _FULL)
    basis = basis_of(terms, config)
    dkeys = tl.zeros((config.KEYS, config.WIDTH), tl.float32)
    dvalues = tl.zeros((config.KEYS, config.V_WIDTH), tl.float32)
    bounds = query_phases(block, m, offset, hidden, terms, config, ROWS)
    for phase in tl.static_range(7 - config.PHASES, 7):
        if _LEVELS[phase] != _FAR or terms.basis is not None:
            # One loop over heads and blocks, because nested loops would need more registers.
            blocks = bounds[phase + 1] - bounds[phase]
            each = tl.maximum(blocks, 1)  # a pipelined loop divides before its first step, if any
            for step in range(group * blocks):
                h = key_head * group + step // each
                start = (bounds[phase] + step % each) * ROWS
                queries, do, x = _saved_queries(
                    q, grad, saved, b, h, start, m, heads, offset, config, ROWS, _LEVELS[phase]
                )
                kept, ds = _gradient(
                    queries, keys, values, do, saved.lse, saved.sums, x, block, n, hidden, terms,
                    basis, dropout, scale, config, _LEVELS[phase], True,
                )  # fmt: skip
                dvalues = tl.dot(kept.to(do.dtype), do, dvalues, input_precision="ieee")
                dkeys = tl.dot(ds.to(queries.dtype), queries, dkeys, input_precision="ieee")
    j = members(block, config.KEYS)
    store(dk, b, key_head, j, n, dkeys * scale, config.SIZE, config.WIDTH)
    store(dv, b, key_head, j, n, dvalues, config.V_SIZE, config.V_WIDTH)


@kernel
def attention_backward_bias(
    q, k, v, grad, saved, tiles,
    hidden, terms, dropout, config, heads, group, m, n, scale,
):  # fmt: skip
    """Write tiles (B, H, block diagonals, 64, 64): dS summed over each diagonal of blocks."""
    key_blocks, query_blocks = tl.cdiv(n, _BLOCK), tl.cdiv(m, _BLOCK)
    count = key_blocks + query_blocks - 1
    pair = tl.program_id(0) // count
    diagonal = tl.program_id(0) % count - (key_blocks - 1)
    b, h = pair // heads, pair % heads
    offset = offset_of(hidden, b, m, n)
    low = tl.maximum(diagonal, 0)
    high = tl.minimum(query_blocks, key_blocks + diagonal)
    if config.CAUSAL:
        high = tl.where((diagonal + 1) * _BLOCK - 1 + offset < 0, low, high)
    if hidden.window is not None:
        high = tl.where((diagonal - 1) * _BLOCK + 1 + offset >= hidden.window, low, high)
    basis = basis_of(terms, config)
    acc = tl.zeros((_BLOCK, _BLOCK), tl.float32)
    for query_block in range(low, high):
        block = query_block - diagonal
        queries, do, x = _saved_queries(
            q, grad, saved, b, h, query_block * _BLOCK, m, heads, offset, config, _BLOCK, _FULL
        )
        keys = load_keys(k, b, h // group, block, n, hidden, config, _FULL)
        values = load_values(v, b, h // group, block, n, hidden, config, _FULL)
        _, ds = _gradient(
            queries, keys, values, do, saved.lse, saved.sums, x, block, n, hidden, terms, basis,
            dropout, scale, config, _FULL, False,
        )  # fmt: skip
        acc += ds
    place = members(0)
    at = tiles + tl.program_id(0).to(tl.int64) * _BLOCK * _BLOCK
    tl.store(at + place[:, None] * _BLOCK + place[None, :], acc)


@kernel
def diagonal_sums(tiles, sums):
    """Write sums[..., u + 64], the sum of tiles[..., i, i - u] over i, for u from -64 to 63."""
    u = tl.arange(0, 2 * _BLOCK) - _BLOCK
    tile = tiles + tl.program_id(0).to(tl.int64) * _BLOCK * _BLOCK
    acc = tl.zeros((2 * _BLOCK,), tl.float32)
    for i in range(_BLOCK):
        j = i - u
        acc += tl.load(tile + i * _BLOCK + j, mask=(j >= 0) & (j < _BLOCK), other=0.0)
    tl.store(sums + tl.program_id(0).to(tl.int64) * 2 * _BLOCK + u + _BLOCK, acc)
