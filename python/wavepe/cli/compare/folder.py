"""The folder of one comparison: what is in it, and how it stays whole when the process dies.

    settings.json                    the settings it was begun with; others are refused
    results.json                     rewritten after each row
    checkpoints/NAME/                a trained model in Hugging Face format, plus training.json
    checkpoints/NAME-stepN/          one on the way, without it
    training/NAME.pt                 the model now in training
    perplexity.png, report.md, ...   written at the end

Whatever is written appears at once under its name: under another name first, then renamed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ..._files import leading_names, new_file, new_folder, part_of, writing
from ..errors import UsageError
from .settings import differences, digest

_SETTINGS = "settings.json"
_LOCK = ".lock"
_RESULTS = "results.json"
_LONGEST = 80  # characters of a spec in a name; file systems allow 255 bytes


class RunFolder:
    """Paths and atomic writes of one comparison's folder."""

    def __init__(self, path: Path, run: str = "") -> None:
        self.path = path
        self.results = path / _RESULTS
        self.picture = path / "perplexity.png"
        self.report = path / "report.md"
        self._settings = path / _SETTINGS
        self.lock: IO[str] | None = None  # while it is opened
        self.run = run  # names the settings, once the folder is opened

    @contextmanager
    def opened(self, manifest: dict[str, Any]) -> Iterator[None]:
        """Hold the folder for this process; UsageError if it cannot serve these settings."""
        self._check()
        try:
            with writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                lock = open(self.path / _LOCK, "a")  # noqa: SIM115 (held as long as the folder)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"--out {self.path}: needs a folder, and a file is there") from None
        except PermissionError as error:
            raise UsageError(f"--out {self.path}: {error.strerror}") from None
        self.run = digest(manifest)
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
            self.lock = lock
            yield

    def _check(self) -> None:
        """UsageError where it can be none of ours. What it holds stays as it is."""
        try:
            str(self.path).encode()
        except UnicodeEncodeError:  # safetensors opens no other
            raise UsageError(f"--out {self.path}: needs a name in UTF-8") from None
        known = self.read(self._settings)
        if (self.path / _LOCK).is_symlink() or _size(self.path / _LOCK):
            raise UsageError(f"--out {self.path}: its {_LOCK} is not of a comparison")
        if known is not None:
            if not (isinstance(known, dict) and {"encodings", "text_sha256"} <= known.keys()):
                raise UsageError(
                    f"--out {self.path}: its {_SETTINGS} is not of a comparison: give another --out"
                )
        elif self.path.is_dir():
            begun = (_LOCK, part_of(self._settings).name)  # killed before it had settings
            others = sorted(p.name for p in self.path.iterdir() if p.name not in begun)
            if others:
                raise UsageError(
                    f"--out {self.path} holds other files ({leading_names(others)}) and no "
                    "comparison: give a new or an empty folder"
                )

    def recorded(self, key: str, kind: type) -> Any:
        """One of the settings the folder was begun with; None where there is none of this kind."""
        known = self.read(self._settings)
        value = known.get(key) if isinstance(known, dict) else None
        return value if isinstance(value, kind) else None

    def checkpoint(self, name: str) -> Path:
        """Where the trained model `name` is, once it is finished."""
        return self.path / "checkpoints" / name

    def training(self, name: str) -> Path:
        """Where the state of `name`'s training is while it runs."""
        return self.path / "training" / f"{name}.pt"

    def trained(self, spec: str, seed: int) -> tuple[Path, dict[str, Any]] | None:
        """The finished model trained as `spec` with `seed` and its training.json, or None."""
        path = self.checkpoint(model_name(spec, seed))
        if not path.is_dir():
            return None
        facts = self.read(path / "training.json")
        facts = facts if isinstance(facts, dict) else {}
        ours = facts.get("run", self.run) == self.run and "seconds" in facts
        if (facts.get("spec"), facts.get("seed")) == (spec, seed) and ours:
            return path, facts
        says = f"{facts.get('spec')} with seed {facts.get('seed')}"
        raise UsageError(
            f"{path} should hold the model trained as {spec} with seed {seed}, and its "
            f"training.json says {says}{'' if ours else ', of another comparison'}: "
            "remove that folder, or give another --out"
        )

    def finish(self, name: str, save: Callable[[Path], None]) -> None:
        """Let `save` fill the folder of the trained model `name`, and drop its training state."""
        with new_folder(self.checkpoint(name)) as unfinished:
            save(unfinished)
        self.discard_training(name)

    def keep(self, name: str, save: Callable[[Path], None]) -> None:
        """Let `save` fill the checkpoint `name`, unless a process that was killed had done it."""
        if not self.checkpoint(name).is_dir():
            with new_folder(self.checkpoint(name)) as unfinished:
                save(unfinished)

    def kept(self, name: str) -> dict[int, Path]:
        """The checkpoints on the way to the trained model `name`, by their step."""
        found = self.path.glob(f"checkpoints/{glob.escape(name)}-step*")
        steps = {path.name.rpartition("-step")[2]: path for path in found}
        return {int(step): steps[step] for step in sorted(steps, key=int) if step.isdecimal()}

    def discard_training(self, name: str) -> None:
        """Drop the training state of a finished model."""
        state = self.training(name)
        part = part_of(state)  # of a process that was killed
        with writing(state, part):
            for path in (state, part):
                path.unlink(missing_ok=True)
            if state.parent.is_dir() and not any(state.parent.iterdir()):
                state.parent.rmdir()

    @staticmethod
    def read(path: Path) -> Any:
        """The JSON at `path`, or None if there is none."""
        try:
            return json.loads(path.read_text("utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"cannot read {path}: {error}") from None

    @staticmethod
    def write_json(path: Path, value: Any) -> None:
        """Write `value` to `path` at once."""
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        with new_file(path) as part:  # what is not UTF-8 in file names becomes an escape of JSON's
            part.write_text(text, "utf-8", "backslashreplace")


def is_run(names: Collection[str]) -> bool:
    """Whether a folder with files of these names holds a comparison, or a copy of one."""
    return _SETTINGS in names and (_LOCK in names or _RESULTS in names)


def model_name(spec: str, seed: int) -> str:
    """The folder of the model trained as `spec` with `seed`: no other spec's, and no longer than
    file systems allow.

    Readable parts joined by "-" tell the spec; else the beginning of its hash does.
    """
    name = re.sub("[^A-Za-z0-9._]+", "-", spec)[:_LONGEST]
    if len(spec) > _LONGEST or not re.fullmatch("[a-z0-9._]+([:=,][a-z0-9._]+)*", spec):
        name += "-" + hashlib.sha256(spec.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return f"{name}-seed{seed}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


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
