"""The folder of a run: one process at a time works in it, and its settings stay the same.

A comparison's folder:
    settings.json                    the settings; only encodings and seeds may be added to them
    results.json                     rewritten after each row
    checkpoints/NAME/                a trained model in Hugging Face format, and training.json
    checkpoints/NAME-stepN/          a checkpoint during training, without training.json
    training/NAME.pt                 the state of a training that is not finished

An adaptation's folder:
    results.json                     the settings, and the figures so far
    checkpoints/NAME/checkpoint-N/   until the new model is written beside them
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..common.errors import UsageError
from ..common.files import (
    DISK_ERRORS,
    leading_names,
    locked,
    new_file,
    new_folder,
    part_of,
    writing,
)  # fmt: skip

RESULTS = "results.json"
_SETTINGS = "settings.json"
_LONGEST = 80  # the most characters of a spec in a name; file systems allow 255 bytes


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if there is no such file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as JSON."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with new_file(path) as part:  # file names may not be UTF-8: such bytes become JSON escapes
        part.write_text(text, "utf-8", "backslashreplace")


def refuse_changes(
    folder: Path, kind: str, before: Mapping[str, Any], now: Mapping[str, Any], advice: str = ""
) -> None:
    """Raise UsageError if a setting differs."""
    differences = "; ".join(
        f"{key} {_shown(before.get(key))} there, {_shown(now.get(key))} here"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    )
    if differences:
        raise UsageError(
            f"{folder} holds {kind} with other settings ({differences}): give another folder"
            + advice
        )


def _shown(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = re.sub("^[0-9a-f]{64}$", lambda digest: f"sha256:{digest[0][:16]}", text)
    return "not given" if value in (None, []) else text


def _dict_of(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that holds a dict; an empty one for other files."""
    with suppress(UsageError):
        if isinstance(content := read_json(path), dict):
            return content
    return {}


def results_of_adapt(folder: Path) -> dict[str, Any] | None:
    """Return what `adapt` has written to the results.json in a folder; None if it did not."""
    settings = (results := _dict_of(folder / RESULTS)).get("settings")
    return results if isinstance(settings, dict) and "recipe" in settings else None


def check_adaptation(folder: Path) -> dict[str, Any] | None:
    """Return the results in the folder, None in a new one; UsageError if others wrote there."""
    if folder.is_file():
        raise UsageError(f"{folder} is a file: give a folder")
    results = results_of_adapt(folder)
    for name in (RESULTS, "config.json") if results is None else ():
        if (folder / name).exists():
            raise UsageError(f"adapt did not write {folder / name}: give another folder")
    return results


def settings_of_comparison(folder: Path) -> dict[str, Any] | None:
    """Return the settings.json of a comparison, or of a copy of one; None for other folders."""
    settings = _dict_of(folder / _SETTINGS)
    return settings if {"encodings", "text_sha256"} <= settings.keys() else None


