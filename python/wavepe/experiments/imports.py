"""`imports`: a user's own code that registers encodings or wavelets before specs are read."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..common.errors import UsageError


def import_all(names: Sequence[str]) -> tuple[str, ...]:
    """Import each file, a path that ends in .py, or module.

    For each, return the text that a run folder keeps: the name, and the beginning of the hash of
    its source. UsageError names the line that raised an exception.
    """
    digests: dict[str, str] = {}
    for name in names:
        path, is_file = Path(name), name.endswith(".py")
        if not is_file and (not name or name.startswith(".")):
            needs = "needs a path that ends in .py, or a module's full name"
            raise UsageError(f"`imports` {name!r}: {needs}")
        if is_file and not path.is_file():
            raise UsageError(f"`imports` {path}: no such file")
        label = path.name if is_file else name
        if label in digests:
            raise UsageError(f"`imports` {name}: {label} is given twice")
        try:
            module = _from_file(path) if is_file else importlib.import_module(name)
        except (Exception, SystemExit) as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == name
            hint = " (the path of a file ends in .py)" if missing else ""
            raise UsageError(f"`imports` {name}: {_one_line(error, path)}{hint}") from error
        file = Path(getattr(module, "__file__", None) or "")
        has_file = file.is_file()  # a package without __init__ has none
        digest = hashlib.sha256(file.read_bytes()).hexdigest() if has_file else "no-file"
        digests[label] = digest[:12]
    return tuple(f"{label} {digest}" for label, digest in digests.items())


def _from_file(path: Path) -> ModuleType:
    # Our own module name: a file named like another module must not replace that module.
    spec: Any = importlib.util.spec_from_file_location(f"wavepe_import_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def _one_line(error: BaseException, path: Path) -> str:
    """Return the exception in one line, with the last line of the file in its traceback."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f"{text} (line {lines[-1]})" if lines else text
