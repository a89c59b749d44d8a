"""docs/results/images.md, from docs/results/rope-images.json.

That file and docs/results/rope-images.png are copies of results.json and rope-images.png, which
examples/rope_images.py writes.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.command import table

from .pages import in_threads, kept, wrapped

PAGE = Path("docs", "results", "images.md")
IMAGES = Path("docs", "results", "rope-images.json")


def blocks(root: Path) -> dict[str, str]:
    results = kept(root, IMAGES)
    grids, runs, settings = results["grids"], results["runs"], results["settings"]
    about, rows = results["environment"], []
    for encoding in dict.fromkeys(run["encoding"] for run in runs):
        accuracies = [run["accuracy"] for run in runs if run["encoding"] == encoding]
        cells = [encoding]
        for grid in grids:
            shares = [accuracy[str(grid)] for accuracy in accuracies]
            cells.append(f"{statistics.fmean(shares):.3f} ± {statistics.stdev(shares):.3f}")
        rows.append(cells)
    seeds = len({run["seed"] for run in runs})
    slowest = max(run["seconds"] for run in runs)
    made = (
        f"Share of right answers of {settings['test_images']} images, mean and standard deviation "
        f"over {seeds} seeds. Chance gives one in eight. The models are trained on "
        f"{results['grid']} x {results['grid']} patches, in {settings['steps']} steps of "
        f"{settings['batch']} images, with theta {settings['theta']:g}, {settings['layers']} "
        f"layers of {settings['dim']} and {settings['heads']} heads. A training takes at most "
        f"{slowest:.0f} s. {about['machine']}, "
        f"{in_threads(about['threads'])}, torch {about['torch']}, {about['date']}."
    )
    picture = "![Images of 8 x 8 and 16 x 16 patches, and the share of right answers]"
    parts = [
        f"{picture}(rope-images.png)",
        table(["RoPE", *(f"{n} x {n} patches" for n in grids)], rows),
    ]
    return {"rope-images": "\n\n".join([*parts, wrapped(made)])}
