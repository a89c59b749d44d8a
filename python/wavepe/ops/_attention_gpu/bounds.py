"""Fused attention on a GPU: which blocks of a program need masks, which a table, which neither."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import _BLOCK, clamp, floor_div


@triton.jit
def key_phases(first, last, n, hidden, terms, how):
    """Eight bounds b0..b7 of key blocks, for queries at positions first..last.

    b0..b1 and b6..b7 meet the edges of what is visible, b3..b4 near zones: these tiles need
    everything. b2..b3 and b4..b5 hold far zones, b1..b2 and b5..b6 no table at all. With four
    phases, the fourth is all that comes after b3.
    """
    low, high = 0, tl.cdiv(n, _BLOCK)
    whole_low, whole_high = 0, n // _BLOCK
    if how.CAUSAL:
        high = tl.minimum(high, floor_div(last, _BLOCK) + 1)
        whole_high = tl.minimum(whole_high, floor_div(first + 1, _BLOCK))
    if hidden.window is not None:
        low = tl.maximum(low, floor_div(first - hidden.window + 1, _BLOCK))
        whole_low = tl.maximum(whole_low, floor_div(last - hidden.window, _BLOCK) + 1)
    high = tl.maximum(high, low)
    b6 = clamp(whole_high, low, high)
    b1 = clamp(whole_low, low, b6)
    if terms.products is None:
        b2, b3, b4, b5 = b6, b6, b6, b6
    else:
        at_first, at_last = floor_div(first, _BLOCK) + 1, floor_div(last, _BLOCK) + 1
        near_last = terms.near_first + terms.near
        b2 = clamp(at_first - near_last - terms.right, b1, b6)
        b3 = clamp(at_first - near_last, b2, b6)
        b4 = clamp(at_last - terms.near_first, b3, b6)
        b5 = clamp(at_last - terms.near_first + terms.left, b4, b6)
    if how.PHASES == 4:
        b4 = high
    return low, b1, b2, b3, b4, b5, b6, high


@triton.jit
def query_phases(block, m, offset, hidden, terms, how, ROWS: tl.constexpr):
    """The same of blocks of ROWS queries, for the keys of one block; four phases are the last."""
    first = block * _BLOCK - offset  # the query at the first key's position
    low, high = 0, tl.cdiv(m, ROWS)
    whole_low, whole_high = 0, m // ROWS
    if how.CAUSAL:
        low = tl.maximum(low, floor_div(first, ROWS))
        whole_low = tl.maximum(whole_low, floor_div(first + _BLOCK - 1 + ROWS - 1, ROWS))
    if hidden.window is not None:
        end = first + hidden.window
        high = tl.minimum(high, floor_div(end + _BLOCK - 2, ROWS) + 1)
        whole_high = tl.minimum(whole_high, floor_div(end, ROWS))
    high = tl.maximum(high, low)
    b6 = clamp(whole_high, low, high)
    b1 = clamp(whole_low, low, b6)
    if terms.products is None:
        b2, b3, b4, b5 = b1, b1, b1, b1
    else:
        near = first + terms.near_first * _BLOCK
        behind = near + terms.near * _BLOCK + ROWS - 1
        b2 = clamp(floor_div(near - terms.left * _BLOCK, ROWS), b1, b6)
        b3 = clamp(floor_div(near, ROWS), b2, b6)
        b4 = clamp(floor_div(behind, ROWS), b3, b6)
        b5 = clamp(floor_div(behind + terms.right * _BLOCK, ROWS), b4, b6)
    if how.PHASES == 4:
        b3 = low
    return low, b1, b2, b3, b4, b5, b6, high
