"""The files of ``--png`` and ``--json``: checked before the work, and written after it."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from ..common.errors import UsageError
from ..common.files import writing


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option --json."""
    parser.set_defaults(stdout=None)  # `main` sets it if --json is -
    parser.add_argument(
        "--json", metavar="FILE",
        help=f"write the {what} to this file, as JSON; - for stdout. A file that is there is "
        "replaced",
    )  # fmt: skip


def check_json(args: argparse.Namespace) -> None:
    """Raise UsageError unless the file of --json can be written, and is not that of --png."""
    if args.json is not None and args.json == args.png:
        raise UsageError(f"--json and --png name the same file, {args.json}")
    if args.json not in (None, "-"):
        check_file("--json", args.json)


def check_picture(option: str, path: str) -> None:
    """Raise UsageError unless `path` can be written, in a format that matplotlib knows."""
    from matplotlib.backend_bases import FigureCanvasBase

    if Path(path).suffix[1:].lower() not in FigureCanvasBase.filetypes:
        raise UsageError(f"{option} {path}: needs a name that ends in .png, .pdf or .svg")
    check_file(option, path)


def check_file(option: str, path: str) -> None:
    """Raise UsageError unless a file can be written to `path`; what it holds stays."""
    try:
        there = os.path.lexists(path)
        with open(path, "ab"):
            pass
        if not there:
            os.unlink(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UsageError(f"{option} {path}: {getattr(error, 'strerror', error)}") from None


def write_json(args: argparse.Namespace, value: Any) -> None:
    """Write `value` to the file of --json.

    Arrays become lists, and numbers that are not finite become null.
    """
    text = json.dumps(_plain(value), allow_nan=False) + "\n"
    if args.json == "-":
        args.stdout.write(text)
        return
    with writing(Path(args.json)):
        Path(args.json).write_text(text, "utf-8")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array or scalar of NumPy
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
