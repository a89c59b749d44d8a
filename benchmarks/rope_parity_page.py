"""Write the kept results of rope_parity into docs/internals/rope-exactness.md.

python -m benchmarks.rope_parity_page --write | --check
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .command import kept_runs, page_command
from .readme import replaced
from .rope_accuracy import PAGE

COLUMNS = ("inv_freq", "float64", "factor", "cos, sin")


def section(runs: Sequence[dict[str, Any]]) -> str:
    """Return a table for each version of transformers."""
    return "\n\n".join(_table(run) for run in runs)


def _table(run: dict[str, Any]) -> str:
    heads = ["type", "configurations", *COLUMNS]
    lines = [
        f"**transformers {run['transformers']}** (torch {run['torch']}, {run['date']})",
        "",
        "| " + " | ".join(heads) + " |",
        "|---" + "|---:" * (len(heads) - 1) + "|",
    ]
    rows = sorted(run["rows"], key=lambda row: row["known exception"])
    lines += [_row(row) for row in rows if row["configurations"]]
    counted = [row for row in rows if not row["known exception"]]
    whole = {key: max(row[key] for row in counted) for key in COLUMNS}
    for key in ("configurations", "excused"):
        whole[key] = sum(row[key] for row in counted)
    lines.append(_row({"type": "all but the exception" if counted != rows else "all", **whole}))
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> str:
    name = row["type"] + ", known exception" * row.get("known exception", False)
    cells = [name, str(row["configurations"]), *(_number(row[key]) for key in COLUMNS)]
    if row["excused"]:
        cells[2] += f" ({row['excused']} above 2e-6)"
    return "| " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-") if value else "0"


def updated(text: str, root: Path) -> str:
    """Return the page with the tables of all kept runs, the newest version first."""
    runs = kept_runs(root, "rope-parity", "benchmarks.rope_parity --json")
    return replaced(text, "parity", section(runs), PAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if the page is stale (--check) or a source is missing."""
    return page_command(__doc__, PAGE, updated, argv)


if __name__ == "__main__":
    sys.exit(main())
