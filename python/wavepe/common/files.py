"""Write files and folders under a temporary name, and rename them when they are complete."""

from __future__ import annotations

import _thread
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

# They end a process by default, but a handler can catch them.
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_received: list[int] = []
_NAMES_IN_MESSAGE = 4
BUSY = "another process is writing there"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Give a temporary path of the same suffix; without an error it replaces `target`."""
    part = part_of(target)
    try:
        with writing(target, part):
            target.parent.mkdir(exist_ok=True)
            part.unlink(missing_ok=True)  # a link would lead to another file
            yield part
            os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def part_of(target: Path) -> Path:
    """Return the temporary path of `new_file`; a killed process leaves a file there."""
    return target.with_name(f".{target.name}.part{target.suffix}")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder beside `target` to fill; at the end it is renamed to `target`.

    It is removed after an error, SIGTERM or SIGHUP. OSError if another process is writing there.
    """
    new_parents = [parent for parent in target.parents if not parent.exists()]
    part = target.with_name(f".{target.name}.part")
    with interrupt_on_signals(), writing(target, part):
        try:
            if part.is_symlink():  # it leads to the files of another folder
                part.unlink()
            with locked(part):
                try:
                    for path in part.iterdir():  # what a killed process has left
                        is_folder = path.is_dir() and not path.is_symlink()
                        shutil.rmtree(path) if is_folder else path.unlink()
                    yield part
                    if target.exists():
                        shutil.copymode(target, part)
                    os.rename(part, target)
                except BaseException:
                    shutil.rmtree(part, ignore_errors=True)
                    raise
        except BaseException:
            for parent in new_parents:
                with suppress(OSError):
                    parent.rmdir()
            raise


@contextmanager
def locked(folder: Path, busy: str = BUSY) -> Iterator[int]:
    """Make the folder, and yield its lock; OSError, which says `busy`, if another has it."""
    try:
        with writing(folder):
            lock = _lock(folder, busy)
    except KeyboardInterrupt:
        with suppress(OSError):
            folder.rmdir()
        raise
    try:
        yield lock
    finally:
        os.close(lock)


def _lock(folder: Path, busy: str) -> int:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise OSError(errno.EBUSY, busy, str(folder)) from error
        except OSError:  # a file system without locks
            return lock
        # The process that held the lock may have renamed or removed the folder: then try again.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), folder.stat()):
                return lock
        os.close(lock)


@contextmanager
def writing(target: Path, part: Path | None = None) -> Iterator[None]:
    """Turn an exception for a failed write into an OSError that names the target.

    torch and safetensors raise their own exceptions in place of the system's error. `target` is the
    file or folder as the user named it, and `part` the temporary path that is written.
    """
    part = target if part is None else part
    try:
        yield
    except Exception as error:
        cause = _system_error(error)
        if cause is None:
            raise
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        name = cause.filename2 or cause.filename
        name = str(target) if name is None else os.fsdecode(name)
        if name.startswith(str(part)):
            name = f"{target}{name[len(str(part)) :]}"
        elif Path(name) not in (target, *target.parents):
            raise  # the error is about another file, which was read
        raise OSError(cause.errno, cause.strerror, name) from error


def _system_error(error: BaseException | None) -> OSError | KeyboardInterrupt | None:
    """Return the system's error: `error` itself, a code in its text, or one that it replaced."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return error
        if isinstance(error, OSError) and error.errno is not None:
            return error
        if match := re.search(r"\(os error (\d+)\)", str(error)):  # the form of Rust's messages
            return OSError(int(match[1]), os.strerror(int(match[1])))
        error = None if error.__suppress_context__ else error.__context__
    return None


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP inside, and end the process at the end.

    So unfinished files are removed first. A signal that is ignored, or that has another handler,
    stays as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    caught = [n for n in TERMINATION_SIGNALS if signal.getsignal(n) is signal.SIG_DFL]
    for number in caught:
        signal.signal(number, raise_interrupt)
    hook = sys.unraisablehook

    def repeat(lost: sys.UnraisableHookArgs) -> None:
        """Send a signal again that came in a finalizer, where Python drops all exceptions."""
        if lost.exc_type is KeyboardInterrupt:
            number = _received.pop() if _received else signal.SIGINT
            _thread.start_new_thread(_send, (number,))  # here it would be lost, too
        else:
            hook(lost)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
        if caught and _received:
            signal.raise_signal(_received.pop())


def _send(number: int) -> None:
    time.sleep(0.01)
    os.kill(os.getpid(), number)


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt for the first signal: the handler of `interrupt_on_signals`."""
    if not _received:
        _received.append(number)
        raise KeyboardInterrupt


def leads_out(folder: Path, name: str | Path) -> bool:
    """Return whether symbolic links lead from a name in a folder to a file outside of it.

    In the Hub's cache, the links of a snapshot lead to the blobs of its repository. A ".git" may
    hold passwords, so it counts as outside.
    """
    root, named = folder.resolve(), folder.absolute()  # either may be in the Hub's cache
    paths = [root, *root.parents, named, *named.parents]
    snapshots = [path for path in paths if path.match("models--*/snapshots/*")]
    places = [root, *(path.parents[1].resolve() / "blobs" for path in snapshots)]
    path = (root / name).resolve()
    return ".git" in path.parts or not any(map(path.is_relative_to, places))


def inside(folder: Path, name: str) -> Path:
    """Return the resolved path of a name in a folder; ValueError if it `leads_out`."""
    path = (folder / name).resolve()
    if leads_out(folder, path):  # such a file may be private
        raise ValueError(
            f"{folder / name} is a symbolic link that leads out of the folder: if its file belongs "
            "to the model, replace the link by a copy"
        )
    return path


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file; ValueError if the file `leads_out` or holds none."""
    text = inside(folder, name).read_bytes()
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(f"got {type(value).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / name} holds no JSON object: {error}") from error
    return value


def write_object(path: Path, value: dict[str, Any]) -> None:
    """Write an object as JSON, in the form of transformers' `save_pretrained`."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")


def leading_names(names: Sequence[str]) -> str:
    """Return the first names as text, and how many more there are."""
    more = len(names) - _NAMES_IN_MESSAGE
    return ", ".join(names[:_NAMES_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")
