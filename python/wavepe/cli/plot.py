"""``wavepe plot``: pictures of the encodings themselves."""

from __future__ import annotations

import argparse
import inspect
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import wavepe

from ..analysis import plots
from ..analysis.plots.drawing import SHOWN
from ..common.errors import UsageError, need_matplotlib
from ..common.files import writing
from ..experiments.imports import import_all
from .options import add_imports, add_json, check_json, check_picture, given, write_json

PICTURES = tuple(SHOWN)  # functions of wavepe.analysis.plots


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s NAME [NAME ...] [options]"  # --encodings would swallow a last NAME
    lines = []
    for name in PICTURES:
        summary = (getattr(plots, name).__doc__ or "").partition(".\n")[0][5:]
        defaults = (f"--{key} {_shown(value)}" for key, value in _defaults(name).items())
        lines += [f"{name}: {summary}", f"  {' '.join(defaults)}"]
    parser.epilog = "\n".join(["pictures, with their options and defaults:", *lines, "all: these"])
    add = parser.add_argument
    add("names", metavar="NAME", nargs="+", help="one of the pictures below, or all; or the spec "
        "of an encoding, such as rope:theta=500000; or a mother wavelet, such as haar")  # fmt: skip
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
    drawings = [drawing for name in args.names for drawing in _drawings(args, name)]
    need_matplotlib("wavepe plot")
    check_json(args)
    files = _files(args, [label for label, _, _ in drawings])
    numbers = {}
    for label, name, options in drawings:
        try:
            with writing(files[label]):
                drawn = getattr(plots, name)(files[label], **options)
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from error
        numbers[label] = {"picture": name, **drawn}
    is_single = len(drawings) == 1
    if args.json:
        write_json(args, *numbers.values() if is_single else [numbers])
    for label, file in files.items():
        print(f"picture: {file}" if is_single else f"{label}: {file}")
    if args.json:
        print(f"numbers: {args.json}")
    return 0


def _drawings(args: argparse.Namespace, name: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return each picture of a NAME: its label, its function and its options."""
    options = given(args, *(getattr(plots, picture) for picture in PICTURES))
    pictures = PICTURES if name == "all" else (name,)
    if name not in (*PICTURES, "all"):
        if "encodings" in options:
            raise UsageError(f"--encodings: {name} names the encoding already; name a picture")
        pictures, options["encodings"] = _pictures_of(name)
    for picture in pictures:
        known = _defaults(picture)
        for option in [key for key in options if key not in known]:
            which = picture if name in (picture, "all") else f"{picture}, the picture of {name},"
            listed = ", ".join(f"--{key}" for key in known)
            raise UsageError(f"--{option}: {which} takes {listed}")
    if len(pictures) == 1:
        return [(name, *pictures, options)]
    before = f"{name}-" * (len(args.names) > 1 and name != "all")
    return [(before + picture, picture, options) for picture in pictures]


def _pictures_of(name: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the pictures for an encoding or a mother wavelet, and the spec that they show."""
    known = wavepe.encodings.known_encodings()
    try:
        encoding = wavepe.encoding(name)
    except (ValueError, TypeError) as error:
        if name.partition(":")[0] in known:  # the spec's options are wrong
            raise UsageError(str(error)) from None
        with suppress(ValueError):
            return ("wavelets",), [str(wavepe.encoding("wavelet", kind=name))]
        raise UsageError(
            f"{name}: is no picture, encoding or wavelet; pictures: "
            f"{', '.join((*PICTURES, 'all'))}; encodings: {', '.join(known)}"
        ) from None
    by_place = ("absolute", "wavelengths", "table", "bias")
    pictures = tuple(picture for picture in by_place if SHOWN[picture][1](encoding))
    if not pictures:
        raise UsageError(f"{name}: has nothing to draw, because it depends on more than positions")
    return pictures, [name]


def _files(args: argparse.Namespace, labels: list[str]) -> dict[str, Path]:
    """Return the file of each picture, by its label."""
    if args.png is not None:
        if args.out is not None or len(labels) > 1:
            raise UsageError("--png names one file: give it without --out, and for one picture")
        check_picture("--png", args.png)
        return {labels[0]: Path(args.png)}
    folder = Path(args.out or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {folder}: {getattr(error, 'strerror', error)}") from None
    files = {}
    for label in labels:
        files[label] = folder / f"{re.sub('[^A-Za-z0-9._]+', '-', label)[:80]}.png"
        check_picture("--out", str(files[label]))
    if len({*files.values()}) < len(labels):
        raise UsageError(f"{' '.join(args.names)}: two pictures would have the same file")
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
