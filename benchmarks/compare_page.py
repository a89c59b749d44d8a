"""Write the tables of docs/results/index.md and more.md from kept comparisons.

python -m benchmarks.compare_page --keep FOLDER NAME    keep the results.json of a folder as NAME
python -m benchmarks.compare_page --add FOLDER NAME     add its rows to NAME, or take their place
python -m benchmarks.compare_page --write | --check     --write draws the pictures too
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from wavepe.analysis.plots import perplexity_by_length
from wavepe.experiments.protocols import Protocol
from wavepe.experiments.report import (
    headings,
    mean_and_spread,
    rows_of,
    sections,
)
from wavepe.experiments.settings import Settings
from wavepe.experiments.tables import markdown_rows

from .command import add_page, new_parser, write_page
from .compare_claims import BEST, LEARNED, claims
from .compare_kept import KEPT, keep_results, kept, made_with
from .readme import Missing, replaced, wrapped

PICTURES = Path("docs", "results")
PAGE, MORE = PICTURES / "index.md", PICTURES / "more.md"
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
# [W], table 3: perplexity of Ricker's sets of scales, in the preset's order, trained on 512 tokens.
# The keys are our lengths in bytes; the paper's are 512 tokens, then 2512.
PUBLISHED = {
    "512": (19.19, 19.25, 19.40, 19.55, 19.95, 19.24, 19.26, 19.30, 19.46, 19.80),
    "2048": (17.99, 18.02, 18.07, 21.73, 70.80, 17.84, 17.84, 18.02, 18.29, 21.31),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Keep results, or write the page; return the exit code."""
    parser = new_parser(__doc__)
    for option, what in (
        ("--keep", "keep the results of FOLDER as NAME"),
        ("--add", "add the rows of FOLDER to the kept NAME; rows that it has are replaced"),
    ):
        parser.add_argument(option, nargs=2, metavar=("FOLDER", "NAME"), help=what)
    add_page(parser, PAGE)
    args = parser.parse_args(argv)
    if args.keep or args.add:
        folder, name = args.keep or args.add
        keep_results(Path(folder), args.root / KEPT, name, add=bool(args.add))
    if not (args.write or args.check):
        return 0
    try:
        if args.write:
            draw(args.root)
    except Missing as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    return max(write_page(page, updated, args.root, args.check) for page in (PAGE, MORE))


def updated(text: str, root: Path) -> str:
    """Return a page with the tables of the kept results."""
    for name in re.findall(r"<!-- ([\w-]+):begin -->", text):
        text = replaced(text, name, SECTIONS[name](root), PAGE)
    return text


def protocols(root: Path) -> str:
    """Return the table of the longest length, with a column for each protocol."""
    results = kept(root, "wavelet")
    length = results["environment"]["settings"]["lengths"][-1]
    names = list(results["runs"][0]["protocols"])
    columns = [dict(rows_of(results["runs"], [length], "protocols", name)) for name in names]
    rows = [(name, [column[name][0] for column in columns]) for name in columns[0]]
    heads = [Protocol.parse(name, results["train_length"]).text for name in names]
    return markdown_rows("encoding", heads, rows)


def tables_of(*names: str, tables: int | None = None) -> Callable[[Path], str]:
    """Return a section with the first or all tables of each comparison, and how it was made."""

    def section(root: Path) -> str:
        parts = []
        for name in names:
            results = kept(root, name)
            settings = Settings.from_dict(results["environment"]["settings"])
            settings = replace(settings, protocols=settings.protocols[:1])
            for one in sections(results["runs"], settings)[:tables]:
                rows = markdown_rows("encoding", one.headings, one.rows)
                parts.append(f"{one.title}, mean ± standard deviation:\n\n{rows}")
            parts.append(f"{made_with(results)}\n")
        return "\n".join(parts)

    return section


def scale_sets(root: Path) -> str:
    """Return the table of literal and mirrored wavelets, with a row for each set of scales."""
    results = kept(root, "scales")
    settings = results["environment"]["settings"]
    lengths = settings["lengths"]
    cells = dict(rows_of(results["runs"], lengths))
    names, rows = settings["encodings"], []
    for name, other in zip(names[::2], names[1::2], strict=True):
        both = zip(cells[name], cells[other], strict=True)
        rows.append((name, [f"{one.strip('*')} / {two.strip('*')}" for one, two in both]))
    table = markdown_rows("scales", headings(lengths, results["train_length"]), rows)
    return f"Perplexity, literal / mirrored:\n\n{table}\n{made_with(results)}"


