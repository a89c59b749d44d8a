"""Fresh or warm memory for results, the same for wavepe and its rivals.

Where a result lands decides much of a memory-bound operator's time: pages that the kernel must
first find and zero cost about as much as the operator itself. Which of the two a call meets depends
on what ran before it, because glibc's malloc adapts: a block above its mmap threshold comes from
the kernel and goes back to it, but each block freed raises the threshold, up to 32 MiB. So a 40 MiB
result is always fresh, an 8 MiB one only the first time. Here both situations are made on purpose:

fresh    malloc as a long-running process has it (threshold at its maximum, 32 MiB), and before each
         timed call all free memory is handed back to the kernel: every page of the result is new.
         Temporaries smaller than the threshold may still be reused within the call, as they are in
         real life.
warm     malloc keeps what it once had. Results are dropped before the next call, so that it finds
         mapped pages.
in place as warm; the result lies in the input.

Huge pages: NumPy asks for them (madvise) for its large arrays, torch does not, and what NumPy asked
for stays with the addresses when malloc gives them to somebody else. Where the system grants huge
pages on request only, the requests of others are therefore taken back before each fresh call, and
in warm memory nobody has any.

The page faults of each call are counted, so that the results file shows what was met. Other C
libraries than glibc do as they like; `control` says so.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

SITUATIONS = ("fresh", "warm", "in place")
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # malloc.h
_MADV_NOHUGEPAGE = 15  # sys/mman.h
_PR_SET_THP_DISABLE = 41  # sys/prctl.h
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MIB = 1 << 20


class Allocator:
    """malloc's settings, for the rest of the process."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self.control = hasattr(self._libc, "mallopt") and hasattr(self._libc, "malloc_trim")
        self._on_request = _HUGE_PAGES.exists() and "[madvise]" in _HUGE_PAGES.read_text()
        self._fresh = False

    def enter(self, situation: str) -> None:
        """Make one of SITUATIONS."""
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
        """Huge pages as they were; malloc adapts no more, but behaves as if it had."""
        self.enter("fresh")
        self._fresh = False

    def before_call(self) -> None:
        """To be called before each timed call, outside of the timing."""
        if self._fresh and self.control:
            self._libc.malloc_trim(0)
            if self._on_request:
                self._take_back_requests()

    def _take_back_requests(self) -> None:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith("[heap]"):
                begin, end = (int(word, 16) for word in line.split()[0].split("-"))
                size = ctypes.c_size_t(end - begin)
                self._libc.madvise(ctypes.c_void_p(begin), size, _MADV_NOHUGEPAGE)


def page_faults() -> int:
    """Pages this process has been given so far without reading from a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
