"""docs/internals/rope-exactness.md, from rope-accuracy.json and rope-parity-*.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import rope_accuracy
from benchmarks.command import RESULTS, table

from .pages import kept, kept_runs

PAGE = Path("docs", "internals", "rope-exactness.md")
ACCURACY = RESULTS / "rope-accuracy.json"
COLUMNS = ("inv_freq", "float64", "factor", "cos, sin")


def blocks(root: Path) -> dict[str, str]:
    parity = kept_runs(root, "rope-parity", "rope_parity --json")
    return {"accuracy": accuracy(root), "parity": "\n\n".join(map(parity_of, parity))}


def accuracy(root: Path) -> str:
    """Return the errors by decade, and how they were measured."""
    results = kept(root, ACCURACY, "rope_accuracy")
    about, total = results["environment"], sum(row["positions"] for row in results["rows"])
    return (
        f"{rope_accuracy.table(results)}\n\n"
        f"{total} positions times {results['dim'] // 2} pairs; wavepe {about['wavepe']} "
        f"({', '.join(about['variants'])}), torch {about['torch']}, transformers "
        f"{about['transformers']}, {about['date']}."
    )


def parity_of(run: dict[str, Any]) -> str:
    """Return the largest differences to one version of transformers."""
    rows = [row for row in run["rows"] if row["configurations"]]
    whole = {"type": "all"} | {key: max(row[key] for row in rows) for key in COLUMNS}
    for key in ("configurations", "excused"):
        whole[key] = sum(row[key] for row in rows)
    cells = [_cells(row) for row in (*rows, whole)]
    named = f"**transformers {run['transformers']}** (torch {run['torch']}, {run['date']})"
    return f"{named}\n\n{table(('type', 'configurations', *COLUMNS), cells)}"


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["type"], str(row["configurations"]), *(_number(row[key]) for key in COLUMNS)]
    if row["excused"]:
        cells[2] += f" ({row['excused']} above 2e-6)"
    return cells


def _number(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-") if value else "0"
