"""Files and folders that appear whole under their names, whatever ends the process meanwhile."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

try:
    import fcntl
except ImportError:  # not on this system: nothing is locked
    fcntl = None  # type: ignore[assignment]

# What ends a process by default, and can be met with Python's `finally`. Ctrl-C raises by itself.
ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_received: list[int] = []
_SHOWN = 4  # names in a message
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A path to write, beside `target`, which it replaces at the end; removed if that fails.

    Its ending is the target's, which tells some writers the format.
    """
    part = part_of(target)
    try:
        with writing(target, part):
            target.parent.mkdir(exist_ok=True)
            yield part
            os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def part_of(target: Path) -> Path:
    """Where `new_file` writes, which a killed process leaves."""
    return target.with_name(f".{target.name}.part{target.suffix}")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, beside `target`, which it becomes at the end; removed if that fails.

    SIGTERM and SIGHUP remove it, too. What a killed process left is emptied and used. Where another
    process is at work there, OSError.
    """
    made = [parent for parent in target.parents if not parent.exists()]
    part = target.with_name(f".{target.name}.part")
    with unwinding(), writing(target, part):
        try:
            with _held(part):
                try:
                    yield part
                    if target.exists():
                        shutil.copymode(target, part)
                    os.rename(part, target)
                except BaseException:
                    with _undisturbed():
                        shutil.rmtree(part, ignore_errors=True)
                    raise
        except BaseException:
            with _undisturbed():
                for parent in made:
                    with suppress(OSError):
                        parent.rmdir()
            raise


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Make the folder, or empty it, and lock it for this process, with which the lock ends."""
    try:
        lock = _lock(folder)
    except KeyboardInterrupt:
        with suppress(OSError):
            folder.rmdir()
        raise
    try:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Make the folder where it is not there, and lock it: a descriptor, None without locks."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        if fcntl is None:
            return None
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise OSError(errno.EBUSY, "another process is writing there", str(folder)) from error
        except OSError:  # a file system without locks
            return lock
        with suppress(FileNotFoundError):  # renamed or removed by its former owner meanwhile
            if os.path.samestat(os.fstat(lock), folder.stat()):
                return lock
        os.close(lock)


@contextmanager
def writing(target: Path, part: Path | None = None) -> Iterator[None]:
    """Within, an exception for a write that failed becomes an OSError that names target and disk.

    torch and safetensors hide the system's error in exceptions of their own. `part` is where the
    target is written.
    """
    part = target if part is None else part
    try:
        yield
    except Exception as error:
        said = _said(error)
        if said is None:
            raise
        if isinstance(said, KeyboardInterrupt):
            raise said from None
        name = said.filename2 or said.filename
        name = str(target) if name is None else os.fsdecode(name)
        if name.startswith(str(part)):
            name = f"{target}{name[len(str(part)) :]}"
        elif Path(name) not in (target, *target.parents):
            raise  # of another file, which was read
        reason = said.strerror
        if said.errno in OF_THE_DISK:
            reason = f"{os.strerror(said.errno)} (the disk at {_disk(target)})"
        raise OSError(said.errno, reason, name) from error


def _said(error: BaseException | None) -> OSError | KeyboardInterrupt | None:
    """What the system said: the error itself, in its text, or what it hides."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        if isinstance(error, KeyboardInterrupt):
            return error
        if found := re.search(r"\(os error (\d+)\)", str(error)):  # as Rust writes it
            return OSError(int(found[1]), os.strerror(int(found[1])))
        error = None if error.__suppress_context__ else error.__context__
    return None


def _disk(path: Path) -> Path:
    """Where the file system of `path` is mounted."""
    there = (parent for parent in path.absolute().parents if parent.exists())
    return next(parent for parent in there if parent.is_mount() or parent == Path(parent.root))


@contextmanager
def unwinding() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise KeyboardInterrupt; at the end the process dies of them.

    So what is half done is removed. Signals that are ignored or another's affair are left alone.
    """
    mine = threading.current_thread() is threading.main_thread()
    caught = [n for n in ENDING if mine and signal.getsignal(n) is signal.SIG_DFL]
    for number in caught:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
        if caught and _received:
            signal.raise_signal(_received.pop())


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Within, Ctrl-C is ignored: a second one must not leave what the first one left to remove."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def unwind(number: int, frame: FrameType | None) -> None:
    """The handler of `unwinding`."""
    if not _received:
        _received.append(number)
        raise KeyboardInterrupt


def some(names: Sequence[str]) -> str:
    """The first of the names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
