"""Write the tables of README and docs, or check whether they are stale.

python -m docs.writers --write | --check [NAME ...]
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from benchmarks.command import Missing, add_root, new_parser

from . import WRITERS
from .pages import replaced


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a page is stale (--check) or a source is missing, else 0."""
    parser = new_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(WRITERS)}; or all")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="update the pages")
    what.add_argument("--check", action="store_true", help="change nothing; exit with 1 if stale")
    add_root(parser)
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(WRITERS):
        parser.error(f"no writer is called {', '.join(sorted(unknown))}")
    problems = []
    for name in args.names or WRITERS:
        writer = importlib.import_module(f"docs.writers.{name}")
        if problem := updated(writer, args.root, args.check):
            print(f"docs.writers: {problem}", file=sys.stderr)
            problems.append(problem)
    return 1 if problems else 0


def updated(writer: ModuleType, root: Path, check: bool) -> str:
    """Update a page and its pictures, or check the page; return what is wrong, or ""."""
    path = root / writer.PAGE
    old = new = path.read_text("utf-8")
    try:
        for name, text in writer.blocks(root).items():
            new = replaced(new, name, text, writer.PAGE)
        if not check and hasattr(writer, "draw"):
            writer.draw(root)
    except Missing as error:
        return str(error)
    if check and new != old:
        return f"{writer.PAGE} is stale: run make readme"
    if new != old:
        path.write_text(new, "utf-8")
    return ""


if __name__ == "__main__":
    sys.exit(main())
