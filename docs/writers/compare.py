"""docs/results/index.md: the main comparisons, their claims, and README's pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from wavepe.analysis.plots import perplexity_by_length
from wavepe.experiments.report import sections
from wavepe.experiments.settings import Settings
from wavepe.experiments.tables import markdown_rows

from benchmarks import score_parts
from benchmarks.command import PICTURES
from benchmarks.compare_kept import KEPT

from . import claims
from .claims import BEST, LEARNED
from .runs import comparison, made_with

PAGE = Path("docs", "results", "index.md")
# README's picture has no room for all rows. It shows the encodings in use, and the best ones.
HEADLINE = (
    "none",
    "rope",
    "rope/rope:type=yarn,factor=scaled",
    "rope:theta=128,inference_theta=scaled",
    "alibi",
    "kerple",
    "transformer_xl",
    "wavelet:scales=6",
    BEST,
)
# The picture of combinations has these.
COMBINED = (
    "rope",
    "rope+alibi",
    "transformer_xl",
    "rope+wavelet:scales=6",
    "rope@::2+wavelet:scales=6@1::2",
    "wavelet:scales=6",
    LEARNED,
    "wavelet:scales=6+kerple",
    BEST,
)


def blocks(root: Path) -> dict[str, str]:
    return {
        "claims": claims.questions(root),
        "wavelet": tables(root, "wavelet"),
        "combinations": tables(root, "combinations"),
        "larger": tables(root, "larger-prose", "larger-11m"),
        "score-parts": score_parts.table(comparison(root, score_parts.NAME)),
        # The perplexity of the answers says nothing more.
        "tasks": tables(root, "tasks-needle", "tasks-keys", "tasks-tracking", most=1),
    }


def tables(root: Path, *names: str, most: int | None = None) -> str:
    """Return the first or all tables of each comparison, and how it was made."""
    parts = []
    for name in names:
        results = comparison(root, name)
        settings = Settings.from_dict(results["environment"]["settings"])
        settings = replace(settings, protocols=settings.protocols[:1])
        for one in sections(results["runs"], settings)[:most]:
            rows = markdown_rows("encoding", one.headings, one.rows)
            means = ", mean ± standard deviation" if settings.seeds > 1 else ""
            parts.append(f"{one.title}{means}:\n\n{rows}")
        parts.append(f"{made_with(results)}\n")
    return "\n".join(parts)


def draw(root: Path) -> None:
    """Draw the pictures of README and the page."""
    claims.draw(root)
    for name, rows in (("wavelet", HEADLINE), ("combinations", COMBINED)):
        results = comparison(root, name)
        perplexity_by_length(
            [run for row in rows for run in results["runs"] if run["encoding"] == row],
            root / PICTURES / f"{name}.png",
            train_length=results["train_length"],
        )
    for path in sorted((root / KEPT).glob("tasks-*.json")):
        task = json.loads(path.read_text("utf-8"))
        settings = Settings.from_dict(task["environment"]["settings"])
        first, *_ = sections(task["runs"], settings)
        assert first.draw is not None
        first.draw(root / PICTURES / f"{path.stem}.png")
