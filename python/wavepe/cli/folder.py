"""The folder of one comparison: what is in it, and how it stays whole when the process dies.

    settings.json                    the settings it was begun with; others are refused
    results.json                     rewritten after each row
    checkpoints/NAME/                a trained model in Hugging Face format, plus training.json
    training/NAME.pt                 the model now in training
    perplexity.png, table.md         written at the end

Whatever is written appears at once under its name: under another name first, then renamed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UsageError
from .settings import differences

# Together in a folder, they say that it is one of these.
RUN_FILES = frozenset({"settings.json", ".lock"})


class RunFolder:
    """Paths and atomic writes of one comparison's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = path / "results.json"
        self.picture = path / "perplexity.png"
        self.table = path / "table.md"
        self._settings = path / "settings.json"

    @contextmanager
    def opened(self, manifest: dict[str, Any]) -> Iterator[None]:
        """Hold the folder for this process; UsageError if it cannot serve these settings."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "w")  # noqa: SIM115 (held as long as the folder)
        except OSError as error:
            raise UsageError(f"--out {self.path}: {error.strerror}") from None
        with lock:
            _lock(lock, self.path)
            known = self.read(self._settings)
            if known is None:
                self.write_json(self._settings, manifest)
            elif known != manifest:
                raise UsageError(
                    f"--out {self.path} holds a comparison with other settings "
                    f"({differences(known, manifest)}): give another --out"
                )
            yield

    def recorded(self, key: str) -> Any:
        """One of the settings the folder was begun with, or None."""
        return (self.read(self._settings) or {}).get(key)

    def checkpoint(self, name: str) -> Path:
        """Where the trained model `name` is, once it is finished."""
        return self.path / "checkpoints" / name

    def training(self, name: str) -> Path:
        """Where the state of `name`'s training is while it runs."""
        return self.path / "training" / f"{name}.pt"

    def finish(self, name: str, save: Callable[[Path], None]) -> None:
        """Let `save` fill the folder of the trained model `name`, and drop its training state."""
        target = self.checkpoint(name)
        unfinished = target.with_name(f".{name}.part")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save(unfinished)
        os.rename(unfinished, target)
        self.discard_training(name)

    def discard_training(self, name: str) -> None:
        """Drop the training state of a finished model."""
        state = self.training(name)
        for path in (state, _unfinished(state)):
            path.unlink(missing_ok=True)
        if state.parent.is_dir() and not any(state.parent.iterdir()):
            state.parent.rmdir()

    @staticmethod
    def read(path: Path) -> Any:
        """The JSON at `path`, or None if there is none."""
        try:
            return json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {path}: {error}") from None

    @staticmethod
    def write_json(path: Path, value: Any) -> None:
        """Write `value` to `path` at once."""
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        write_at_once(path, lambda part: part.write_text(text, "utf-8"))


def write_at_once(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` with a path beside `path`, then give the file its name."""
    path.parent.mkdir(exist_ok=True)
    part = _unfinished(path)
    write(part)
    os.replace(part, path)


def _unfinished(path: Path) -> Path:
    """Where a file is written; the ending tells some writers its format."""
    return path.with_name(f".{path.name}.part{path.suffix}")


def model_name(spec: str, seed: int) -> str:
    """A folder name for the model trained as `spec` with `seed`."""
    return f"{re.sub('[^A-Za-z0-9._]+', '-', spec)}-seed{seed}"


def _lock(file: Any, path: Path) -> None:
    """One process a folder: two would overwrite each other's training. Ends with the process."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UsageError(f"--out {path}: another wavepe compare is at work there") from None
