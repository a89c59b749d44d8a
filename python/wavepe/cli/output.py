"""``--json`` and ``--png`` of the commands that measure a model."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .._files import new_file, part_of
from .compare.folder import RunFolder
from .environment import environment
from .errors import CommandError, UsageError, require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two options."""
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--png", metavar="FILE", help="draw them to this file (.png, .pdf, .svg)")


def check(args: argparse.Namespace, command: str) -> None:
    """Raise CommandError for a file that could not be written at the end, after the long work."""
    require(f"wavepe {command}", torch="torch", transformers="hf", rich="cli")
    if args.png is not None:
        require(f"wavepe {command} --png", matplotlib="plot")
        try:
            from matplotlib.figure import Figure
        except ValueError as error:  # of MPLBACKEND
            raise CommandError(f"matplotlib: {error}") from error
        known = sorted(Figure().canvas.get_supported_filetypes())
        if Path(args.png).suffix[1:].lower() not in known:
            raise UsageError(f"--png {args.png}: needs a name that ends in .png, .pdf or .svg")
    for option in ("json", "png"):
        value = getattr(args, option)
        if value is not None:
            _check_target(f"--{option}", value)
    if args.json is not None and args.json == args.png:
        raise UsageError(f"--json and --png name the same file, {args.json}")


def _check_target(option: str, value: str) -> None:
    target = Path(value)
    if not value or target.is_dir():
        what = "is a folder" if value else "an empty name"
        raise UsageError(f"{option} {value}: {what}; needs the name of a file")
    if not target.parent.is_dir():
        raise UsageError(f"{option} {value}: there is no folder {target.parent}")
    part = part_of(target)
    try:
        part.touch()
    except OSError as error:
        raise UsageError(f"{option} {value}: {error.strerror}") from None
    with suppress(OSError):
        part.unlink()


def write(args: argparse.Namespace, figures: dict[str, Any], draw: Callable[[Path], None]) -> None:
    """Write the files that are asked for: `figures` as JSON, and what `draw(path)` draws."""
    if args.json is not None:
        figures = {**figures, "environment": {**environment(), **figures["environment"]}}
        RunFolder.write_json(Path(args.json), _plain(figures))
    if args.png is not None:
        with new_file(Path(args.png)) as part:
            draw(part)
    written = [f"{name}: {value}" for name in ("json", "png") if (value := getattr(args, name))]
    if written and not args.quiet:
        print("  ".join(written))


def _plain(value: Any) -> Any:
    """Return what JSON has: no NumPy, and null for what is not finite."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
