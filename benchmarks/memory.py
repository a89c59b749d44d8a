"""Give wavepe and its rivals the same kind of memory for results: fresh or warm.

The memory of the result decides much of a memory-bound operator's time. If its pages are new, the
kernel must find and zero them, which takes about as long as the operator itself. Whether they are
new depends on earlier calls, because glibc's malloc adapts: a block above its mmap threshold comes
from the kernel and goes back to it, but each block that is freed raises the threshold, up to
32 MiB. So a result of 40 MiB is always fresh, and one of 8 MiB is fresh only the first time. This
module makes each situation on purpose:

fresh    malloc has its threshold at the maximum, 32 MiB, as in a process that has run for long.
         Before each timed call all free memory goes back to the kernel, so every page of the result
         is new. The call may still reuse its own temporaries that are below the threshold, as it
         would without a benchmark.
warm     malloc keeps all memory. Results are freed before the next call, which so gets mapped
         pages.
in place as warm; the result is in the memory of the input.

NumPy asks for huge pages (madvise) for its large arrays, and torch does not. The request stays with
the addresses, also when malloc gives them to another caller. So if the system grants huge pages on
request only, the requests are withdrawn before each fresh call. Warm memory needs no requests.

The page faults of each call are counted and kept in the results file. Other C libraries than glibc
cannot be controlled in this way; then `control` is False.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SITUATIONS = ("fresh", "warm", "in place")
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # malloc.h
_MADV_NOHUGEPAGE = 15  # sys/mman.h
_PR_SET_THP_DISABLE = 41  # sys/prctl.h
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MIB = 1 << 20


class Allocator:
    """Set malloc's options, for the rest of the process."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self.control = hasattr(self._libc, "mallopt") and hasattr(self._libc, "malloc_trim")
        self._on_request = _HUGE_PAGES.exists() and "[madvise]" in _HUGE_PAGES.read_text()
        self._fresh = False

    def enter(self, situation: str) -> None:
        """Set malloc's options for one of SITUATIONS."""
        if situation not in SITUATIONS:
            raise ValueError(f"situation must be one of {SITUATIONS}, got {situation!r}")
        self._fresh = situation == "fresh"
        if not self.control:
            return
        if self._fresh:
            settings = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * _MIB, _TRIM_THRESHOLD: 64 * _MIB}
        else:
            settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1}  # never trim
        for name, value in settings.items():
            self._libc.mallopt(name, value)
        self._libc.malloc_trim(0)
        if self._on_request:
            zero = ctypes.c_ulong(0)
            disabled = ctypes.c_ulong(not self._fresh)
            self._libc.prctl(_PR_SET_THP_DISABLE, disabled, zero, zero, zero)

    def leave(self) -> None:
        """Allow huge pages again. malloc keeps a threshold of 32 MiB and does not adapt again."""
        self.enter("fresh")
        self._fresh = False

    def before_call(self) -> None:
        """Prepare memory before each timed call; this must not be timed."""
        if self._fresh and self.control:
            self._libc.malloc_trim(0)
            if self._on_request:
                self._withdraw_requests()

    def _withdraw_requests(self) -> None:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith("[heap]"):
                begin, end = (int(word, 16) for word in line.split()[0].split("-"))
                size = ctypes.c_size_t(end - begin)
                self._libc.madvise(ctypes.c_void_p(begin), size, _MADV_NOHUGEPAGE)


@contextmanager
def prepared(threads: int) -> Iterator[None]:
    """Set torch's threads, and let malloc keep memory that is freed."""
    before, allocator = torch.get_num_threads(), Allocator()
    try:
        torch.set_num_threads(threads)
        allocator.enter("warm")
        yield
    finally:
        torch.set_num_threads(before)
        allocator.leave()


def page_faults() -> int:
    """Return how many pages this process has got so far without reading from a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
