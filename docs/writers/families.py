"""docs/reference/families.md, from hf-families-*.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.command import table
from benchmarks.hf_families import COLUMNS

from .pages import kept_runs

PAGE = Path("docs", "reference", "families.md")


def blocks(root: Path) -> dict[str, str]:
    """Return the exceptions of all kept versions of transformers."""
    runs = kept_runs(root, "hf-families", "hf_families")
    return {"families": "\n\n".join(map(exceptions, runs))}


def exceptions(run: dict[str, Any]) -> str:
    """Return the sentence that all works, and a table of the exceptions."""
    families = run["families"]
    heading = f"**transformers {run['transformers']}** (torch {run['torch']}): "
    everything = f"all {len(COLUMNS)} situations work in all {len(families)} families"
    by_outcome: dict[tuple[str, ...], list[str]] = {}  # outcome and families -> situations
    for name, situation in COLUMNS.items():
        outcomes = {family: row.get(name, "not run") for family, row in families.items()}
        for outcome in sorted(set(outcomes.values()) - {"right"}):
            where = (family for family in outcomes if outcomes[family] == outcome)
            by_outcome.setdefault((outcome, *where), []).append(f"*{situation}*")
    if not by_outcome:
        return f"{heading}{everything}."
    rows = [
        ("; ".join(situations), outcome, ", ".join(where))
        for (outcome, *where), situations in by_outcome.items()
    ]
    words = f"{heading}{everything}, except these:"
    return f"{words}\n\n{table(('situation', 'result', 'families'), rows, 'l')}"
