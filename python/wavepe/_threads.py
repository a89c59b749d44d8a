"""Threads of the NumPy side: a call is cut in pieces along one axis. One thread unless asked."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from . import _checks

# Elements of a piece at least: starting a thread takes as long as rotating half of this.
PIECE = 1 << 18

_count = 1


def set_num_threads(n: int) -> None:
    """Let NumPy functions on large arrays use up to n threads; the default is 1.

    Counts for `rope`, `rope_table`, `wavelet_table`, `relative_bias` and `attention`, in the whole
    process. The results are the same bits for any n. The torch operators use torch's own threads
    (`torch.set_num_threads`).

    Parameters
    ----------
    n : int
        At least 1.
    """
    global _count
    _count = _checks.integer("n", n, 1)


def cut(size: int, elements: int) -> list[slice]:
    """Slices that cover 0..size, one a thread, where the `elements` in all are worth it."""
    pieces = max(1, min(_count, size, elements // PIECE))
    edges = [size * i // pieces for i in range(pieces + 1)]
    return list(map(slice, edges, edges[1:]))


def run(call: Callable[[slice], object], pieces: list[slice]) -> None:
    """`call` on each piece, side by side; no piece may write what another reads."""
    if len(pieces) == 1:
        call(pieces[0])
        return
    with ThreadPoolExecutor(len(pieces)) as pool:  # not kept: a fork would inherit it dead
        started = []
        for piece in pieces:
            try:
                started.append(pool.submit(call, piece))
            except RuntimeError:  # no more threads, as at the interpreter's end
                call(piece)
        for future in started:
            future.result()