def bands(root: Path) -> str:
    """Return the table of predicted and measured bands, by trained length and base."""
    rows, parts = [], []
    for path in sorted((root / KEPT).glob("bands-length-*.json"), key=_number_in):
        results = json.loads(path.read_text("utf-8"))
        parts.append(results)
        settings = Settings.from_dict(results["environment"]["settings"])
        *_, table = sections(results["runs"], settings)
        rows += [(f"{results['train_length']}, {name}", cells) for name, cells in table.rows]
    if not rows:
        raise Missing(f"{KEPT}/bands-length-*.json are missing")
    text = markdown_rows("trained length, base", table.headings, rows)
    predicted, measured = (
        [float(cells[column].split()[0]) for _, cells in rows] for column in (0, -1)
    )
    ratios = [one / other for one, other in zip(measured, predicted, strict=True)]
    found = (
        f"At the end the measured band is {min(ratios):.2f} to {max(ratios):.2f} times j*, and "
        f"{statistics.fmean(ratios):.2f} times on average. The rank correlation of measured and "
        f"predicted bands over the rows is {_rank_correlation(measured, predicted):.2f}."
    )
    return f"{text}\n{wrapped(found)}\n\n{made_with(*parts)}"


def _number_in(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def sweep(root: Path) -> str:
    """Return the table of p-RoPE at inference, with the main table's models."""
    results = kept(root, "models")
    heads = [f"p = {fraction:g}" for fraction in results["fractions"]]
    rows = []
    for name, seeds in results["sweeps"].items():
        for length in seeds[0]:
            columns = zip(*(one[length] for one in seeds), strict=True)
            rows.append((f"{name}, {length} bytes", [mean_and_spread(c) for c in columns]))
    return markdown_rows("model", heads, rows)


def windows(root: Path) -> str:
    """Return the table of the windows of three models' heads, at twice the trained length."""
    results = kept(root, "models")
    rows = [
        (name, [", ".join(map(str, layer)) for layer in layers])
        for name, layers in results["windows"].items()
    ]
    layers = [f"layer {number}" for number in range(len(rows[0][1]))]
    return markdown_rows("model", layers, rows)


def scale_ranks(root: Path) -> str:
    """Return the table of Spearman's rank correlations of our perplexities and the paper's.

    A row is literal or mirrored wavelets; cells are mean, lowest and highest over the seeds.
    """
    results = kept(root, "scales")
    names = results["environment"]["settings"]["encodings"]
    seeds = range(results["environment"]["settings"]["seeds"])
    found = {(run["encoding"], run["seed"]): run["perplexity"] for run in results["runs"]}
    rows = []
    for sign, own in (("literal", names[::2]), ("mirrored", names[1::2])):
        cells = []
        for length, published in PUBLISHED.items():
            each = [
                _rank_correlation(published, [found[name, seed][length] for name in own])
                for seed in seeds
            ]
            cells.append(f"{statistics.fmean(each):.2f} ({min(each):.2f} to {max(each):.2f})")
        rows.append((sign, cells))
    return markdown_rows("sign", ["512 (published at 512)", "2048 (published at 2512)"], rows)


def _rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share their rank."""
    ranks = [[sum(v < x for v in row) + sum(v == x for v in row) / 2 for x in row]
             for row in (one, other)]  # fmt: skip
    return statistics.correlation(*ranks)


def why(root: Path) -> str:
    """Return what encodings add to the scores, near and far."""
    from .score_parts import NAME, table  # needs torch and transformers

    return table(kept(root, NAME))


SECTIONS: dict[str, Callable[[Path], str]] = {
    "claims": claims,
    "wavelet": tables_of("wavelet"),
    "protocols": protocols,
    "combinations": tables_of("combinations"),
    "larger": tables_of("larger-prose"),
    "score-parts": why,
    "recent": tables_of("recent"),
    "theta": tables_of("theta"),
    # The perplexity of the answers says nothing more.
    "tasks": tables_of("tasks-needle", "tasks-keys", "tasks-tracking", tables=1),
    "kinds": tables_of("kinds"),
    "scales": scale_sets,
    "scale-ranks": scale_ranks,
    "families": tables_of("families"),
    "bands": bands,
    "sweep": sweep,
    "windows": windows,
    "finetune": tables_of("finetune"),
}


def draw(root: Path) -> None:
    """Draw the pictures of README and the page."""
    (root / PICTURES).mkdir(exist_ok=True)
    for name, rows in (("wavelet", HEADLINE), ("combinations", COMBINED)):
        results = kept(root, name)
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


if __name__ == "__main__":
    sys.exit(main())
