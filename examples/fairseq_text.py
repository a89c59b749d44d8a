"""The text of examples/fairseq_demo.py: cut into words, and split into train, valid and test."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Where Debian's package python3-doc puts the sources of Python's documentation.
DOCUMENTATION = Path("/usr/share/doc")
PATTERN = "python3*/html/_sources/**/*.rst.txt"
# Not read: other packages and tests in the standard library, and a page that lists all changes.
NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idle_test", "changelog.rst.txt"}
WORD = re.compile(r"\w+|[^\w\s]")
PARTS = ("train", "valid", "test")
HELD_OUT = 26  # of 256 files go to valid and test
TEST_WORDS = 20_000  # few, because sliding reads them four times


def write_text(folder: Path, data: str | None = None) -> str:
    """Write train.txt, valid.txt and test.txt, with the lines of the text and blanks between words.

    Parameters
    ----------
    folder : Path
        Folder for the three files.
    data : str, optional
        A text file, or a folder of text files. None is Python's documentation (Debian's package
        python3-doc). If that is not installed, it is the sources of the standard library.

    Returns
    -------
    str
        A description of the text.

    Raises
    ------
    ValueError
        There is no text, or not enough for three parts.
    """
    files, description = _files(data)
    parts: dict[str, list[str]] = {part: [] for part in PARTS}
    for name, path in files:
        lines = path.read_text("utf-8", errors="replace").splitlines()
        pieces = [(name, lines)] if len(files) > 20 else _pieces(name, lines)
        for label, piece in pieces:
            parts[_part(label)] += [" ".join(WORD.findall(line)) for line in piece if line.strip()]
    for part, lines in parts.items():
        if not lines:
            raise ValueError(f"{description}: the text is too short, {part} would be empty")
        if part == "test":
            lines = _beginning(lines, TEST_WORDS)
        (folder / f"{part}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    words = sum(line.count(" ") + 1 for lines in parts.values() for line in lines)
    return f"{description}, {len(files)} files, {words} words"


def _files(data: str | None) -> tuple[list[tuple[str, Path]], str]:
    """Return (name, path) of each file, sorted by name, and a description of the files."""
    if data is not None:
        root = Path(data)
        found = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
        description = f"the text of {data}"
    else:
        root, description = DOCUMENTATION, "Python's documentation"
        found = sorted(root.glob(PATTERN))
        if not found:
            root, description = Path(sysconfig.get_path("stdlib")), "Python's standard library"
            found = sorted(root.rglob("*.py"))
    named = [(p.relative_to(root).as_posix() if p != root else p.name, p) for p in found]
    kept = [(name, p) for name, p in named if not NOT_READ.intersection(name.split("/"))]
    if not kept:
        raise ValueError(f"{description}: no files there")
    return kept, description


def _pieces(name: str, lines: list[str], size: int = 50) -> Iterator[tuple[str, list[str]]]:
    """Cut a file into pieces; if there are few files, pieces are split instead of files."""
    for start in range(0, len(lines), size):
        yield f"{name}:{start}", lines[start : start + size]


def _beginning(lines: list[str], words: int) -> list[str]:
    """Return the first lines, with about `words` words."""
    kept, count = [], 0
    for line in lines:
        kept.append(line)
        count += line.count(" ") + 1
        if count >= words:
            break
    return kept


def _part(label: str) -> str:
    """Return the part of a file or piece, by its name alone: later files do not change it."""
    number = hashlib.sha256(label.encode()).digest()[0]
    return "train" if number >= HELD_OUT else ("valid" if number % 2 else "test")
