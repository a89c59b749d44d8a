"""Errors that end an experiment or a command: a message, and the exit code of a command.

A message names an argument in backticks, `lengths`. The command line shows it as an option.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

from .runtime import command_for

MOST_THREADS = 1024  # with 20,000, OpenMP ends the process; 100,000 are a segmentation fault
# The messages of torch, NumPy and C++ for something too large; only MemoryError has its own type.
_SIZE = re.compile(r"(?:allocate|asked for) ([\d.]*\d)\.? (\w+)")
_TOO_LARGE = re.compile(
    rf"{_SIZE.pattern}|out of memory|multiplication overflow|std::bad_alloc"
    r"|Storage size calculation overflowed|array is too big|Maximum allowed dimension exceeded"
)


class CommandError(Exception):
    """An error that ends the command with its message on stderr."""

    code = 1


class UsageError(CommandError, ValueError):
    """A wrong argument, file or folder."""

    code = 2


class MissingPackage(CommandError, ImportError):
    """A package is not installed, or cannot be loaded."""


def thread_count(value: int) -> int:
    """Return `value`; UsageError if so many threads could crash the process."""
    if not 1 <= value <= MOST_THREADS:
        raise UsageError(f"`threads` {value}: needs 1 to {MOST_THREADS}")
    return value


def out_of_memory(error: BaseException) -> str | None:
    """Return the message for an exception that means too little memory; None for others."""
    text = str(error)
    if not (_TOO_LARGE.search(text) or isinstance(error, MemoryError)):
        return None
    size, shape = _SIZE.search(text), re.search(r"sizes=\[[^]]*\]", text)
    asked = f"{size[1]} {size[2]}" if size else shape and shape[0]
    where = " on the GPU" if "CUDA out of memory" in text else ""
    return f"out of memory{where}" + (f" (asked for {asked})" if asked else "")


def require(what: str, **parts: str) -> None:
    """Raise MissingPackage unless every module is installed; `parts` are module=extra."""
    missing = {name: extra for name, extra in parts.items() if find_spec(name) is None}
    if missing:
        extras = ",".join(sorted(set(missing.values())))
        raise MissingPackage(f"{what} needs {' and '.join(missing)}: {command_for(extras)}")


def need_matplotlib(what: str) -> None:
    """Raise MissingPackage if matplotlib is missing or cannot be loaded."""
    require(what, matplotlib="plot")
    try:
        import matplotlib.figure  # noqa: F401
    except ValueError as error:  # MPLBACKEND has a wrong value
        raise MissingPackage(f"matplotlib: {error}") from error
