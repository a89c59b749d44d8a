"""``wavepe plot``: pictures of the encodings themselves."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..analysis import plots
from ..analysis.plots.drawing import SHOWN
from ..common.errors import UsageError, need_matplotlib
from ..common.files import writing
from ..experiments.imports import import_all
from .options import add_imports, add_json, check_json, check_picture, given, write_json

PICTURES = tuple(SHOWN)  # functions of wavepe.analysis.plots


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s NAME [options]"  # --encodings would swallow a last NAME
    lines = []
    for name in PICTURES:
        summary = (getattr(plots, name).__doc__ or "").partition(".\n")[0][5:]
        defaults = (f"--{key} {_shown(value)}" for key, value in _defaults(name).items())
        lines += [f"{name}: {summary}", f"  {' '.join(defaults)}"]
    parser.epilog = "\n".join(["pictures, with their options and defaults:", *lines, "all: these"])
    add = parser.add_argument
    add("name", metavar="NAME", choices=[*PICTURES, "all"], help="one of the pictures below, or "
        "all")  # fmt: skip
    add("--png", metavar="FILE", help="file of the picture: .png, .pdf or .svg (default: "
        "NAME.png)")  # fmt: skip
    add("--out", metavar="DIR", help="folder of NAME.png (default: the current folder)")
    add_json(parser, "drawn numbers")
    add("--encodings", nargs="+", metavar="SPEC", help="the encodings to draw")
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    add("--dim", help="head size, or size of an absolute vector", **number)
    add("--length", help="number of distances or positions, or the trained length", **number)
    add("--heads", help="number of attention heads", **number)
    add_imports(parser, quiet=False)


def run(args: argparse.Namespace) -> int:
    import_all(args.imports)
    names = PICTURES if args.name == "all" else (args.name,)
    options = given(args, *(getattr(plots, name) for name in PICTURES))
    for name in names:
        known = _defaults(name)
        for option in [key for key in options if key not in known]:
            listed = ", ".join(f"--{key}" for key in known)
            raise UsageError(f"--{option}: {name} takes {listed}")
    need_matplotlib("wavepe plot")
    check_json(args)
    numbers = {}
    for name, file in _files(args, names).items():
        try:
            with writing(file):
                numbers[name] = getattr(plots, name)(file, **options)
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from error
        print(f"picture: {file}")
    if args.json:
        write_json(args, numbers if args.name == "all" else numbers[args.name])
        print(f"numbers: {args.json}")
    return 0


def _files(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Path]:
    """Return the file of each picture."""
    if args.png is not None:
        if args.out is not None or len(names) > 1:
            raise UsageError("--png names one file: give it without --out, and for one picture")
        check_picture("--png", args.png)
        return {names[0]: Path(args.png)}
    folder = Path(args.out or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {folder}: {getattr(error, 'strerror', error)}") from None
    files = {name: folder / f"{name}.png" for name in names}
    for file in files.values():
        check_picture("--out", str(file))
    return files


def _defaults(name: str) -> dict[str, Any]:
    """Return the options of a picture, with their defaults."""
    parameters = inspect.signature(getattr(plots, name)).parameters
    return {key: x.default for key, x in parameters.items() if key != "path"}


def _shown(default: Any) -> str:
    """Return a default as text for the help; None is a size that depends on the encoding."""
    if isinstance(default, tuple):
        return f"{default[0]} ..." if len(" ".join(default)) > 60 else " ".join(default)
    return "by encoding" if default is None else str(default)
