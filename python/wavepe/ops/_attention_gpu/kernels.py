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
    load_keys,
    members,
    more_weights,
    multiply,
    near_at,
    offset_of,
    scores,
    store,
    visible,
)


@triton.jit
def _queries(q, r, b, h, i, m, heads, offset, terms, config, MASKED: tl.constexpr):
    """Return rows of q, and their `Queries`."""
    rows = load(q, b, h, i, m, config.SIZE, config.WIDTH, MASKED)
    low = tl.zeros((i.shape[0],), tl.float32)
    high = low
    if config.EDGE:
        first, last = edge_rows(terms, h, config.P_SIZE, config.P_WIDTH)
        if r.ptr is None:
            relative = rows
        else:
            relative = load(r, b, h, i, m, config.P_SIZE, config.P_WIDTH, MASKED)
        low = tl.sum(relative.to(tl.float32) * first[None, :], 1)
        high = tl.sum(relative.to(tl.float32) * last[None, :], 1)
    row = (b.to(tl.int64) * heads + h) * m + i
    return rows, Queries(b, h, i, m, i + offset, row, low, high)


@triton.jit
def _query_block(m, heads, ROWS: tl.constexpr):
    """Return batch, head and queries of a program. The last queries start first: they see most."""
    blocks = tl.cdiv(m, ROWS)
    pair = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks
    return pair // heads, pair % heads, tl.arange(0, ROWS) + block * ROWS


@triton.jit
def _key_bounds(i, m, n, offset, hidden, terms, config):
    last = tl.minimum(tl.max(i, 0), m - 1)
    return key_phases(tl.min(i, 0) + offset, last + offset, n, hidden, terms, config)


# ---- forward ------------------------------------------------------------------------------------


