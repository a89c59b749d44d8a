"""The table of a comparison: in the terminal (needs rich) and as Markdown."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._labels import fold, shortened
from .terminal import GAP, columns, groups, wrapped

# An encoding is folded to so many characters, where that puts more lengths side by side.
_LEAST_LABEL = 18
# With more the numbers of short encodings stand far from their names.
_MOST_LABEL = 60


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
    """Print the table alone.

    Where the terminal is too narrow, encodings are folded, then lengths go to further tables below;
    encodings of more than three lines are written out below them all.
    """
    room = columns()
    names = [name for name, _ in rows_of(runs, lengths)]
    rows = [[_cell(cell) for cell in cells] for _, cells in rows_of(runs, lengths)]
    heads = headings(lengths, train_length)
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    longest = max(map(cell_len, ("encoding", *names)))
    parts = groups(min(longest, _LEAST_LABEL), widths, room)
    beside = max(sum(GAP + width for width in widths[part]) for part in parts)
    width = longest
    if room is not None:
        width = min(longest, _MOST_LABEL, max(_LEAST_LABEL, room - beside))
    labels, notes = (names, []) if room is None else shortened(names, width)
    console = Console(width=width + beside)
    for part in parts:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("encoding", width=width, overflow="fold")
        for heading, column in zip(heads[part], widths[part], strict=True):
            table.add_column(heading, justify="right", no_wrap=True, width=column)
        for label, cells in zip(labels, rows, strict=True):
            table.add_row(Text(label), *map(_marked, cells[part]))
        print()
        console.print(table)
    for note in notes:
        print("\n" + "\n    ".join(fold(note, width + beside - 4)))
    print()


def _marked(cell: str) -> Text:
    return Text(cell, "bold green" if cell.endswith("*") else "")


def _cell(text: str) -> str:
    """As stdout can print it; a blank for a missing star, so that digits stand below digits."""
    try:
        "±".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = text.replace("±", "+-")
    return text if text.endswith("*") else f"{text} "


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
        lines.append(f"| `{name.replace('|', chr(92) + '|')}` | " + " | ".join(marked) + " |")
    return "\n".join(lines) + "\n"


def _number(cell: Sequence[float]) -> str:
    text = f"{statistics.fmean(cell):.2f}"
    return text if len(cell) == 1 else f"{text} ±{statistics.stdev(cell):.2f}"
