"""Errors that end an experiment or a command: a message, and the exit code of a command."""

from __future__ import annotations

import importlib.util
import re

from .runtime import command_for

# The OpenMP runtime keeps all threads on one stack, and crashes with too many: 20,000 end the
# process, 100,000 are a segmentation fault. No machine that we know gains from more than this.
MOST_THREADS = 1024
# The messages of torch and NumPy for something too large; only MemoryError has its own type.
_SIZE = re.compile(r"allocate ([\d.]*\d)\.? (\w+)")
_TOO_LARGE = re.compile(
    rf"{_SIZE.pattern}|out of memory|integer multiplication overflow"
    r"|Storage size calculation overflowed|array is too big|Maximum allowed dimension exceeded"
)
_OPTION = re.compile(r"(?<!\S)--(?=[a-z])([a-z-]+)")


class CommandError(Exception):
    """An error that ends the command with its message on stderr.

    `message` names options as on the command line. `str` names them as the arguments of a function.
    """

    code = 1

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return _OPTION.sub(lambda match: match[1].replace("-", "_"), self.message)


class UsageError(CommandError, ValueError):
    """A wrong argument, file or folder."""

    code = 2


def thread_count(option: str, value: int) -> int:
    """Return `value`; UsageError if so many threads could crash the process."""
    if not 1 <= value <= MOST_THREADS:
        raise UsageError(f"{option} {value}: needs 1 to {MOST_THREADS}")
    return value


def out_of_memory(error: BaseException) -> str | None:
    """Return the message for an exception that means too little memory; None for others."""
    text = str(error)
    if not (_TOO_LARGE.search(text) or isinstance(error, MemoryError)):
        return None
    size = _SIZE.search(text)
    where = " on the GPU" if "CUDA out of memory" in text else ""
    return f"out of memory{where}" + (f" (asked for {size[1]} {size[2]})" if size else "")


def require(what: str, **parts: str) -> None:
    """Raise CommandError unless every module is installed; `parts` are module=extra."""
    missing = {name: extra for name, extra in parts.items() if not _found(name)}
    if missing:
        extras = ",".join(sorted(set(missing.values())))
        raise CommandError(f"{what} needs {' and '.join(missing)}: {command_for(extras)}")


def need_matplotlib(what: str) -> None:
    """Raise CommandError if matplotlib is missing or cannot be loaded."""
    require(what, matplotlib="plot")
    try:
        import matplotlib.figure  # noqa: F401
    except ValueError as error:  # MPLBACKEND has a wrong value
        raise CommandError(f"matplotlib: {error}") from error


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec, such as a fake one in tests
        return False
