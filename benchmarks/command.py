"""Shared by the commands of benchmarks: options, files of results, and Markdown tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks", "results")
PICTURES = Path("docs", "results")


class Missing(Exception):
    """A result, a tool or a marker is missing."""


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser, described by the first line of a module's docstring."""
    return argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])


def add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root",
        type=Path,
        default=ROOT,
        metavar="DIR",
        help="folder of the repository (default: this one)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")


def keep(results: dict, path: Path | None) -> None:
    """Write the results to the file of --json, if there is one."""
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def measuring_command(
    doc: str | None,
    measure: Callable[..., dict],
    table: Callable[[dict], str],
    argv: Sequence[str] | None,
    *,
    quick: dict[str, Any] | None = None,
    wrong: Callable[[dict], Any] = lambda results: False,
    **defaults: int,
) -> int:
    """Run the command of a measurement: measure, print the table and keep the results.

    Each of `defaults` is an option with a number, and an argument of `measure`. `quick` has the
    arguments for --quick. Return 0, or 1 if a tool is missing or the results are `wrong`.
    """
    parser = new_parser(doc)
    for name, default in defaults.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help="(default: %(default)s)"
        )
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help="a tiny size: a check of the code")
    add_json(parser)
    args = parser.parse_args(argv)
    options: dict[str, Any] = {name: getattr(args, name) for name in defaults}
    if quick and args.quick:
        options |= quick
    try:
        results = measure(**options)
    except Missing as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    print(table(results))
    keep(results, args.json)
    return 1 if wrong(results) else 0


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], align: str = "lr") -> str:
    """Return a Markdown table of cells that are Markdown.

    `align` has an l or r for each of the first columns; its last letter is for all further ones.
    """
    sides = chain(align, repeat(align[-1]))
    bars = ("---:" if side == "r" else "---" for _, side in zip(heads, sides, strict=False))
    lines = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    return "\n".join([next(lines), f"|{'|'.join(bars)}|", *lines])
