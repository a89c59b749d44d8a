"""The text of ``wavepe compare``: its split into training and held-out bytes, and the batches."""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from ..common.errors import UsageError
from ..training.folder import results_of_adapt, settings_of_comparison

SPLITS = ("test", "validation")
HELD_OUT_SHARE = 0.05  # of the text, in each split
# Other packages, and tests, which are mostly tables
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Text:
    """Bytes for training and held-out bytes for evaluation, both uint8 of shape (n,)."""

    train: np.ndarray
    held_out: np.ndarray
    description: str
    sha256: str
    longest: int  # decided the split
    read_bytes: int  # of all files, also of those left out


def load_text(
    path: str | Path | None, longest: int, train_length: int, split: str = "test"
) -> Text:
    """Read and split the text at `path`: a file, a folder, or None for the standard library.

    Test and validation text are both held out; `split` names the one to evaluate on. Several files
    are split by file. One file is split by position, with the test text at its end. UsageError if
    there are fewer than `train_length` + 1 bytes to train on, or than `longest` held-out bytes.
    """
    if path == "":
        raise UsageError("`data`: needs the name of a file or a folder, got an empty name")
    files, description, read_bytes = _standard_library() if path is None else _read(Path(path))
    parts = _split_by_file(files, longest) if len(files) > 1 else _split_one_file(files, longest)
    size = sum(map(len, files.values()))
    train, held_out = parts["train"], parts[split]
    if len(train) <= train_length or len(held_out) < longest:
        raise UsageError(
            f"text too short: {description} has {size} bytes, and {len(held_out)} of them held out "
            f"({split}); needs at least {longest} held out and {train_length + 1} others"
        )
    digest = hashlib.sha256()
    for part in (train, held_out):
        digest.update(len(part).to_bytes(8, "little") + part)
    description += f", {len(files)} file{'s' * (len(files) > 1)}, {size} bytes"
    first, last = (np.frombuffer(part, np.uint8) for part in (train, held_out))
    return Text(first, last, description, digest.hexdigest(), longest, read_bytes)


def batch_at(train: np.ndarray, step: int, seed: int, batch: int, length: int) -> np.ndarray:
    """Return the batch of a training step, int64 (batch, length + 1), alike for all encodings."""
    generator = np.random.default_rng([seed, step])
    starts = generator.integers(0, len(train) - length, size=(batch, 1))
    return train[starts + np.arange(length + 1)].astype(np.int64)


def evaluation_bytes(held_out: np.ndarray, lengths: Sequence[int], budget: int) -> np.ndarray:
    """Return about `budget` held-out bytes that can be cut into whole pieces of every length.

    They are blocks of the least common multiple of the lengths, evenly spread over the text, so
    that every length scores the same bytes. If the multiple is too large, they begin the text.
    """
    block = math.lcm(*lengths)
    if block > min(len(held_out), max(budget, max(lengths))):
        return held_out[: max(budget, max(lengths))]
    there = len(held_out) // block
    wanted = min(there, max(1, budget // block))
    starts = [block * (number * there // wanted) for number in range(wanted)]
    return np.concatenate([held_out[start : start + block] for start in starts])


def walk(root: Path) -> list[tuple[str, Path]]:
    """Return (name below root, path) of every regular file, sorted by name.

    Hidden files are skipped. So are folders of comparisons and adaptations: they grow.
    """
    files = []
    for folder, subfolders, names in os.walk(root, onerror=_unreadable):
        if settings_of_comparison(Path(folder)) or results_of_adapt(Path(folder)):
            subfolders.clear()
            continue
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        files += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(files)


def _standard_library() -> tuple[dict[str, bytes], str, int]:
    root = Path(sysconfig.get_path("stdlib"))
    files = {
        name: _bytes(file)
        for name, file in walk(root)
        if name.endswith(".py") and not _NOT_LIBRARY.intersection(name.split("/"))
    }
    if not files:
        raise UsageError(f"the standard library at {root} holds no sources: give `data`")
    return files, "the Python standard library's sources", sum(map(len, files.values()))


def _read(path: Path) -> tuple[dict[str, bytes], str, int]:
    if path.is_file() or path.is_fifo():  # /dev/stdin can be either
        content = _bytes(path)
        if b"\0" in content:
            wrong = f"needs a text, but byte {content.index(0)} of this file is NUL"
            raise UsageError(f"`data` {path}: {wrong}")
        return {path.name: content}, str(path), len(content)
    if not path.is_dir():
        wrong = "is a device" if path.exists() else "no such file or folder"
        raise UsageError(f"`data` {path}: {wrong}")
    contents = {name: _bytes(file) for name, file in walk(path)}
    files = {name: content for name, content in contents.items() if content and 0 not in content}
    if not files:
        raise UsageError(f"`data` {path}: holds no text files")
    return files, f"the text files of {path}", sum(map(len, contents.values()))


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        _unreadable(error)


def _unreadable(error: OSError) -> NoReturn:
    raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None


def _split_by_file(files: dict[str, bytes], longest: int) -> dict[str, bytes]:
    """Hold out files until each split has its share: first for test, then for validation.

    The files are taken in the order of the hashes of their names. A file that is larger than the
    whole share stays in training, unless all files are.
    """
    share = max(math.ceil(HELD_OUT_SHARE * sum(map(len, files.values()))), longest)
    ranked = sorted(files, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    kept = set(files)
    parts = {}
    for split in SPLITS:
        chosen: list[str] = []
        size = 0
        for name in ranked:
            if name in kept and size < share and len(files[name]) <= share:
                chosen.append(name)
                size += len(files[name])
        if size < longest and split == "test":
            chosen = [min(ranked, key=lambda name: (len(files[name]) < longest, len(files[name])))]
        if len(chosen) == len(kept):  # nothing would be left to train on
            chosen = chosen if split == "test" else []
        parts[split] = b"".join(files[name] for name in chosen)
        kept -= set(chosen)
    return {"train": b"".join(files[name] for name in files if name in kept), **parts}


def _split_one_file(files: dict[str, bytes], longest: int) -> dict[str, bytes]:
    """Hold out the end of the only file for test, and the part before it for validation."""
    (content,) = files.values()
    share = max(math.ceil(HELD_OUT_SHARE * len(content)), longest)
    rest, test = content[:-share], content[-share:]
    if 2 * share > len(rest):
        share = math.ceil(HELD_OUT_SHARE * len(content))
    return {"train": rest[:-share], "validation": rest[-share:], "test": test}
