"""``wavepe plot``: pictures of the encodings themselves."""

from __future__ import annotations

import argparse
import inspect
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import wavepe

from .._files import new_file
from ..analysis import plots
from ..experiments.errors import UsageError, need_matplotlib
from ..experiments.imports import import_all
from .outputs import add_json, check_json, check_picture, write_json

# Each picture is a function of wavepe.analysis.plots.
PICTURES = (
    "wavelets", "table", "transform", "absolute", "bias", "decay", "wavelengths", "matrices",
)  # fmt: skip
# Option -> its arguments for argparse, and its help. A picture has the options of its function.
_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "encodings": ({"nargs": "+", "metavar": "SPEC"}, "the encodings to draw; defaults"),
    "dim": ({"type": int, "metavar": "N"}, "head size, or size of an absolute vector; defaults"),
    "length": ({"type": int, "metavar": "N"},
               "number of distances or positions, or the trained length; defaults"),
    "heads": ({"type": int, "metavar": "N"}, "number of attention heads; default"),
    "position": ({"type": int, "metavar": "N"}, "position of the rotation; default"),
    "theta": ({"type": float, "metavar": "X"}, "base of the rotation; default"),
    "kind": ({"metavar": "NAME"}, "mother wavelet; default"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``wavepe plot``."""
    lines = [f"{name}: {_summary(name)}" for name in PICTURES]
    parser.usage = "%(prog)s NAME [options]"  # --encodings would swallow a NAME that comes last
    parser.epilog = "\n".join(["pictures:", *lines, "all: all of these"])
    add = parser.add_argument
    add("name", metavar="NAME", help="one of the pictures below, or all; or the spec of an "
        "encoding, such as rope:theta=500000; or a mother wavelet, such as haar")  # fmt: skip
    add("--png", metavar="FILE", help="file of the picture: .png, .pdf or .svg (default: "
        "NAME.png)")  # fmt: skip
    add("--out", metavar="DIR", help="folder of NAME.png (default: the current folder)")
    add_json(parser, "drawn numbers")
    for option, (argument, text) in _OPTIONS.items():
        of = [f"{name} {_shown(defaults[option])}" for name in PICTURES
              if option in (defaults := _defaults(name))]  # fmt: skip
        add(f"--{option}", **argument, help=f"{text}: {'; '.join(of)}")
    add("--import", dest="imports", action="append", default=[], metavar="FILE_OR_MODULE",
        help="Python file (.py) or module that registers encodings or wavelets of your own; "
        "may be repeated")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Check all arguments, then draw."""
    import_all(args.imports)
    names, options = _asked(args)
    for name in names:
        _check_options(args.name, name, options)
    need_matplotlib("wavepe plot")
    files = _files(args, names)
    check_json(args)
    numbers = {}
    for name, file in files.items():
        numbers[name] = _draw(name, file, options)
    if args.json:
        one = {"picture": names[0], **numbers[names[0]]}
        write_json(args, numbers if args.name == "all" else one)
    for name, file in files.items():
        print(f"{name}: {file}" if args.name == "all" else f"picture: {file}")
    if args.json:
        print(f"numbers: {args.json}")
    return 0


def _asked(args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return the pictures to draw, and the options that the user gave."""
    options = {key: getattr(args, key) for key in _OPTIONS if getattr(args, key) is not None}
    if args.name == "all":
        return list(PICTURES), options
    if args.name in PICTURES:
        return [args.name], options
    pictures, spec = _pictures_of(args.name)
    if "encodings" in options:
        raise UsageError(
            f"--encodings: {args.name} names the encoding already; give the name of a picture "
            "instead"
        )
    return pictures, {**options, "encodings": [spec]}


def _pictures_of(name: str) -> tuple[list[str], str]:
    """Return the pictures for an encoding or a mother wavelet, and the spec that they show."""
    known = wavepe.encodings.known_encodings()
    try:
        encoding = wavepe.encoding(name)
    except (ValueError, TypeError) as error:
        if name.partition(":")[0] in known:  # the spec's options are wrong
            raise UsageError(str(error)) from None
        with suppress(ValueError):
            return ["wavelets"], str(wavepe.encoding("wavelet", kind=name))
        raise UsageError(
            f"{name}: is no picture, encoding or wavelet; pictures: "
            f"{', '.join((*PICTURES, 'all'))}; encodings: {', '.join(known)}"
        ) from None
    shown = {
        "absolute": encoding.adds,
        "wavelengths": encoding.rotates,
        "table": "table" in encoding.terms,
        "bias": "bias" in encoding.terms or "slopes" in encoding.terms,
    }
    if not any(shown.values()):
        raise UsageError(
            f"{name}: has nothing to draw, because it depends on more than positions, such as q, k "
            "or the layer's input"
        )
    return [picture for picture, has in shown.items() if has], name


def _check_options(asked: str, name: str, options: dict[str, Any]) -> None:
    """Raise UsageError for an option that the picture does not have."""
    known = _defaults(name)
    for option in options:
        if option not in known:
            listed = ", ".join(f"--{key}" for key in known)
            which = name if asked in (name, "all") else f"{name}, the picture of {asked},"
            raise UsageError(f"--{option}: {which} takes {listed}")


def _files(args: argparse.Namespace, names: list[str]) -> dict[str, Path]:
    """Return the file of each picture."""
    if args.png is not None and (args.out is not None or args.name == "all"):
        raise UsageError("--png names one file: give it without --out, and for one picture")
    if args.png is not None:
        check_picture("--png", Path(args.png))
        if args.json is not None and Path(args.json).absolute() == Path(args.png).absolute():
            raise UsageError(f"--json and --png name the same file, {args.json}")
        return {names[0]: Path(args.png)}
    folder = Path(args.out or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {folder}: {getattr(error, 'strerror', error)}") from None
    whole = args.name if len(names) == 1 else None
    files = {name: folder / f"{_file_name(whole or name)}.png" for name in names}
    for file in files.values():
        check_picture("--out", file)
    return files


def _file_name(name: str) -> str:
    """Return a file name for a spec."""
    return re.sub("[^A-Za-z0-9._]+", "-", name)[:80]


def _draw(name: str, file: Path, options: dict[str, Any]) -> dict[str, Any]:
    given = dict(options)
    if "encodings" in given and "encoding" in _parameters(name):
        specs = given.pop("encodings")
        if len(specs) > 1:
            raise UsageError(f"--encodings {' '.join(specs)}: {name} shows one encoding")
        (given["encoding"],) = specs
    with new_file(file) as part:
        try:
            return getattr(plots, name)(part, **given)
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from error


def _parameters(name: str) -> dict[str, Any]:
    """Return the options of a picture's function, with their defaults."""
    parameters = inspect.signature(getattr(plots, name)).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key != "path"}


def _defaults(name: str) -> dict[str, Any]:
    """Return the options of a picture on the command line, with their defaults."""
    found = _parameters(name)
    return {"encodings" if key == "encoding" else key: value for key, value in found.items()}


def _summary(name: str) -> str:
    """Return the first line of the docstring of a picture's function."""
    line = (getattr(plots, name).__doc__ or "").partition("\n")[0]
    return line.removeprefix("Draw ").rstrip(".")


def _shown(default: Any) -> str:
    """Return a default as text for the help; None is a size that depends on the encoding."""
    if default is None:
        return "by encoding"
    if isinstance(default, tuple):
        return f"{default[0]} ..." if len(" ".join(default)) > 60 else " ".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)
