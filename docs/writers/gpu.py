"""docs/guides/gpu.md, from benchmarks/results/gpu-*.json.

`python -m benchmarks.gpu_window figures --out FOLDER` writes such a file: rows.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.command import RESULTS

from .pages import commit_of, wrapped

PAGE = Path("docs", "guides", "gpu.md")
NOTHING = "There is no result of a GPU."
PHASES = ("forward", "forward and backward")
OURS = "wavepe"


def blocks(root: Path) -> dict[str, str]:
    runs = [json.loads(p.read_text("utf-8")) for p in sorted((root / RESULTS).glob("gpu-*.json"))]
    runs = [run for run in runs if not run["environment"]["interpreted"]]
    return {"gpu": "\n\n".join(map(section, runs)) or NOTHING}


def section(run: dict[str, Any]) -> str:
    """Return all tables of one GPU that have rows."""
    about, rows = run["environment"], run["rows"]
    words = (
        f"{about['gpu']}; torch {about['torch']}, Triton {about['triton']}, transformers "
        f"{about['transformers']}; {about['date'][:10]}, {commit_of(about)}."
    )
    parts = [f"### {about['gpu']}", wrapped(words), *_checks(rows)]
    timed = sorted(_of(rows, "times"), key=lambda row: (row["d"], row["length"]))
    for phase in PHASES:
        ways = list(dict.fromkeys(n for row in timed for n in row["seconds"][phase] if n != OURS))
        if not ways:
            continue
        title = f"Attention, bfloat16, causal, {phase}: wavepe's time, and the others' as multiples"
        parts += [
            f"{title} of it (above 1: wavepe is faster).",
            _table(timed, phase, "seconds", "ms", ways, 1e3, lambda x, ours: x / ours),
            f"The same, {phase}: MiB that a call holds beside its inputs.",
            _table(timed, phase, "memory", "MiB", ways, 2.0**-20, lambda x, _: x / 2**20),
        ]
    parts += [*_training(rows), *_rope(rows), *_left(rows)]
    return "\n\n".join(parts)


def _of(rows: list[dict], kind: str) -> list[dict]:
    """Return the rows of a kind of task that have figures."""
    return [row for row in rows if row["name"].split()[0] == kind and not _why(row)]


def _why(row: dict) -> str:
    """Return why a row has no figures, or ""."""
    return row.get("error") or row.get("not_run") or ""


def _checks(rows: list[dict]) -> list[str]:
    checks = [check for row in rows for check in row.get("checks", ())]
    wrong = [check for check in checks if not check["error"] <= 1]
    sentence = f"{len(checks) - len(wrong)} of {len(checks)} checks are within their bounds"
    named = "; ".join(f"{c['name']} is off by {c['error']:.2g} bounds" for c in wrong)
    return [wrapped(f"{sentence}{': ' + named if wrong else ''}.")] if checks else []


def _table(
    rows: list[dict],
    phase: str,
    what: str,
    unit: str,
    ways: list[str],
    of_ours: float,
    cell: Callable[[float, float], float],
) -> str:
    lines = [f"| head size | length | wavepe, {unit} | {' | '.join(ways)} |"]
    lines.append("|---:|---:|---:|" + "---:|" * len(ways))
    for row in rows:
        figures = row[what][phase]
        ours = figures.get(OURS)
        cells = [
            f"{cell(figures[way], ours):.{2 if what == 'seconds' else 0}f}"
            if ours is not None and figures.get(way) is not None
            else ""
            for way in ways
        ]
        first = "" if ours is None else f"{of_ours * ours:.{2 if what == 'seconds' else 0}f}"
        lines.append(f"| {row['d']} | {row['length']} | {first} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _training(rows: list[dict]) -> list[str]:
    trainings = _of(rows, "training")
    if not trainings:
        return []
    names = list(trainings[0]["seconds"])
    lines = [f"| head size | {', ms | '.join(names)}, ms | {', MiB | '.join(names)}, MiB |"]
    lines.append("|---:|" + "---:|" * 2 * len(names))
    for row in trainings:
        cells = [f"{1e3 * row['seconds'][name]:.2f}" for name in names]
        cells += [f"{row['memory'][name] / 2**20:.0f}" for name in names]
        lines.append(f"| {row['d']} | {' | '.join(cells)} |")
    size = trainings[0]
    words = (
        f"A training step of a Llama of {size['layers']} layers of {size['hidden']}, "
        f"{size['batch']} sequences of {size['length']} tokens, bfloat16 by autocast, AdamW:"
    )
    return [wrapped(words), "\n".join(lines)]


def _rope(rows: list[dict]) -> list[str]:
    timings = [each for row in _of(rows, "rope") for each in row["rows"]]
    if not timings:
        return []
    names = list(dict.fromkeys(name for row in timings for name in row["seconds"]))
    lines = [f"| dtype | length | {' | '.join(names)} |"]
    lines.append("|---|---:|" + "---:|" * len(names))
    for row in timings:
        times = (row["seconds"].get(name) for name in names)
        cells = ["" if time is None else f"{1e6 * time:.1f}" for time in times]
        lines.append(f"| {row['dtype']} | {row['length']} | {' | '.join(cells)} |")
    return ["`rope_qk` and a copy of the same bytes, microseconds:", "\n".join(lines)]


def _left(rows: list[dict]) -> list[str]:
    """Return a line for `compare`, and a line for each row without figures."""
    reasons = [
        f"`wavepe compare --device cuda --steps {row['steps']}`: {row['seconds']:.0f} s."
        for row in _of(rows, "compare")
    ]
    names: dict[str, list[str]] = {}
    for row in rows:
        if _why(row):
            names.setdefault(_why(row), []).append(row["name"])
    lines = [f"- {', '.join(tasks)}: {why}" for why, tasks in names.items()]
    lines += [
        f"- {row['name']}, {way}: {error}"
        for row in _of(rows, "times")
        for way, error in row["errors"].items()
    ]
    return [*reasons, *(["Without figures:\n\n" + "\n".join(lines)] if lines else [])]
