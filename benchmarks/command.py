"""The options that the commands of benchmarks share, and the writing of pages of docs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .readme import Missing, add_root

RESULTS = Path("benchmarks", "results")


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser, described by the first line of a module's docstring."""
    return argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")


def add_repeats(parser: argparse.ArgumentParser, default: int, what: str) -> None:
    parser.add_argument(
        "--repeats", type=int, default=default, metavar="N", help=f"{what} (default {default})"
    )


def add_quick(parser: argparse.ArgumentParser, what: str = "a tiny size") -> None:
    parser.add_argument("--quick", action="store_true", help=f"{what}, to check that this runs")


def keep(results: dict, path: Path | None) -> None:
    """Write the results to the file of --json, if there is one."""
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def kept_runs(root: Path, name: str, command: str) -> list[dict]:
    """Return the results <name>-<version>.json, one for each transformers, the newest first.

    Raises
    ------
    Missing
        There are none. The message names the command that makes them.
    """
    runs = kept_results(root, name, f": run {command}")
    return sorted(runs, key=lambda run: _version(run["transformers"]), reverse=True)


def kept_results(root: Path, name: str, advice: str = "") -> list[dict]:
    """Return the results <name>-*.json, by name of the file; Missing if there are none."""
    paths = sorted((root / RESULTS).glob(f"{name}-*.json"))
    if not paths:
        raise Missing(f"no {name}-*.json in {RESULTS}{advice}")
    return [json.loads(path.read_text("utf-8")) for path in paths]


def _version(text: str) -> list[int]:
    return [int(number) for number in text.split(".")]


def add_page(parser: argparse.ArgumentParser, page: Path, required: bool = False) -> None:
    what = parser.add_mutually_exclusive_group(required=required)
    what.add_argument("--write", action="store_true", help=f"update {page} from the kept figures")
    what.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if it is stale"
    )
    add_root(parser)


def write_page(page: Path, updated: Callable[[str, Path], str], root: Path, check: bool) -> int:
    """Update a page of docs, or check that it is up to date; return the exit code.

    `updated` takes the old text and the repository's folder, and returns the new text.
    """
    path = root / page
    old = path.read_text("utf-8")
    try:
        new = updated(old, root)
    except Missing as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    if check and new != old:
        print(f"benchmarks: {page} is stale: run make readme", file=sys.stderr)
        return 1
    if new != old:
        path.write_text(new, "utf-8")
    return 0


def measuring_command(
    doc: str | None,
    page: Path,
    updated: Callable[[str, Path], str],
    measure: Callable[[], dict],
    section: Callable[[dict], str],
    argv: Sequence[str] | None,
) -> int:
    """Run the command of a module that measures and has a page; return the exit code.

    It measures with --json, and if neither --write nor --check is given.
    """
    parser = new_parser(doc)
    add_json(parser)
    add_page(parser, page)
    args = parser.parse_args(argv)
    if args.json or not (args.write or args.check):
        try:
            results = measure()
        except Missing as error:
            print(f"benchmarks: {error}", file=sys.stderr)
            return 1
        print(section(results))
        keep(results, args.json)
    if args.write or args.check:
        return write_page(page, updated, args.root, args.check)
    return 0


def page_command(
    doc: str | None, page: Path, updated: Callable[[str, Path], str], argv: Sequence[str] | None
) -> int:
    """Run the command of a module that writes or checks a page; return the exit code."""
    parser = new_parser(doc)
    add_page(parser, page, required=True)
    args = parser.parse_args(argv)
    return write_page(page, updated, args.root, args.check)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of cells that are Markdown."""
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])
