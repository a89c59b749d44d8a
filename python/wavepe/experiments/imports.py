"""``--import``: a user's own code that registers encodings or wavelets before specs are read."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from .errors import UsageError


def import_all(names: Sequence[str]) -> tuple[str, ...]:
    """Import each file or module.

    Parameters
    ----------
    names : sequence of str
        Paths that end in .py, or names of importable modules.

    Returns
    -------
    tuple of str
        For each import a text that a run folder keeps: the name, a blank, and the beginning of the
        hash of its source.

    Raises
    ------
    UsageError
        A file or module is not found, is given twice, or raises an exception. The message names
        the line that raised it.
    """
    found: dict[str, str] = {}
    for name in names:
        if (not name or name.startswith(".")) and not name.endswith(".py"):
            raise UsageError(
                f"--import {name!r}: needs a path that ends in .py, or a module's full name"
            )
        module = _from_file(Path(name)) if name.endswith(".py") else _from_name(name)
        label = Path(name).name if name.endswith(".py") else name
        if label in found:
            raise UsageError(f"--import {name}: {label} is given twice")
        found[label] = _digest(module)
    return tuple(f"{label} {digest}" for label, digest in found.items())


def name_in(remembered: str) -> str:
    """Return the name in a text of `import_all`."""
    return remembered.rpartition(" ")[0]


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"--import {path}: no such file")
    # Our own module name: a file named like another module must not replace that module.
    spec = importlib.util.spec_from_file_location(f"wavepe_import_{path.stem}", path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UsageError(f"--import {path}: {_what_happened(error, path)}") from error
    return module


def _from_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        hint = " (the path of a file ends in .py)" if missing else ""
        raise UsageError(f"--import {name}: {_what_happened(error)}{hint}") from error


def _what_happened(error: BaseException, path: Path | None = None) -> str:
    """Return the exception in one line, with the last line of the file in its traceback."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    file = None if path is None else path.resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file]
    return f"{text} (line {lines[-1]})" if lines else text


def _digest(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_file():
        return "no-file"
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
