"""Fused attention on a GPU: which blocks of a program need masks, a table, both or neither."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import _BLOCK, clamp, floor_div


@triton.jit
def key_phases(first, last, n, hidden, terms, config):
    """Return eight bounds b0..b7 of ranges of blocks of KEYS, for queries at positions first..last.

    - b0..b1 and b6..b7 hold the edge of the visible keys, b3..b4 hold near zones: level _FULL.
    - b2..b3 and b4..b5 hold far zones: level _FAR.
    - b1..b2 and b5..b6 lie outside the table: level _PLAIN.

    With four phases, the fourth range holds all blocks from b3 on.
    """
    low, high = 0, tl.cdiv(n, config.KEYS)
    whole_low, whole_high = 0, n // config.KEYS
    if config.CAUSAL:
        high = tl.minimum(high, floor_div(last, config.KEYS) + 1)
        whole_high = tl.minimum(whole_high, floor_div(first + 1, config.KEYS))
    if hidden.window is not None:
        low = tl.maximum(low, floor_div(first - hidden.window + 1, config.KEYS))
        whole_low = tl.maximum(whole_low, floor_div(last - hidden.window, config.KEYS) + 1)
    high = tl.maximum(high, low)
    b6 = clamp(whole_high, low, high)
    b1 = clamp(whole_low, low, b6)
    if terms.products is None:
        b2, b3, b4, b5 = b6, b6, b6, b6
    else:
        # In blocks of 64 first. A block of KEYS that has one in near zones counts as near.
        at_first, at_last = floor_div(first, _BLOCK) + 1, floor_div(last, _BLOCK) + 1
        near_end = terms.near_first + terms.near_count
        EACH: tl.constexpr = config.KEYS // _BLOCK
        at_last += EACH - 1
        b2 = clamp(floor_div(at_first - near_end - terms.right_count, EACH), b1, b6)
        b3 = clamp(floor_div(at_first - near_end, EACH), b2, b6)
        b4 = clamp(floor_div(at_last - terms.near_first, EACH), b3, b6)
        b5 = clamp(floor_div(at_last - terms.near_first + terms.left_count, EACH), b4, b6)
    if config.PHASES == 4:
        b4 = high
    return low, b1, b2, b3, b4, b5, b6, high


@triton.jit
def query_phases(block, m, offset, hidden, terms, config, ROWS: tl.constexpr):
    """Return the bounds of ranges of blocks of ROWS queries, for one block of KEYS.

    The levels are those of `key_phases`. With four phases, the last four ranges are used, and the
    fourth from the end holds all blocks up to b4.
    """
    first = block * config.KEYS - offset  # the query at the first key's position
    low, high = 0, tl.cdiv(m, ROWS)
    whole_low, whole_high = 0, m // ROWS
    if config.CAUSAL:
        low = tl.maximum(low, floor_div(first, ROWS))
        whole_low = tl.maximum(whole_low, floor_div(first + config.KEYS - 1 + ROWS - 1, ROWS))
    if hidden.window is not None:
        end = first + hidden.window
        high = tl.minimum(high, floor_div(end + config.KEYS - 2, ROWS) + 1)
        whole_high = tl.minimum(whole_high, floor_div(end, ROWS))
    high = tl.maximum(high, low)
    b6 = clamp(whole_high, low, high)
    b1 = clamp(whole_low, low, b6)
    if terms.products is None:
        b2, b3, b4, b5 = b1, b1, b1, b1
    else:
        near = first + terms.near_first * _BLOCK
        behind = near + terms.near_count * _BLOCK + (config.KEYS - _BLOCK) + ROWS - 1
        b2 = clamp(floor_div(near - terms.left_count * _BLOCK, ROWS), b1, b6)
        b3 = clamp(floor_div(near, ROWS), b2, b6)
        b4 = clamp(floor_div(behind, ROWS), b3, b6)
        b5 = clamp(floor_div(behind + terms.right_count * _BLOCK, ROWS), b4, b6)
    if config.PHASES == 4:
        b3 = low
    return low, b1, b2, b3, b4, b5, b6, high