@kernel
def attention_forward(
    q, k, v, r, out, lse, hidden, terms, dropout, config, heads, group, m, n, scale,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write out (B, H, m, dv) and lse (B, H, m); a program has ROWS queries of one head."""
    b, h, i = _query_block(m, heads, ROWS)
    offset = offset_of(hidden, b, m, n)
    queries, x = _queries(q, r, b, h, i, m, heads, offset, terms, config, True)
    acc = tl.zeros((ROWS, config.V_WIDTH), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    if terms.sinks is not None:
        peak = tl.maximum(peak, tl.load(terms.sinks + h))
    total = tl.where(peak == float("-inf"), 0.0, 1.0)
    bounds = _key_bounds(i, m, n, offset, hidden, terms, config)
    for phase in tl.static_range(config.PHASES):
        if _LEVELS[phase] != _FAR or terms.basis is not None:
            for block in range(bounds[phase], bounds[phase + 1]):
                keys = load_keys(
                    k, b, h // group, block, n, hidden, config.SIZE, config.WIDTH, _LEVELS[phase]
                )
                s = scores(queries, keys, x, block, terms, scale, config, _LEVELS[phase], False)
                seen = visible(x, block, n, hidden, config, _LEVELS[phase], False)
                s = tl.where(seen, s, float("-inf"))
                weights, shrink, peak, total = more_weights(s, peak, total)
                if dropout.seed is not None:
                    weights *= kept_weights(dropout, x, block, False)
                values = load_keys(
                    v, b, h // group, block, n, hidden, config.V_SIZE, config.V_WIDTH,
                    _LEVELS[phase],
                )  # fmt: skip
                acc = acc * shrink[:, None]
                acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    total, new_lse = divisor_and_lse(peak, total)
    store(out, b, h, i, m, acc / total[:, None], config.V_SIZE, config.V_WIDTH)
    tl.store(lse + x.row, new_lse, i < m)


# ---- backward -----------------------------------------------------------------------------------


@triton.jit
def _gradient(
    queries, keys, values, do, lse, sums, x, block, n, hidden, terms, dropout, scale, config,
    LEVEL: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Return tiles of weights after dropout, and of dS = P (dO v^T - sums) before softcap."""
    s = scores(queries, keys, x, block, terms, scale, config, LEVEL, T)
    seen = visible(x, block, n, hidden, config, LEVEL, T)
    # A query that sees no key has the lse -inf: +inf in its place makes its weights 0.
    total = tl.load(lse + x.row, mask=x.i < x.m, other=float("-inf"))
    total = grad_queries(tl.where(total == float("-inf"), float("inf"), total), T)
    weights = tl.exp2((tl.where(seen, s, float("-inf")) - total) * _LOG2E)
    dweights = multiply(do, values, None, T)
    kept = weights
    if dropout.seed is not None:
        factor = kept_weights(dropout, x, block, T)
        kept = weights * factor
        dweights *= factor
    ds = weights * (dweights - grad_queries(sums, T))
    if terms.softcap is not None:
        t = s / terms.softcap
        ds *= 1 - t * t
    return kept, ds


@kernel
def attention_backward_queries(
    q, k, v, r, out, lse, grad, grad_lse, sums, dq, dproducts, dedges,
    hidden, terms, dropout, config, heads, group, m, n, scale,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write dq without the relative term, and the gradients of that term's products, not scaled.

    Also write sums (B, H, m) = dO . out - d lse, which the other kernels read, dproducts for the
    tiles that exist, and dedges (B, H, m, 2), the gradients of the products with the edge rows.
    """
    b, h, i = _query_block(m, heads, ROWS)
    offset = offset_of(hidden, b, m, n)
    queries, x = _queries(q, r, b, h, i, m, heads, offset, terms, config, True)
    do = load(grad, b, h, i, m, config.V_SIZE, config.V_WIDTH, True)
    results = load(out, b, h, i, m, config.V_SIZE, config.V_WIDTH, True)
    row_sums = tl.sum(do.to(tl.float32) * results.to(tl.float32), 1)
    if grad_lse is not None:
        row_sums -= tl.load(grad_lse + x.row, mask=i < m, other=0.0)
    tl.store(sums + x.row, row_sums, mask=i < m)
    acc = tl.zeros((ROWS, config.WIDTH), tl.float32)
    low = tl.zeros((ROWS,), tl.float32)
    high = tl.zeros((ROWS,), tl.float32)
    bounds = _key_bounds(i, m, n, offset, hidden, terms, config)
    for phase in tl.static_range(config.PHASES):
        if _LEVELS[phase] != _FAR or terms.basis is not None:
            for block in range(bounds[phase], bounds[phase + 1]):
                keys = load_keys(
                    k, b, h // group, block, n, hidden, config.SIZE, config.WIDTH, _LEVELS[phase]
                )
                values = load_keys(
                    v, b, h // group, block, n, hidden, config.V_SIZE, config.V_WIDTH,
                    _LEVELS[phase],
                )  # fmt: skip
                _, ds = _gradient(
                    queries, keys, values, do, lse, row_sums, x, block, n, hidden, terms, dropout,
                    scale, config, _LEVELS[phase], False,
                )  # fmt: skip
                rounded = ds.to(keys.dtype)
                acc = tl.dot(rounded, keys, acc, input_precision="ieee")
                if config.EDGE:
                    delta = x.position[:, None] - members(block)[None, :]
                    low += tl.sum(tl.where(delta < terms.first, ds, 0.0), 1)
                    high += tl.sum(tl.where(delta > terms.last, ds, 0.0), 1)
                if terms.products is not None:
                    if _LEVELS[phase] >= _FAR and terms.basis is not None:
                        basis = basis_of(terms, config).to(keys.dtype)
                        far = tl.dot(rounded, tl.trans(basis), input_precision="ieee")
                        at, there = far_at(terms, x, block, config)
                        tl.store(dproducts + at, far.to(keys.dtype), mask=there)
                    if _LEVELS[phase] == _FULL:
                        at, there = near_at(terms, x, block)
                        tl.store(dproducts + at, rounded, mask=there)
    store(dq, b, h, i, m, acc * scale, config.SIZE, config.WIDTH)
    if config.EDGE:
        tl.store(dedges + 2 * x.row, low, mask=i < m)
        tl.store(dedges + 2 * x.row + 1, high, mask=i < m)


@kernel
def attention_backward_keys(
    q, k, v, r, lse, grad, sums, dk, dv,
    hidden, terms, dropout, config, heads, group, m, n, scale,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of 64 keys, summed over the query heads of their key head."""
    key_blocks = tl.cdiv(n, _BLOCK)
    pair, block = tl.program_id(0) // key_blocks, tl.program_id(0) % key_blocks
    b, key_head = pair // (heads // group), pair % (heads // group)
    offset = offset_of(hidden, b, m, n)
    keys = load_keys(k, b, key_head, block, n, hidden, config.SIZE, config.WIDTH, _FULL)
    values = load_keys(v, b, key_head, block, n, hidden, config.V_SIZE, config.V_WIDTH, _FULL)
    dkeys = tl.zeros((_BLOCK, config.WIDTH), tl.float32)
    dvalues = tl.zeros((_BLOCK, config.V_WIDTH), tl.float32)
    bounds = query_phases(block, m, offset, hidden, terms, config, ROWS)
    for phase in tl.static_range(7 - config.PHASES, 7):
        if _LEVELS[phase] != _FAR or terms.basis is not None:
            # One loop over heads and blocks, because nested loops would need more registers.
            blocks = bounds[phase + 1] - bounds[phase]
            each = tl.maximum(blocks, 1)  # a pipelined loop divides before its first step, if any
            for step in range(group * blocks):
                h = key_head * group + step // each
                i = tl.arange(0, ROWS) + (bounds[phase] + step % each) * ROWS
                queries, x = _queries(
                    q, r, b, h, i, m, heads, offset, terms, config,
                    _LEVELS[phase] == _FULL,
                )  # fmt: skip
                do = load(grad, b, h, i, m, config.V_SIZE, config.V_WIDTH, _LEVELS[phase] == _FULL)
                row_sums = tl.load(sums + x.row, mask=i < m, other=0.0)
                kept, ds = _gradient(
                    queries, keys, values, do, lse, row_sums, x, block, n, hidden, terms, dropout,
                    scale, config, _LEVELS[phase], True,
                )  # fmt: skip
                dvalues = tl.dot(kept.to(do.dtype), do, dvalues, input_precision="ieee")
                dkeys = tl.dot(ds.to(queries.dtype), queries, dkeys, input_precision="ieee")
    store(dk, b, key_head, members(block), n, dkeys * scale, config.SIZE, config.WIDTH)
    store(dv, b, key_head, members(block), n, dvalues, config.V_SIZE, config.V_WIDTH)


@kernel
def attention_backward_bias(
    q, k, v, r, lse, grad, sums, tiles,
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
    acc = tl.zeros((_BLOCK, _BLOCK), tl.float32)
    for query_block in range(low, high):
        block = query_block - diagonal
        i = members(query_block)
        queries, x = _queries(q, r, b, h, i, m, heads, offset, terms, config, True)
        do = load(grad, b, h, i, m, config.V_SIZE, config.V_WIDTH, True)
        keys = load_keys(k, b, h // group, block, n, hidden, config.SIZE, config.WIDTH, _FULL)
        values = load_keys(v, b, h // group, block, n, hidden, config.V_SIZE, config.V_WIDTH, _FULL)
        row_sums = tl.load(sums + x.row, mask=i < m, other=0.0)
        _, ds = _gradient(
            queries, keys, values, do, lse, row_sums, x, block, n, hidden, terms, dropout, scale,
            config, _FULL, False,
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
