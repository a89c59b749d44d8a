"""The table of a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ..tables import markdown_rows, print_rows
from ..terminal import wrapped


def rows_of(runs: Sequence[dict[str, Any]], lengths: Sequence[int]) -> list[tuple[str, list[str]]]:
    """(encoding, one cell per length), seeds joined, the best of each column starred, ties too.

    A cell is the perplexity, or mean and standard deviation over several seeds.
    """
    values: dict[str, list[list[float]]] = {}
    for run in runs:
        cells = values.setdefault(run["encoding"], [[] for _ in lengths])
        for cell, length in zip(cells, lengths, strict=True):
            cell.append(run["perplexity"][str(length)])
    means = {  # as they are printed
        name: [round(statistics.fmean(cell), 2) for cell in cells] for name, cells in values.items()
    }
    best = [min(column) for column in zip(*means.values(), strict=True)]
    return [
        (
            name,
            [
                _number(cell) + ("*" if mean == low else "")
                for cell, mean, low in zip(cells, means[name], best, strict=True)
            ],
        )
        for name, cells in values.items()
    ]


def headings(lengths: Sequence[int], train_length: int) -> list[str]:
    """One heading per length: "256 (2x)"."""
    heads = []
    for length in lengths:
        factor = length / train_length
        text = f"{factor:.3g}" if factor < 1000 else f"{factor:.0f}"  # never 1.02e+03
        heads.append(f"{length} ({text}x)")
    return heads


def title(train_length: int) -> str:
    """What the numbers are."""
    return (
        f"Perplexity per byte of held-out text, whole sequence, trained on {train_length} bytes "
        "(* best of its column)"
    )


def print_table(runs: Sequence[dict[str, Any]], lengths: Sequence[int], train_length: int) -> None:
    """Print the table on stdout, under its title."""
    print(wrapped(title(train_length), indent=0))
    console_table(runs, lengths, train_length)


def console_table(
    runs: Sequence[dict[str, Any]], lengths: Sequence[int], train_length: int
) -> None:
    """Print the table alone."""
    print_rows("encoding", headings(lengths, train_length), rows_of(runs, lengths))


def markdown_table(
    runs: Sequence[dict[str, Any]], lengths: Sequence[int], train_length: int
) -> str:
    """The table in Markdown, the best in bold."""
    return markdown_rows("encoding", headings(lengths, train_length), rows_of(runs, lengths))


def _number(cell: Sequence[float]) -> str:
    text = f"{statistics.fmean(cell):.2f}"
    return text if len(cell) == 1 else f"{text} ±{statistics.stdev(cell):.2f}"
