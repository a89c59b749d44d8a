"""The folder of one comparison: its files, which stay complete if the process dies.

    settings.json                    the settings; only encodings and seeds may be added to them
    results.json                     rewritten after each row
    checkpoints/NAME/                a trained model in Hugging Face format, and training.json
    checkpoints/NAME-stepN/          a checkpoint during training, without training.json
    training/NAME.pt                 the state of a training that is not finished
    perplexity.png, report.md, ...   written at the end

Each file and folder is written under another name first, and then renamed. So it is never partial.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..common.errors import UsageError
from ..common.files import leading_names, new_file, new_folder, part_of, writing

_SETTINGS = "settings.json"
_LOCK = ".lock"
_RESULTS = "results.json"
_LONGEST = 80  # the most characters of a spec in a name; file systems allow 255 bytes


class RunFolder:
    """Paths and atomic writes of one comparison's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = path / _RESULTS
        self.report = path / "report.md"
        self._settings = path / _SETTINGS
        # Once the folder is opened: the digest of its first settings, and the files that lock it
        self.run, self.held = "", tuple[int, ...]()

    @contextmanager
    def opened(self, manifest: dict[str, Any]) -> Iterator[None]:
        """Lock the folder for this process; UsageError if it belongs to other settings.

        A manifest with more encodings or more seeds replaces the one that the folder holds.
        """
        self._check()
        try:
            with writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                lock = open(self.path / _LOCK, "a")  # noqa: SIM115 (closed below)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"--out {self.path}: needs a folder, but this is a file") from None
        except PermissionError as error:
            raise UsageError(f"--out {self.path}: {error.strerror}") from None
        with lock:
            _lock(lock, self.path)
            found = self.read(self._settings) or manifest
            known = {key: value for key, value in found.items() if key != "run"}
            self.run = found.get("run", digest(known))
            if not _grown(known, manifest):
                raise UsageError(
                    f"--out {self.path} holds a comparison with other settings "
                    f"({differences(known, manifest)}): give another --out"
                )
            first = {"run": self.run} if self.run != digest(manifest) else {}
            if known != manifest or not self._settings.exists():
                self.write_json(self._settings, {**manifest, **first})
            self.held = (lock.fileno(),)
            yield

    def _check(self) -> None:
        """Raise UsageError if the folder cannot be that of a comparison; change nothing in it."""
        try:
            str(self.path).encode()
        except UnicodeEncodeError:  # safetensors needs names in UTF-8
            raise UsageError(f"--out {self.path}: needs a name in UTF-8") from None
        known = self.read(self._settings)
        if (self.path / _LOCK).is_symlink() or _size(self.path / _LOCK):
            raise UsageError(
                f"--out {self.path}: its {_LOCK} is not of a comparison: give another --out"
            )
        if known is not None:
            if not (isinstance(known, dict) and {"encodings", "text_sha256"} <= known.keys()):
                raise UsageError(
                    f"--out {self.path}: its {_SETTINGS} is not of a comparison: give another --out"
                )
        elif self.path.is_dir():
            begun = (_LOCK, part_of(self._settings).name)  # a run killed at once leaves these
            others = sorted(p.name for p in self.path.iterdir() if p.name not in begun)
            if others:
                raise UsageError(
                    f"--out {self.path} holds no comparison but other files "
                    f"({leading_names(others)}): give a new or an empty folder"
                )

    def recorded(self, key: str, kind: type) -> Any:
        """Return a setting of the folder; None if it is missing or of another type."""
        known = self.read(self._settings)
        value = known.get(key) if isinstance(known, dict) else None
        return value if isinstance(value, kind) else None

    def checkpoint(self, name: str) -> Path:
        """Return the folder of the trained model `name`; it exists when the model is finished."""
        return self.path / "checkpoints" / name

    def training(self, name: str) -> Path:
        """Return the file for the training state of `name`."""
        return self.path / "training" / f"{name}.pt"

    def trained(self, spec: str, seed: int) -> tuple[Path, dict[str, Any]] | None:
        """Return the finished model of `spec` and `seed`, and its training.json; else None."""
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
            f"{path} should hold the model trained as {spec} with seed {seed}, but its "
            f"training.json says {says}{'' if ours else ', of another comparison'}: "
            "remove that folder, or give another --out"
        )

    def finish(self, name: str, save: Callable[[Path], None]) -> None:
        """Save the trained model `name` with `save(folder)`, and delete its training state."""
        with new_folder(self.checkpoint(name)) as unfinished:
            save(unfinished)
        self.discard_training(name)

    def keep(self, name: str, save: Callable[[Path], None]) -> None:
        """Save the checkpoint `name` with `save(folder)`, unless a killed process has done so."""
        if not self.checkpoint(name).is_dir():
            with new_folder(self.checkpoint(name)) as unfinished:
                save(unfinished)

    def kept(self, name: str) -> dict[int, Path]:
        """Return the kept checkpoints of the training `name`: step -> folder."""
        found = self.path.glob(f"checkpoints/{glob.escape(name)}-step*")
        steps = {path.name.rpartition("-step")[2]: path for path in found}
        return {int(step): steps[step] for step in sorted(steps, key=int) if step.isdecimal()}

    def discard_training(self, name: str) -> None:
        """Delete the training state of a finished model."""
        state = self.training(name)
        part = part_of(state)  # a killed process may have left it
        with writing(state, part):
            for path in (state, part):
                path.unlink(missing_ok=True)
            if state.parent.is_dir() and not any(state.parent.iterdir()):
                state.parent.rmdir()

    @staticmethod
    def read(path: Path) -> Any:
        """Return the content of the JSON file `path`; None if there is no such file."""
        try:
            return json.loads(path.read_text("utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"cannot read {path}: {error}") from None

    @staticmethod
    def write_json(path: Path, value: Any) -> None:
        """Write `value` to `path` as JSON."""
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        with new_file(path) as part:  # file names may not be UTF-8: such bytes become JSON escapes
            part.write_text(text, "utf-8", "backslashreplace")


def _grown(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether `new` has the settings of `old`, or more encodings or more seeds besides."""
    grown = dict(old)
    grown.update({key: new.get(key) for key in ("encodings", "seeds") if key in old})
    return (
        grown == new
        and set(old["encodings"]) <= set(new["encodings"])
        and old.get("seeds", 0) <= new.get("seeds", 0)
    )


def is_run(names: Collection[str]) -> bool:
    """Return whether a folder with files of these names is that of a comparison, or a copy."""
    return _SETTINGS in names and (_LOCK in names or _RESULTS in names)


def model_name(spec: str, seed: int) -> str:
    """Return the folder name of the model trained as `spec` with `seed`.

    It is unique for each spec, and short enough for file systems. It consists of readable parts of
    the spec, joined by "-". If they are not enough to tell specs apart, a hash follows.
    """
    name = re.sub("[^A-Za-z0-9._]+", "-", spec)[:_LONGEST]
    if len(spec) > _LONGEST or not re.fullmatch("[a-z0-9._]+([:=,][a-z0-9._]+)*", spec):
        name += "-" + hashlib.sha256(spec.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return f"{name}-seed{seed}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lock(file: Any, path: Path) -> None:
    """Lock the folder until this process ends; two would overwrite each other's files."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UsageError(
            f"--out {path}: another wavepe compare is using this folder; wait for it, or give "
            "another --out"
        ) from None


def digest(manifest: dict[str, Any]) -> str:
    """Return eight hexadecimal digits that identify a manifest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:8]


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return a text with the settings in which two manifests differ."""
    words = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            words.append(f"{key} {_plain(old.get(key))} there, {_plain(new.get(key))} here")
    return "; ".join(words)


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def results_of_adapt(folder: Path) -> dict[str, Any] | None:
    """Return what `adapt` has written to the results.json in a folder; None if it did not."""
    try:
        found = json.loads((folder / "results.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    settings = found.get("settings") if isinstance(found, dict) else None
    return found if isinstance(settings, dict) and "recipe" in settings else None
