"""docs/results/more.md: further comparisons."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from wavepe.experiments.report import headings, mean_and_spread, rows_of, sections
from wavepe.experiments.settings import Protocol, Settings
from wavepe.experiments.tables import markdown_rows

from benchmarks.command import Missing
from benchmarks.compare_kept import KEPT

from .compare import tables
from .pages import wrapped
from .runs import comparison, made_with

PAGE = Path("docs", "results", "more.md")
# [W], table 3: perplexity of Ricker's sets of scales, in the preset's order, trained on 512 tokens.
# The keys are our lengths in bytes; the paper's are 512 tokens, then 2512.
PUBLISHED = {
    "512": (19.19, 19.25, 19.40, 19.55, 19.95, 19.24, 19.26, 19.30, 19.46, 19.80),
    "2048": (17.99, 18.02, 18.07, 21.73, 70.80, 17.84, 17.84, 18.02, 18.29, 21.31),
}


def blocks(root: Path) -> dict[str, str]:
    plain = ("recent", "theta", "kinds", "families", "finetune")
    return {name: tables(root, name) for name in plain} | {
        "protocols": protocols(root),
        "scales": scale_sets(root),
        "scale-ranks": scale_ranks(root),
        "bands": bands(root),
        "sweep": sweep(root),
        "windows": windows(root),
    }


def protocols(root: Path) -> str:
    """Return the table of the longest length, with a column for each protocol."""
    results = comparison(root, "wavelet")
    length = results["environment"]["settings"]["lengths"][-1]
    names = list(results["runs"][0]["protocols"])
    columns = [dict(rows_of(results["runs"], [length], "protocols", name)) for name in names]
    rows = [(name, [column[name][0] for column in columns]) for name in columns[0]]
    heads = [Protocol.parse(name, results["train_length"]).text for name in names]
    return markdown_rows("encoding", heads, rows)


def scale_sets(root: Path) -> str:
    """Return the table of literal and mirrored wavelets, with a row for each set of scales."""
    results = comparison(root, "scales")
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
    figures = (
        f"At the end the measured band is {min(ratios):.2f} to {max(ratios):.2f} times j*, and "
        f"{statistics.fmean(ratios):.2f} times on average. The rank correlation of measured and "
        f"predicted bands over the rows is {_rank_correlation(measured, predicted):.2f}."
    )
    return f"{text}\n{wrapped(figures)}\n\n{made_with(*parts)}"


def _number_in(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def sweep(root: Path) -> str:
    """Return the table of p-RoPE at inference, with the main table's models."""
    results = comparison(root, "models")
    heads = [f"p = {fraction:g}" for fraction in results["fractions"]]
    rows = []
    for name, seeds in results["sweeps"].items():
        for length in seeds[0]:
            columns = zip(*(one[length] for one in seeds), strict=True)
            rows.append((f"{name}, {length} bytes", [mean_and_spread(c) for c in columns]))
    return markdown_rows("model", heads, rows)


def windows(root: Path) -> str:
    """Return the table of the windows of three models' heads, at twice the trained length."""
    results = comparison(root, "models")
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
    results = comparison(root, "scales")
    names = results["environment"]["settings"]["encodings"]
    seeds = range(results["environment"]["settings"]["seeds"])
    perplexities = {(run["encoding"], run["seed"]): run["perplexity"] for run in results["runs"]}
    rows = []
    for sign, specs in (("literal", names[::2]), ("mirrored", names[1::2])):
        cells = []
        for length, published in PUBLISHED.items():
            each = [
                _rank_correlation(published, [perplexities[name, seed][length] for name in specs])
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
