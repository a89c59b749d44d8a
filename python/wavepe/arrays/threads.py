"""Threads of the NumPy functions: a call is cut into pieces along one axis."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..common import checks

# Least elements of a piece. Starting a thread takes as long as rotating half as many.
LEAST_ELEMENTS = 1 << 18

_count = 1


def set_num_threads(n: int) -> None:
    """Set how many threads the NumPy functions may use; the default is 1.

    The setting holds for the whole process. `rope`, `rope_table`, `wavelet_table`,
    `relative_bias` and `attention` read it, and use threads for large arrays only. Results are
    bitwise equal for every n. The torch operators use torch's own threads
    (`torch.set_num_threads`).

    Parameters
    ----------
    n : int
        Largest number of threads of a call. TypeError unless it is an integer, ValueError below 1.
    """
    global _count
    _count = checks.integer("n", n, 1)


def get_num_threads() -> int:
    """Return how many threads the NumPy functions may use, as `set_num_threads` set it."""
    return _count


def cut(size: int, elements: int) -> list[slice]:
    """Return slices that cover range(size), one for each thread; one for few `elements`."""
    pieces = max(1, min(_count, size, elements // LEAST_ELEMENTS))
    edges = [size * i // pieces for i in range(pieces + 1)]
    return list(map(slice, edges, edges[1:]))


def run(call: Callable[[slice], object], pieces: list[slice]) -> None:
    """Call `call` on every piece, in parallel. No piece may write what another piece reads."""
    if len(pieces) == 1:
        call(pieces[0])
        return
    # A pool for each call: a forked process would inherit a kept pool without its threads.
    with ThreadPoolExecutor(len(pieces)) as pool:
        list(pool.map(call, pieces))
