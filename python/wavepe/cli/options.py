"""Options that several commands have: checked numbers, a function's parameters, and files.

The files of --png and --json are checked before the work, and written after it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ..common.errors import UsageError
from ..common.files import writing
from ..experiments.numbers import integers, reals, whole_number


class Number(argparse.Action):
    """Stores integers that are checked as they are read; UsageError names the option.

    `least` is the smallest allowed one.
    """

    read: Callable[..., list[Any]] = staticmethod(integers)
    sign = "N"

    def __init__(self, *args: Any, **options: Any) -> None:
        self.limits = {key: options.pop(key) for key in ("least", "most") if key in options}
        super().__init__(*args, **{"metavar": self.sign, **options})

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        numbers = self.read(self.dest, values or self.const, **self.limits)
        if not self.nargs and len(numbers) > 1:
            raise UsageError(f"`{self.dest}` {values}: needs one number")
        setattr(namespace, self.dest, numbers if self.nargs else numbers[0])


class Reals(Number):
    """Stores numbers above 0, or from 0 to `most`."""

    read, sign = staticmethod(reals), "X"


def add_imports(parser: argparse.ArgumentParser, *, quiet: bool = True) -> None:
    """Add the option --import, and usually --quiet."""
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="FILE_OR_MODULE",
        help="Python file (.py) or module that registers encodings or wavelets of your own; may "
        "be repeated",
    )  # fmt: skip
    if quiet:
        parser.add_argument("--quiet", action="store_true", help="print nothing but the tables")


# The type of a parameter in a docstring -> how argparse reads it. Numbers are checked later.
_KINDS: dict[str, dict[str, Any]] = {
    "int": {"type": whole_number, "metavar": "N"},
    "float": {"type": float, "metavar": "X"},
    "str": {"metavar": "NAME"},
    "path": {"metavar": "PATH"},
    "bool": {"action": "store_true", "default": None},
    "sequence of int": {"nargs": "+", "metavar": "N"},
    "sequence of str": {"nargs": "+", "metavar": "NAME"},
}


def add_documented(
    parser: argparse.ArgumentParser, function: Callable[..., Any], but: Collection[str] = (),
    **special: dict[str, Any],
) -> None:  # fmt: skip
    """Add an argument for each parameter of `function`, with the help of its docstring.

    Those in `but` are left out. `special` has further arguments of argparse for a parameter, and
    "flag", another name of its option. One without a default is a positional argument, or a
    required option if it is keyword-only.
    """
    part = (inspect.getdoc(function) or "").partition("Parameters\n----------\n")[2]
    part = part.partition("\nReturns\n")[0]
    known = inspect.signature(function).parameters
    for name, kind, text in re.findall(r"^(\w+) : (.+)\n((?:    .*\n|\n)+)", part, re.M):
        if name in ("imports", "progress", *but):
            continue
        kind, default = kind.removesuffix(", optional"), known[name].default
        text = re.sub(r"`(\w+)`", lambda match: _option(match[1], known), " ".join(text.split()))
        if choices := re.findall('"(.*?)"', kind):
            kind, special[name] = "str", {"choices": choices, **special.get(name, {})}
        needed = default is inspect.Parameter.empty
        positional = needed and known[name].kind is not inspect.Parameter.KEYWORD_ONLY
        if default not in (None, False, 0) and not needed and "default is" not in text:
            text += f" The default is {default}."
        if text[1:2].islower():  # not "AdamW ..."
            text = text[0].lower() + text[1:]
        kind = kind.partition(" or ")[0]
        arguments = {**_KINDS[kind], "help": text.rstrip("."), **special.get(name, {})}
        flag = arguments.pop("flag", None)
        if positional:
            parser.add_argument(name, **{**arguments, "metavar": name.upper()})
        else:
            flags = [*filter(None, [flag]), _option(name, known)]
            parser.add_argument(*flags, dest=name, required=needed, **arguments)


def _option(name: str, known: Any) -> str:
    return f"--{name.replace('_', '-')}" if name in known else name


def given(args: argparse.Namespace, *functions: Callable[..., Any]) -> dict[str, Any]:
    """Return what the user gave for the parameters of the functions."""
    names = {name for function in functions for name in inspect.signature(function).parameters}
    return {k: value for k, value in vars(args).items() if k in names and value is not None}


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option --json."""
    text = f"write the {what} to this file, as JSON. A file that is there is replaced"
    parser.add_argument("--json", metavar="FILE", help=text)


def check_json(args: argparse.Namespace) -> None:
    """Raise UsageError unless the file of --json can be written, and is not that of --png."""
    if args.json is not None and args.json == args.png:
        raise UsageError(f"--json and --png name the same file, {args.json}")
    if args.json is not None:
        _check_file("--json", args.json)


def check_picture(option: str, path: str) -> None:
    """Raise UsageError unless `path` can be written, and names a format of the pictures."""
    if not path.lower().endswith((".png", ".pdf", ".svg")):
        raise UsageError(f"{option} {path}: needs a name that ends in .png, .pdf or .svg")
    _check_file(option, path)


def _check_file(option: str, path: str) -> None:
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
    text = json.dumps(value, default=lambda x: x.tolist())  # arrays and scalars of NumPy
    finite = json.loads(text, parse_constant=lambda _: None)
    with writing(Path(args.json)):
        Path(args.json).write_text(json.dumps(finite) + "\n", "utf-8")