class ComparisonFolder:
    """Paths and atomic writes of one comparison's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = path / RESULTS
        self._settings = path / _SETTINGS
        # Once the folder is opened: the digest of its first settings, and the file that locks it
        self.run, self.lock = "", -1

    def elsewhere(self) -> ComparisonFolder:
        """Return the folder as other processes see it, wherever they run."""
        folder = ComparisonFolder(self.path.absolute())
        folder.run = self.run
        return folder

    @contextmanager
    def opened(self, manifest: dict[str, Any]) -> Iterator[None]:
        """Lock the folder for this process; UsageError if it belongs to other settings.

        A manifest with more encodings or more seeds replaces the one that the folder holds.
        """
        self._check()
        with ExitStack() as stack:
            try:
                self.lock = stack.enter_context(locked(self.path))
            except OSError as error:
                if error.errno in DISK_ERRORS:
                    raise
                raise UsageError(f"`out` {self.path}: {error.strerror}") from None
            stored = read_json(self._settings) or manifest
            before = {key: value for key, value in stored.items() if key != "run"}
            self.run = stored.get("run", digest(before))
            if not _has_grown(before, manifest):
                refuse_changes(self.path, "a comparison", before, manifest)
            first = {"run": self.run} if self.run != digest(manifest) else {}
            if before != manifest or not self._settings.exists():
                write_json(self._settings, {**manifest, **first})
            yield

    def _check(self) -> None:
        """Raise UsageError if the folder cannot be that of a comparison; change nothing in it."""
        try:
            str(self.path).encode()
        except UnicodeEncodeError:  # safetensors needs names in UTF-8
            raise UsageError(f"`out` {self.path}: needs a name in UTF-8") from None
        if read_json(self._settings) is not None:
            if settings_of_comparison(self.path) is None:
                raise UsageError(
                    f"`out` {self.path}: its {_SETTINGS} is not of a comparison: give another `out`"
                )
        elif self.path.is_dir():
            begun = part_of(self._settings).name  # of a run that was killed at once
            others = sorted(p.name for p in self.path.iterdir() if p.name != begun)
            if others:
                raise UsageError(
                    f"`out` {self.path} holds no comparison but other files "
                    f"({leading_names(others)}): give a new or an empty folder"
                )

    def recorded(self, key: str, kind: type) -> Any:
        """Return a setting of the folder; None if it is missing or of another type."""
        value = (settings_of_comparison(self.path) or {}).get(key)
        return value if isinstance(value, kind) else None

    def checkpoint(self, name: str) -> Path:
        """Return the folder of the trained model `name`; it exists when the model is finished."""
        return self.path / "checkpoints" / name

    def training(self, name: str) -> Path:
        return self.path / "training" / f"{name}.pt"

    def trained(self, spec: str, seed: int) -> tuple[Path, dict[str, Any]] | None:
        """Return the finished model of `spec` and `seed`, and its training.json; else None."""
        path = self.checkpoint(model_name(spec, seed))
        if not path.is_dir():
            return None
        facts = read_json(path / "training.json")
        facts = facts if isinstance(facts, dict) else {}
        ours = facts.get("run", self.run) == self.run and "seconds" in facts
        if (facts.get("spec"), facts.get("seed")) == (spec, seed) and ours:
            return path, facts
        says = f"{facts.get('spec')} with seed {facts.get('seed')}"
        raise UsageError(
            f"{path} should hold the model trained as {spec} with seed {seed}, but its "
            f"training.json says {says}{'' if ours else ', of another comparison'}: "
            "remove that folder, or give another `out`"
        )

    def save(self, name: str, save: Callable[[Path], None]) -> None:
        """Save the checkpoint `name` with `save(folder)`, unless a killed process has done so."""
        if not self.checkpoint(name).is_dir():
            with new_folder(self.checkpoint(name)) as unfinished:
                save(unfinished)

    def kept(self, name: str) -> dict[int, Path]:
        """Return the kept checkpoints of the training `name`: step -> folder."""
        folders = self.path.glob(f"checkpoints/{glob.escape(name)}-step*")
        steps = {path.name.rpartition("-step")[2]: path for path in folders}
        return dict(sorted((int(step), path) for step, path in steps.items() if step.isdecimal()))

    def discard_training(self, name: str) -> None:
        """Delete the training state of a finished model."""
        state = self.training(name)
        part = part_of(state)  # a killed process may have left it
        with writing(state, part):
            for path in (state, part):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # it holds other states, or another worker was first
                state.parent.rmdir()


def _has_grown(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether `new` differs from `old` only by added encodings or seeds."""
    grown = old | {key: new.get(key) for key in ("encodings", "seeds") if key in old}
    return (
        grown == new
        and set(old["encodings"]) <= set(new["encodings"])
        and old.get("seeds", 0) <= new.get("seeds", 0)
    )


def model_name(spec: str, seed: int) -> str:
    """Return the folder name of the model trained as `spec` with `seed`, unique for each spec.

    A hash follows if the readable parts of the spec do not tell specs apart, or are cut.
    """
    name = re.sub("[^A-Za-z0-9._]+", "-", spec)[:_LONGEST]
    if len(spec) > _LONGEST or not re.fullmatch("[a-z0-9._]+([:=,][a-z0-9._]+)*", spec):
        name += "-" + hashlib.sha256(spec.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return f"{name}-seed{seed}"


def digest(manifest: dict[str, Any]) -> str:
    """Return eight hexadecimal digits that identify a manifest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:8]
