"""The files that ``--png`` and ``--json`` name: checked before the work, written whole after it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from .._files import new_file, part_of
from .errors import CommandError, UsageError, require


def need_matplotlib(command: str) -> None:
    """CommandError where matplotlib is missing or cannot be loaded."""
    require(command, matplotlib="plot")
    try:
        import matplotlib.figure  # noqa: F401
    except ValueError as error:  # of MPLBACKEND
        raise CommandError(f"matplotlib: {error}") from error


def check_picture(option: str, path: Path) -> None:
    """UsageError unless `path` can be written, in a format that matplotlib has."""
    from matplotlib.backend_bases import FigureCanvasBase

    if path.suffix[1:].lower() not in FigureCanvasBase.filetypes:
        raise UsageError(f"{option} {path}: needs a name that ends in .png, .pdf or .svg")
    check_file(option, path)


def check_file(option: str, path: Path) -> None:
    """UsageError unless a file can be written there."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: needs a file, and a folder is there")
    try:
        if path.exists():
            path.open("ab").close()
        if _replaceable(path):
            with part_of(path).open("wb"):
                pass
            part_of(path).unlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UsageError(f"{option} {path}: {getattr(error, 'strerror', error)}") from None


def write_json(path: Path, value: Any) -> None:
    """Write `value`, arrays as lists, and null for what is not finite."""
    text = json.dumps(_plain(value), allow_nan=False) + "\n"
    if not _replaceable(path):
        path.write_text(text, "utf-8")
        return
    with new_file(path) as part:
        part.write_text(text, "utf-8")


def _replaceable(path: Path) -> bool:
    """Whether a new file may take the place of `path`: not of /dev/stdout, a pipe or a link."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy's
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
