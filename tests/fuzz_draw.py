"""Draw sizes around the kernels' blocks, memory layouts, NaN and Inf, for random calls.

`described` describes a call in one line.
"""

import numpy as np
from cases import LAYOUTS, lay_out

# Rows of a group, lanes and panels, queries of a block, keys of a tile.
BLOCKS = (6, 8, 16, 32, 96, 192)
LANES = (4, 8, 16, 32, 64)
# Values that no argument takes.
NONSENSE = (None, "x", object(), 1j, {}, b"1", np.array("x"), np.array([None, 1]))


def pick(rng, *choices):
    return choices[rng.integers(len(choices))]


def chance(rng, probability):
    return rng.random() < probability


def near(rng, blocks, most, terms=3):
    """Draw a sum of multiples of blocks, or a neighbour of it; it is at most `most`."""
    total = int(rng.integers(-1, 2))
    for _ in range(rng.integers(1, terms + 1)):
        total += pick(rng, *blocks) * int(rng.integers(1, 4))
    return min(max(total, 0), most)


def length(rng, most=420):
    """Draw a number of queries, keys or rows: a tenth are below 25, many are where blocks meet."""
    how = rng.random()
    if how < 0.1:
        return int(rng.integers(0, min(25, most) + 1))
    return int(rng.integers(0, most + 1)) if how < 0.4 else near(rng, BLOCKS, most)


def width(rng, most=130):
    """Draw a head size: mostly near a few lanes, seldom more than 40."""
    if chance(rng, 0.3):
        return int(rng.integers(0, 21))
    return near(rng, LANES[:3], 40, 2) if chance(rng, 0.8) else near(rng, LANES, most)


def leading(rng, most, each):
    """Up to two axes before the last ones, now and then empty; at most `most` elements where one
    entry of them holds `each`."""
    lead = []
    for size in rng.integers(0 if chance(rng, 0.1) else 1, 4, rng.integers(3)):
        lead.append(min(int(size), max(1, most // max(each, 1))))
        each *= max(lead[-1], 1)
    return tuple(lead)


def trailing(rng, axes):
    """Draw some of the last axes, for an array that broadcasts with one that has them all."""
    return axes[int(rng.integers(0, len(axes) + 1)) :]


def some_layout(rng, array):
    return lay_out(array, pick(rng, *LAYOUTS)) if array.ndim else array


def spoil_rows(rng, array, value):
    """Write NaN or Inf into one row, or a few that follow one another, of a random head."""
    if not array.size:
        return
    rows = array.reshape(-1, *array.shape[-2:]) if array.ndim > 1 else array[None, :, None]
    head, row = int(rng.integers(len(rows))), int(rng.integers(rows.shape[1]))
    count = pick(rng, 1, 1, 1, 3, 40)
    column = slice(None) if chance(rng, 0.3) else int(rng.integers(rows.shape[2]))
    rows[head, row : row + count, column] = value


def strided(rng, t):
    """Return a tensor's values with other strides.

    They come from transposed storage, steps, a slice, an offset, or a repeated entry (stride 0).
    """
    if not t.numel() or not t.dim():
        return t
    how, axis = rng.integers(8), int(rng.integers(t.dim()))
    if how == 0:
        return t.transpose(axis, -1).contiguous().transpose(axis, -1)
    if how == 1:
        return t.repeat_interleave(3, axis).unfold(axis, 1, 3).squeeze(-1)
    if how == 2:
        wide = t.new_zeros([n + 5 if a == axis else n for a, n in enumerate(t.shape)])
        return wide.narrow(axis, 2, t.shape[axis]).copy_(t)
    if how == 3:
        return t.new_zeros(t.numel() + 3)[3:].view(t.shape).copy_(t)
    if how == 4:
        return t.narrow(axis, 0, 1).expand(t.shape)
    return t


def described(value):
    """Describe an argument: type, shape and strides of arrays; small ones are shown whole."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(described(x) for x in value)}]"
    if isinstance(value, type):
        return value.__name__
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return repr(value)
    if 0 < np.prod(value.shape) <= 4:
        return f"{value.tolist()} {value.dtype}"
    strides = value.strides if isinstance(value, np.ndarray) else value.stride()
    integers = "int" in str(value.dtype) and np.prod(value.shape)
    runs = f", runs {run_lengths(value)}" if integers else ""
    return f"{value.dtype}{tuple(value.shape)} strides {tuple(strides)}{runs}"


def run_lengths(ids, most=8):
    """Describe the first row of integers by runs, value*count."""
    row = np.asarray(ids).reshape(-1, ids.shape[-1])[0]
    starts = np.flatnonzero(np.r_[True, row[1:] != row[:-1]])
    counts = np.diff(np.r_[starts, len(row)])
    runs = [f"{row[s]}*{n}" for s, n in zip(starts[:most], counts, strict=False)]
    return " ".join(runs) + (" ..." if len(starts) > most else "")
