"""docs/guides/gpu.md and its pictures, from benchmarks/results/gpu-*.json.

On a GPU, `python -m benchmarks.gpu_window figures --out FOLDER` writes such a file: rows.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wavepe.analysis.plots.drawing import COLOURS, GRID, new_figure

from benchmarks.command import PICTURES, RESULTS, table

from .pages import commit_of, wrapped

PAGE = Path("docs", "guides", "gpu.md")
NOTHING = "There is no result of a GPU."
PHASES = ("forward", "forward and backward")
# Names in the results: words of the picture, colour, and whether the scores have wavelets.
WAYS = {
    "wavepe": ("wavepe", COLOURS[0], True),
    "Flex": ("FlexAttention", COLOURS[1], True),
    "Flex, band and rest": ("FlexAttention, two calls", COLOURS[2], True),
    "wavepe, no term": ("wavepe", COLOURS[0], False),
    "SDPA cuDNN, no term": ("cuDNN", COLOURS[5], False),
    "SDPA flash, no term": ("flash-attention 2", COLOURS[4], False),
    "Flex, no term": ("FlexAttention", COLOURS[1], False),
}


def blocks(root: Path) -> dict[str, str]:
    return {"gpu": "\n\n".join(section(name, run) for name, run in _runs(root)) or NOTHING}


def draw(root: Path) -> None:
    """Draw the times of attention, a picture for each GPU."""
    for name, run in _runs(root):
        if timed := _timed(run["rows"]):
            _draw(timed, run["environment"]["gpu"], root / PICTURES / f"{name}.png")


def _runs(root: Path) -> list[tuple[str, dict[str, Any]]]:
    paths = sorted((root / RESULTS).glob("gpu-*.json"))
    runs = [(path.stem, json.loads(path.read_text("utf-8"))) for path in paths]
    return [(name, run) for name, run in runs if not run["environment"]["interpreted"]]


def section(name: str, run: dict[str, Any]) -> str:
    """Return all that is shown of one GPU."""
    about, rows = run["environment"], run["rows"]
    words = (
        f"{about['gpu']}; torch {about['torch']}, Triton {about['triton']}, transformers "
        f"{about['transformers']}; {about['date'][:10]}, {commit_of(about)}."
    )
    parts = [f"### {about['gpu']}", wrapped(words), *_checks(rows)]
    if timed := _timed(rows):
        legend = (
            "Milliseconds of attention in bfloat16, causal, for 65536 rows of queries. Full bars "
            "have the wavelets' term in their scores, light ones have no positions at all."
        )
        parts += [f"![{legend}](../results/{name}.png)", wrapped(legend), *_memory(timed)]
    return "\n\n".join([*parts, *_training(rows), *_rope(rows), *_left(rows)])


def _timed(rows: list[dict]) -> list[dict]:
    return sorted(_of(rows, "times"), key=lambda row: (row["d"], row["length"]))


def _draw(timed: list[dict], gpu: str, path: Path) -> None:
    """Draw a row of panels for each problem: forward, and forward and backward."""
    figure = new_figure(8, 0.6 + 1.9 * len(timed))
    grid = figure.subplots(len(timed), 2, sharex="col", sharey="row", squeeze=False)
    figure.suptitle(gpu, fontsize="medium")
    for axes_row, row in zip(grid, timed, strict=True):
        for axes, phase in zip(axes_row, PHASES, strict=True):
            seconds = row["seconds"][phase]
            names = [way for way in WAYS if way in seconds][::-1]
            for place, way in enumerate(names):
                _, colour, term = WAYS[way]
                value = 1e3 * seconds[way]
                axes.barh(place, value, color=colour, alpha=1 if term else 0.45)
                axes.text(value, place, f" {value:.2f}", va="center", fontsize=8)
            labels = [WAYS[way][0] + ", no positions" * (not WAYS[way][2]) for way in names]
            axes.set_yticks(range(len(names)), labels, fontsize=9)
            problem = f"head size {row['d']}, {row['length']} tokens, "
            axes.set_title(problem * (phase == PHASES[0]) + phase, fontsize=9, loc="left")
            axes.grid(True, axis="x", **GRID)
            axes.set_axisbelow(True)
            axes.margins(x=0.15)
    for axes in grid[-1]:
        axes.set_xlabel("milliseconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _memory(timed: list[dict]) -> list[str]:
    """Return the memory of each way, for the longest problem that was timed."""
    row = max(timed, key=lambda row: (row["d"], row["length"]))
    lines = []
    for way, (words, _, term) in WAYS.items():
        cells = [row["memory"][phase].get(way) for phase in PHASES]
        if None not in cells:
            lines.append(
                (words, "wavelets" if term else "none", *(f"{x / 2**20:.0f}" for x in cells))
            )
    words = (
        f"Memory of a call in addition to its inputs, in MiB, head size {row['d']}, "
        f"{row['length']} tokens:"
    )
    return [words, table(("way", "positions", *PHASES), lines, "llr")]


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


def _training(rows: list[dict]) -> list[str]:
    trainings = _of(rows, "training")
    if not trainings:
        return []
    size = trainings[0]
    words = (
        f"A training step of a Llama of {size['layers']} layers of {size['hidden']}, "
        f"{size['batch']} sequences of {size['length']} tokens, bfloat16 by autocast, AdamW:"
    )
    lines = [
        (
            str(row["d"]),
            name,
            f"{1e3 * row['seconds'][name]:.2f} ms",
            f"{row['memory'][name] / 2**20:.0f} MiB",
        )
        for row in trainings
        for name in row["seconds"]
    ]
    return [wrapped(words), table(("head size", "attention", "time", "memory"), lines, "rlr")]


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
