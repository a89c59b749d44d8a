"""Describe the machine, and measure its copy bandwidth and sgemm rate."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import wavepe
from wavepe.experiments.environment import cpu_name, version_of

from .memory import Allocator
from .timing import Timing, take_turns

_HERE = Path(__file__).resolve().parent
# A results file is "dirty" if one of these differs from the commit.
_MEASURED = ("csrc", "python", "setup.py", "pyproject.toml", "benchmarks/*.py")
_BLAS = [
    f"{prefix}openblas_set_num_threads{suffix}"
    for prefix in ("scipy_", "")
    for suffix in ("64_", "")
]


def set_threads(count: int) -> bool:
    """Set the threads of torch and of NumPy's matrix products.

    Return False if NumPy's cannot be set. All other functions of NumPy, and wavepe's functions for
    NumPy, always use one thread.
    """
    torch.set_num_threads(count)
    is_set = False
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    for path in {line.split()[-1] for line in lines if "openblas" in line}:
        library = ctypes.CDLL(path)
        for name in _BLAS:
            if hasattr(library, name):
                getattr(library, name)(count)
                is_set = True
    return is_set


class Rates:
    """Copy bandwidth (read plus written bytes) and sgemm rate, sampled several times in a run."""

    def __init__(self, quick: bool):
        size = 1 << 18 if quick else max(1 << 25, min(1 << 27, last_level_cache()))
        self.buffer_bytes = 4 * size  # as many floats as the last-level cache has bytes
        self.order = 128 if quick else 1024
        self._source, self._target = torch.ones(size), torch.zeros(size)
        self._a, self._b = torch.randn(2, self.order, self.order)
        self._c = torch.empty(self.order, self.order)
        self._timings: dict[str, Timing] = {}

    def sample(self, allocator: Allocator) -> None:
        """Time the copy, the clone and the matrix product a few times."""
        allocator.enter("fresh")
        calls = {
            "copy": lambda: self._target.copy_(self._source),
            "clone": self._source.clone,
            "sgemm": lambda: torch.mm(self._a, self._b, out=self._c),
        }
        for key, timing in take_turns(calls, allocator=allocator, repeats=2).items():
            kept = self._timings.setdefault(key, Timing())
            kept.seconds += timing.seconds
            kept.faults += timing.faults

    def results(self) -> dict[str, Any]:
        """Return the rates of the median times, in bytes or operations per second."""
        work = {
            "copy": 2 * self.buffer_bytes,
            "clone": 2 * self.buffer_bytes,
            "sgemm": 2 * self.order**3,
        }
        return {
            key: {"rate": work[key] / timing.median, "seconds": timing.summary()}
            for key, timing in self._timings.items()
        } | {"buffer_bytes": self.buffer_bytes, "sgemm_order": self.order}


def last_level_cache() -> int:
    """Return the bytes of the first processor's largest cache, or 0 if they are unknown."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes)


def commit() -> dict[str, Any]:
    """Return the commit of these files, and whether the measured code differs from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=_HERE, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        # If they are installed in a .venv inside another repository, they are not part of that.
        tracked = git("ls-files", "--error-unmatch", "bench.py")
    except OSError:  # git is missing
        tracked = ""
    if not tracked:
        return {"commit": None, "dirty": None}
    paths = [f":(top){path}" for path in _MEASURED]
    changed = git("status", "--porcelain", "--", *paths)
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}


def surroundings(*packages: str) -> dict[str, Any]:
    """Return the machine, date, commit and the packages' versions, ready for JSON."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **commit(),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "load_average": list(os.getloadavg()),
        "variant": wavepe.variant(),
        **{name: version_of(name) for name in packages},
    }


def facts(threads: int, blas: bool, allocator: Allocator) -> dict[str, Any]:
    """Return all that `bench` records about its environment, ready for JSON."""
    build = wavepe.build_info()
    return {
        **surroundings("wavepe", "torch", "numpy", "transformers"),
        "variants": wavepe.variants(),
        "last_level_cache": last_level_cache(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "allocator_controlled": allocator.control,
        "compiler": build["compiler"],
        "flags": build.get("flags"),
        "threads": threads,
        "numpy_threads": threads if blas else None,
        "python": sys.version.split()[0],
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
