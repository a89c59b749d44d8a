"""The zones of a constant table for the GPU: which are smooth enough for a few numbers a query.

Keys come in blocks of 64, and zone z of a query at position t is the block whose keys have deltas
``64 z + t % 64 - j`` for j = 0..63. As functions of j, the rows of a smooth table span a small
space there. One basis of it serves all smooth zones. It is taken from the table's values.
"""

from __future__ import annotations

import numpy as np

BLOCK = 64  # keys a tile, and deltas a zone
RANKS = (8, 16)
_LONGEST = 1 << 14  # rows; the search in longer tables takes minutes
_TRIALS = 12  # zones that are left out of the basis, one after the other on each side


def zone_range(first: int, last: int) -> tuple[int, int]:
    """The first and the last zone that hold a delta of first..last."""
    return first // BLOCK, -(-last // BLOCK)


def block_zones(
    p: np.ndarray, first: int, tolerance: float
) -> tuple[int, np.ndarray, np.ndarray] | None:
    """The low-rank zones at both ends of the table p (w, d), whose row 0 has delta `first`.

    Returns
    -------
    left : int
        How many of these zones lie before the others; the rest lie behind.
    far : (64, zones, rank, d)
        ``far[t % 64, zone]`` times a query are the numbers of the query in that zone.
    basis : (rank, 64)
        Orthonormal rows. ``basis.T @ far[t % 64, zone]`` are the zone's rows of p, within
        `tolerance` in every entry.

    None where no zone saves work.
    """
    if len(p) > _LONGEST:
        return None
    tiles = _tiles(p, first)
    best = None
    for rank in RANKS:
        found = _smooth_ends(tiles, rank, tolerance)
        if found is None:
            continue
        left, near, basis = found
        columns = near * BLOCK + (len(tiles) - near) * rank
        if best is None or columns < best[0]:
            best = columns, left, near, basis
    if best is None:
        return None
    _, left, near, basis = best
    smooth = [*tiles[:left], *tiles[left + near :]]
    far = np.stack([basis @ _flat(tile) for tile in smooth])  # (zones, rank, 64 d)
    far = far.reshape(*far.shape[:2], BLOCK, -1).transpose(2, 0, 1, 3)
    return left, np.ascontiguousarray(far), basis


def _tiles(p: np.ndarray, first: int) -> np.ndarray:
    """(zones, 64 keys j, 64 remainders t, d): p at delta 64 zone + t - j, 0 outside."""
    last = first + len(p) - 1
    lowest, highest = zone_range(first, last)
    start = lowest * BLOCK - (BLOCK - 1)
    padded = np.zeros(((highest - lowest + 2) * BLOCK - 1, p.shape[1]))
    padded[first - start : last + 1 - start] = p
    row, column = padded.strides
    shape = (highest - lowest + 1, BLOCK, BLOCK, p.shape[1])
    strides = (BLOCK * row, -row, row, column)
    return np.lib.stride_tricks.as_strided(padded[BLOCK - 1 :], shape, strides, writeable=False)


def _smooth_ends(
    tiles: np.ndarray, rank: int, tolerance: float
) -> tuple[int, int, np.ndarray] | None:
    """How many zones lie left of the rough ones, how many are rough, and the others' basis."""
    zones = len(tiles)
    peak = int(np.argmax([np.abs(_flat(tile)).max() for tile in tiles]))
    left, right = peak, zones - peak - 1
    gram = np.stack([flat @ flat.T for flat in map(_flat, tiles)])
    for _ in range(_TRIALS):
        smooth = [*range(left), *range(zones - right, zones)]
        if not smooth:
            return None
        _, vectors = np.linalg.eigh(gram[smooth].sum(0))
        basis = np.ascontiguousarray(vectors[:, : -rank - 1 : -1].T)
        rough = [z for z in smooth if not _fits(tiles[z], basis, tolerance)]
        if not rough:
            return left, zones - left - right, basis
        # the roughest lie beside those that are rough already
        left -= any(z < left for z in rough)
        right -= any(z >= zones - right for z in rough)
    return None


def _flat(tile: np.ndarray) -> np.ndarray:
    return tile.reshape(BLOCK, -1)


def _fits(tile: np.ndarray, basis: np.ndarray, tolerance: float) -> bool:
    flat = _flat(tile)
    return bool(np.abs(flat - basis.T @ (basis @ flat)).max() <= tolerance)
