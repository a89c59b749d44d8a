"""Errors that end a command: a message on stderr and an exit code."""

from __future__ import annotations

import importlib.util
import re
import threading

from .._runtime import command_for

# The OpenMP runtime keeps all threads on one stack, and crashes with too many: 20,000 end the
# process, 100,000 are a segmentation fault. No machine that we know gains from more than this.
MOST_THREADS = 1024
# The messages of torch and NumPy for something too large; only MemoryError has its own type.
_SIZE = re.compile(r"allocate ([\d.]*\d)\.? (\w+)")
_TOO_LARGE = re.compile(
    rf"{_SIZE.pattern}|out of memory|integer multiplication overflow"
    r"|Storage size calculation overflowed|array is too big|Maximum allowed dimension exceeded"
)


class CommandError(Exception):
    """An error that ends the command with its message on stderr."""

    code = 1


class UsageError(CommandError):
    """A wrong argument, file or folder."""

    code = 2


def thread_count(option: str, value: int) -> int:
    """Return `value`; UsageError if this process cannot start so many threads."""
    if not 1 <= value <= MOST_THREADS:
        raise UsageError(f"{option} {value}: needs 1 to {MOST_THREADS}")
    started = _start_threads(value)
    if started < value:
        raise UsageError(f"{option} {value}: this process can start at most {started} threads")
    return value


def _start_threads(count: int) -> int:
    """Return how many of `count` threads start. OpenMP would end the process if one did not."""
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(count)]
    started = 0
    try:
        for thread in threads:
            thread.start()
            started += 1
    except (RuntimeError, MemoryError):  # can't start new thread
        pass
    finally:
        end.set()
    for thread in threads[:started]:
        thread.join()
    return started


def out_of_memory(error: BaseException) -> str | None:
    """Return the message for an exception that means too little memory; None for others."""
    text = str(error)
    if not (_TOO_LARGE.search(text) or isinstance(error, MemoryError)):
        return None
    size = _SIZE.search(text)
    where = " on the GPU" if "CUDA out of memory" in text else ""
    return f"out of memory{where}" + (f" (asked for {size[1]} {size[2]})" if size else "")


def require(command: str, **parts: str) -> None:
    """Raise CommandError unless every module is installed; `parts` are module=extra."""
    missing = {name: extra for name, extra in parts.items() if not _found(name)}
    if missing:
        extras = ",".join(sorted(set(missing.values())))
        raise CommandError(f"{command} needs {' and '.join(missing)}: {command_for(extras)}")


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec, such as a fake one in tests
        return False
