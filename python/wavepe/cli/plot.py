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
from .errors import UsageError
from .imports import import_all
from .outputs import check_file, check_picture, need_matplotlib, write_json

# Each is a function of wavepe.analysis.plots.
PICTURES = (
    "wavelets", "table", "transform", "absolute", "bias", "decay", "wavelengths", "matrices",
)  # fmt: skip
# Where an encoding enters a model -> its picture, for a spec in place of a name.
_OF_ENTRY = {
    "absolute": "absolute",
    "bias": "bias",
    "relative": "table",
    "rotary": "wavelengths",
    "slope": "bias",
}
# Option -> its argument and what it means; a picture has those that its function has.
_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "encodings": ({"nargs": "+", "metavar": "SPEC"}, "the encodings drawn"),
    "dim": ({"type": int, "metavar": "N"}, "head size, or size of an absolute vector"),
    "length": ({"type": int, "metavar": "N"}, "tokens: distances, positions or trained length"),
    "heads": ({"type": int, "metavar": "N"}, "attention heads"),
    "position": ({"type": int, "metavar": "N"}, "the position that is rotated"),
    "theta": ({"type": float, "metavar": "X"}, "the base"),
    "kind": ({"metavar": "NAME"}, "the mother wavelet"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``wavepe plot``."""
    lines = [f"{name}: {_says(name)}" for name in PICTURES]
    parser.epilog = "\n".join(["pictures:", *lines, "all: each of them"])
    add = parser.add_argument
    add("name", metavar="NAME", help="a picture named below, all, the spec of an encoding, as "
        "rope:theta=500000, or a mother wavelet, as haar")  # fmt: skip
    add("--png", metavar="FILE", help="the picture's file; .pdf and .svg are as good (default: "
        "NAME.png)")  # fmt: skip
    add("--out", metavar="DIR", help="the folder of NAME.png (default: this one)")
    add("--json", metavar="FILE", help="keep the numbers that are drawn")
    for option, (argument, text) in _OPTIONS.items():
        of = [f"{name} {_shown(defaults[option])}" for name in PICTURES
              if option in (defaults := _defaults(name))]  # fmt: skip
        add(f"--{option}", **argument, help=f"{text} ({'; '.join(of)})")
    add("--import", dest="imports", action="append", default=[], metavar="FILE_OR_MODULE",
        help="Python file (.py) or module that registers encodings or wavelets of your own; "
        "may be repeated")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Check everything, then draw."""
    import_all(args.imports)
    names, options = _asked(args)
    for name in names:
        _check_options(args.name, name, options)
    need_matplotlib("wavepe plot")
    files, numbers_file = _files(args, names), Path(args.json) if args.json else None
    if numbers_file is not None:
        check_file("--json", numbers_file)
    numbers = {}
    for name, file in files.items():
        numbers[name] = _draw(name, file, options)
    if numbers_file is not None:
        one = {"picture": names[0], **numbers[names[0]]}
        write_json(numbers_file, numbers if args.name == "all" else one)
    for name, file in files.items():
        print(f"{name}: {file}" if args.name == "all" else f"picture: {file}")
    if numbers_file is not None:
        print(f"numbers: {numbers_file}")
    return 0


def _asked(args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """The pictures to draw, and the options that were given."""
    options = {key: getattr(args, key) for key in _OPTIONS if getattr(args, key) is not None}
    if args.name == "all":
        return list(PICTURES), options
    if args.name in PICTURES:
        return [args.name], options
    picture, spec = _picture_of(args.name)
    if "encodings" in options:
        raise UsageError(f"--encodings: {args.name} is one already; name a picture instead")
    return [picture], {**options, "encodings": [spec]}


def _picture_of(name: str) -> tuple[str, str]:
    """The picture of an encoding or a mother wavelet, and the spec of what it shows."""
    known = wavepe.encodings.known_encodings()
    try:
        encoding = wavepe.encoding(name)
    except (ValueError, TypeError) as error:
        if name.partition(":")[0] in known:  # the spec's options are wrong
            raise UsageError(str(error)) from None
        with suppress(ValueError):
            return "wavelets", str(wavepe.encoding("wavelet", kind=name))
        raise UsageError(
            f"{name}: no picture, encoding or wavelet; pictures: {', '.join((*PICTURES, 'all'))}; "
            f"encodings: {', '.join(known)}"
        ) from None
    if encoding.entry not in _OF_ENTRY:
        raise UsageError(f"{name}: this encoding adds nothing that could be drawn")
    return _OF_ENTRY[encoding.entry], name


def _check_options(asked: str, name: str, options: dict[str, Any]) -> None:
    """UsageError for an option that the picture does not have."""
    known = _defaults(name)
    for option in options:
        if option not in known:
            listed = ", ".join(f"--{key}" for key in known)
            which = name if asked in (name, "all") else f"{name}, the picture of {asked},"
            raise UsageError(f"--{option}: {which} takes {listed}")


def _files(args: argparse.Namespace, names: list[str]) -> dict[str, Path]:
    """Where each picture goes."""
    if args.png is not None and (args.out is not None or args.name == "all"):
        raise UsageError("--png names one file: without --out, and not for all")
    if args.png is not None:
        check_picture("--png", Path(args.png))
        if args.json is not None and Path(args.json).absolute() == Path(args.png).absolute():
            raise UsageError(f"--json {args.json}: is the file of --png")
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
    """A spec as a file's name."""
    return re.sub("[^A-Za-z0-9._]+", "-", name)[:80]


def _draw(name: str, file: Path, options: dict[str, Any]) -> dict[str, Any]:
    given = dict(options)
    if "encodings" in given and "encoding" in _parameters(name):
        specs = given.pop("encodings")
        if len(specs) > 1:
            raise UsageError(f"--encodings {' '.join(specs)}: {name} shows one")
        (given["encoding"],) = specs
    with new_file(file) as part:
        try:
            return getattr(plots, name)(part, **given)
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from error


def _parameters(name: str) -> dict[str, Any]:
    """The options of a picture's function, with their defaults."""
    parameters = inspect.signature(getattr(plots, name)).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key != "path"}


def _defaults(name: str) -> dict[str, Any]:
    """The options of a picture on the command line, with their defaults."""
    found = _parameters(name)
    return {"encodings" if key == "encoding" else key: value for key, value in found.items()}


def _says(name: str) -> str:
    """The first line of the function's docstring."""
    line = (getattr(plots, name).__doc__ or "").partition("\n")[0]
    return line.removeprefix("Draw ").rstrip(".")


def _shown(default: Any) -> str:
    """A default in the help; None is a size that the encoding decides."""
    if default is None:
        return "as it needs"
    if isinstance(default, tuple):
        return f"{default[0]} ..." if len(" ".join(default)) > 60 else " ".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)
