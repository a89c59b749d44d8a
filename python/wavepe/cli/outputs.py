"""The files of ``--png`` and ``--json``: checked before the work, and written after it."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from .._files import new_file, part_of
from ..experiments.environment import environment
from ..experiments.errors import UsageError, need_matplotlib
from ..experiments.model import Model, check_folder, need_parts
from ..experiments.model import opened as open_model
from ..experiments.text import check_data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options --json and --png."""
    add_json(parser, "figures")
    parser.add_argument("--png", metavar="FILE",
        help="draw the figures to this file (.png, .pdf or .svg)")  # fmt: skip


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option --json."""
    parser.set_defaults(stdout=None)  # `main` sets it if --json is -
    parser.add_argument(
        "--json", metavar="FILE", help=f"write the {what} to this file, as JSON; - for stdout"
    )


@contextmanager
def measuring(args: argparse.Namespace, command: str) -> Iterator[Model]:
    """Check the arguments, and load the model of a command that measures one."""
    begin(args, command, [args.model])
    with opened(args, args.model) as loaded:
        yield loaded


def opened(args: argparse.Namespace, given: str) -> AbstractContextManager[Model]:
    """Load a model of the command line, for the time of a with block."""
    return open_model(given, imports=args.imports, device=args.device, threads=args.threads)


def begin(args: argparse.Namespace, command: str, models: list[str]) -> None:
    """Raise CommandError for what cannot be read, written or run, before the long work begins."""
    need_parts(f"wavepe {command}")
    check(args, f"wavepe {command}")
    check_data(args.data)
    for given in models:
        check_folder(given)


def check(args: argparse.Namespace, command: str) -> None:
    """Raise CommandError for a file that cannot be written, before the long work begins."""
    for option in ("json", "png"):
        if getattr(args, option) == "":
            raise UsageError(f"--{option}: needs the name of a file, got an empty name")
    if args.json is not None and args.json == args.png:
        raise UsageError(f"--json and --png name the same file, {args.json}")
    check_json(args)
    if args.png is not None:
        need_matplotlib(f"{command} --png")
        check_picture("--png", Path(args.png))


def write(args: argparse.Namespace, figures: dict[str, Any], draw: Callable[[Path], None]) -> None:
    """Write the files of --json and --png: `figures` as JSON, and the picture of `draw(path)`."""
    if args.json is not None:
        figures = {**figures, "environment": {**environment(), **figures["environment"]}}
        write_json(args, figures)
    if args.png is not None:
        with new_file(Path(args.png)) as part:
            draw(part)
    written = [f"{name}: {value}" for name in ("json", "png") if (value := getattr(args, name))]
    if written and not args.quiet:
        print("  ".join(written))


def check_picture(option: str, path: Path) -> None:
    """Raise UsageError unless `path` can be written, in a format that matplotlib knows."""
    from matplotlib.backend_bases import FigureCanvasBase

    if path.suffix[1:].lower() not in FigureCanvasBase.filetypes:
        raise UsageError(f"{option} {path}: needs a name that ends in .png, .pdf or .svg")
    check_file(option, path)


def check_json(args: argparse.Namespace) -> None:
    """Raise UsageError unless the file of --json can be written."""
    if args.json not in (None, "-"):
        check_file("--json", Path(args.json))


def check_file(option: str, path: Path) -> None:
    """Raise UsageError unless a file can be written to `path`."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: needs a file, but this is a folder")
    try:
        if path.exists():
            path.open("ab").close()
        if _replaceable(path):
            with part_of(path).open("wb"):
                pass
            part_of(path).unlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UsageError(f"{option} {path}: {getattr(error, 'strerror', error)}") from None


def write_json(args: argparse.Namespace, value: Any) -> None:
    """Write `value` to the file of --json.

    Arrays become lists, and numbers that are not finite become null.
    """
    text = json.dumps(_plain(value), allow_nan=False) + "\n"
    if args.json == "-":
        args.stdout.write(text)
    elif not _replaceable(Path(args.json)):
        Path(args.json).write_text(text, "utf-8")
    else:
        with new_file(Path(args.json)) as part:
            part.write_text(text, "utf-8")


def _replaceable(path: Path) -> bool:
    """Return whether a new file may replace `path`, which must not be a device, pipe or link."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array or scalar of NumPy
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
