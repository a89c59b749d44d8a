"""Write the table of docs/results/images.md from docs/results/rope-images.json.

That file and docs/results/rope-images.png are copies of results.json and rope-images.png, which
examples/rope_images.py writes.

python -m benchmarks.rope_images_page --write | --check
"""

from __future__ import annotations

import statistics
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from .command import page_command
from .hf_page import kept
from .readme import in_threads, replaced

PAGE = Path("docs", "results", "images.md")
RESULTS = Path("docs", "results", "rope-images.json")


def section(results: dict) -> str:
    """Return the picture, the table and how it was made, as Markdown."""
    grids, runs, settings = results["grids"], results["runs"], results["settings"]
    about = results["environment"]
    lines = [
        "![Images of 8 x 8 and 16 x 16 patches, and the share of right answers](rope-images.png)",
        "",
        f"| RoPE | {' | '.join(f'{n} x {n} patches' for n in grids)} |",
        "|---|" + "---:|" * len(grids),
    ]
    for encoding in dict.fromkeys(run["encoding"] for run in runs):
        found = [run["accuracy"] for run in runs if run["encoding"] == encoding]
        cells = []
        for grid in grids:
            shares = [accuracy[str(grid)] for accuracy in found]
            cells.append(f"{statistics.fmean(shares):.3f} ± {statistics.stdev(shares):.3f}")
        lines.append(f"| {encoding} | {' | '.join(cells)} |")
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
    return "\n".join([*lines, "", textwrap.fill(made, 100, break_on_hyphens=False)])


def updated(text: str, root: Path) -> str:
    """Return the page with the table of the kept figures."""
    return replaced(text, "rope-images", section(kept(RESULTS, root)), PAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if the page is stale (--check) or a source is missing."""
    return page_command(__doc__, PAGE, updated, argv)


if __name__ == "__main__":
    sys.exit(main())
