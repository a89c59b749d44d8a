"""The zones of a constant table for the GPU, and the zones that need few numbers for each query.

Keys come in blocks of 64. For a query at position t, zone z is the block whose keys have the deltas
``64 z + t % 64 - j`` for j = 0..63. If the table is smooth there, its rows as functions of j span a
small space. One basis of that space serves all smooth zones. It follows from the table's values.
"""

from __future__ import annotations

import numpy as np

BLOCK = 64  # keys of a tile, and distance of two zones
RANKS = (8, 16)
_LONGEST = 1 << 14  # rows; for longer tables the search takes minutes
_TRIALS = 12  # attempts; each one adds a zone on each side to the rough ones


def zone_range(first: int, last: int) -> tuple[int, int]:
    """Return the first and the last zone that hold a delta of first..last."""
    return first // BLOCK, -(-last // BLOCK)


def block_zones(
    p: np.ndarray, first: int, tolerance: float
) -> tuple[int, np.ndarray, np.ndarray] | None:
    """Return the low-rank zones at both ends of the table p (w, d), or None if none saves work.

    - left: the number of these zones before the other zones. The rest of them come after.
    - far (64, zones, rank, d): ``far[t % 64, zone]`` times a query at position t gives the query's
      numbers in that zone.
    - basis (rank, 64), orthonormal: ``basis.T @ far[t % 64, zone]`` are the zone's rows of p, up to
      `tolerance` in every entry.
    """
    if len(p) > _LONGEST:
        return None
    tiles = _tiles(p, first)
    best = None
    for rank in RANKS:
        ends = _smooth_ends(tiles, rank, tolerance)
        if ends is None:
            continue
        left, near, basis = ends
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
    """Return (zones, 64 keys j, 64 remainders t, d): p at delta 64 zone + t - j, 0 outside."""
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
    """Return the number of zones before the rough ones, the number of rough ones, and the basis.

    The basis of the others does not give rough zones. Return None if all zones are rough.
    """
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
        # From the rough zones outwards: the next rough ones are mostly their neighbours.
        sides = range(left)[::-1], range(zones - right, zones)
        rough = [any(not _fits(tiles[z], basis, tolerance) for z in side) for side in sides]
        if not any(rough):
            return left, zones - left - right, basis
        left, right = left - rough[0], right - rough[1]
    return None


def _flat(tile: np.ndarray) -> np.ndarray:
    return tile.reshape(BLOCK, -1)


def _fits(tile: np.ndarray, basis: np.ndarray, tolerance: float) -> bool:
    flat = _flat(tile)
    return bool(np.abs(flat - basis.T @ (basis @ flat)).max() <= tolerance)
