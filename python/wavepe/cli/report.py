"""The table of a comparison: in the terminal (needs rich) and as Markdown."""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

# Room for the longest default row where no terminal sets the width.
_WIDTH = 120


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
    return [f"{length} ({length / train_length:.3g}x)" for length in lengths]


def title(train_length: int) -> str:
    """What the numbers are."""
    return (
        f"Perplexity per byte of held-out text, whole sequence, trained on {train_length} bytes "
        "(* best of its column)"
    )


def print_table(runs: Sequence[dict[str, Any]], lengths: Sequence[int], train_length: int) -> None:
    """Print the table on stdout, under its title."""
    print(title(train_length))
    console_table(runs, lengths, train_length)


def console_table(
    runs: Sequence[dict[str, Any]], lengths: Sequence[int], train_length: int
) -> None:
    """Print the table alone."""
    console = Console(width=None if sys.stdout.isatty() else _width())
    table = Table()
    table.add_column("encoding", overflow="fold")
    for heading in headings(lengths, train_length):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, cells in rows_of(runs, lengths):
        marked = [f"[bold green]{cell}[/]" if cell.endswith("*") else cell for cell in cells]
        table.add_row(name, *marked)
    console.print(table)


def markdown_table(
    runs: Sequence[dict[str, Any]], lengths: Sequence[int], train_length: int
) -> str:
    """The table in Markdown, the best in bold."""
    lines = [
        "| encoding | " + " | ".join(headings(lengths, train_length)) + " |",
        "|---|" + "---:|" * len(lengths),
    ]
    for name, cells in rows_of(runs, lengths):
        marked = [f"**{cell[:-1]}**" if cell.endswith("*") else cell for cell in cells]
        lines.append(f"| `{name}` | " + " | ".join(marked) + " |")
    return "\n".join(lines) + "\n"


def _number(cell: Sequence[float]) -> str:
    text = f"{statistics.fmean(cell):.2f}"
    return text if len(cell) == 1 else f"{text} ±{statistics.stdev(cell):.2f}"


def _width() -> int:
    return max(_WIDTH, shutil.get_terminal_size().columns)
