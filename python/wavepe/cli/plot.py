"""``wavepe plot``: pictures of the encodings themselves."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

from ..analysis import plots
from ..analysis.plots.drawing import SHOWN
from ..common.errors import UsageError, need_matplotlib
from ..common.files import writing
from ..experiments.imports import import_all
from .options import add_imports, check_picture, given

PICTURES = tuple(SHOWN)  # functions of wavepe.analysis.plots


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s NAME [options]"  # --encodings would swallow a last NAME
    lines = []
    for name in PICTURES:
        summary = (getattr(plots, name).__doc__ or "").partition(".\n")[0][5:]
        defaults = (f"--{key} {_shown(value)}" for key, value in _defaults(name).items())
        lines += [f"{name}: {summary}", f"  {' '.join(defaults)}"]
    parser.epilog = "\n".join(["pictures, with their options and defaults:", *lines])
    add = parser.add_argument
    add("name", metavar="NAME", choices=PICTURES, help="one of the pictures below")
    add("--png", metavar="FILE", help="file of the picture: .png, .pdf or .svg (default: "
        "NAME.png)")  # fmt: skip
    add("--encodings", nargs="+", metavar="SPEC", help="the encodings to draw")
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    add("--dim", help="head size", **number)
    add("--length", help="number of distances", **number)
    add("--heads", help="number of attention heads", **number)
    add_imports(parser, quiet=False)


def run(args: argparse.Namespace) -> int:
    import_all(args.imports)
    draw, known = getattr(plots, args.name), _defaults(args.name)
    options = given(args, *(getattr(plots, name) for name in PICTURES))
    for option in options.keys() - known.keys():
        listed = ", ".join(f"--{key}" for key in known)
        raise UsageError(f"--{option}: {args.name} takes {listed}")
    need_matplotlib("wavepe plot")
    file = Path(args.png or f"{args.name}.png")
    check_picture("--png", str(file))
    try:
        with writing(file):
            draw(file, **options)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    print(f"picture: {file}")
    return 0


def _defaults(name: str) -> dict[str, Any]:
    """Return the options of a picture, with their defaults."""
    parameters = inspect.signature(getattr(plots, name)).parameters
    return {key: x.default for key, x in parameters.items() if key != "path"}


def _shown(default: Any) -> str:
    """Return a default as text for the help; None is a size that depends on the encoding."""
    if isinstance(default, tuple):
        return f"{default[0]} ..." if len(" ".join(default)) > 60 else " ".join(default)
    return "by encoding" if default is None else str(default)
