"""Tables for the terminal (need rich) and as Markdown; the best cell of a column ends in a star."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from ..common.labels import fold

Row = tuple[str, Sequence[str]]

_LATEX: dict[str, str | int | None] = {sign: f"\\{sign}" for sign in "&%$#_{}"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
GAP = 2  # blanks between two columns of a table
_WIDEST = 1000  # the variable COLUMNS may hold anything
_LEAST_LABEL = 18  # to which labels may be folded, so that more columns fit
_MOST_LABEL = 60  # with wider ones, numbers would be far from short names


def columns() -> int | None:
    """Return the width of the terminal; None if stdout is not a terminal."""
    return min(shutil.get_terminal_size().columns, _WIDEST) if sys.stdout.isatty() else None


def groups(label: int, widths: Sequence[int], room: int | None) -> list[slice]:
    """Group columns of these widths into tables that fit the terminal, at least one in each."""
    starts, used = [0], label
    for column, width in enumerate(widths):
        used += GAP + width
        if room is not None and used > room and column > starts[-1]:
            starts.append(column)
            used = label + GAP + width
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(widths)], strict=True)]


def print_table(title: str, heading: str, headings: Iterable[object], rows: Sequence[Row]) -> None:
    """Print a table on stdout: a column of labels under `heading`, then one for each of `headings`.

    The title, unless it is empty, stands above it. In a narrow terminal, labels are folded first;
    then further columns go to another table below.
    """
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    room, heads = columns(), list(map(str, headings))
    if title:
        print("\n".join(textwrap.wrap(title, room or len(title), break_long_words=False)))
    labels = [name for name, _ in rows]
    # A blank replaces a missing star, to align digits.
    texts = [[x if x.endswith("*") else f"{x} " for x in cells] for _, cells in rows]
    widths = [max(map(len, column)) for column in zip(heads, *texts, strict=True)]
    width = max(map(cell_len, (heading, *labels)))
    parts = groups(min(width, _LEAST_LABEL), widths, room)
    beside = max(sum(GAP + width for width in widths[part]) for part in parts)
    if room is not None:
        width = min(width, _MOST_LABEL, max(_LEAST_LABEL, room - beside))
        labels = ["\n".join(fold(label, width)) for label in labels]
    console = Console(width=width + beside)
    for part in parts:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(heading, width=width, overflow="fold")
        for text, column in zip(heads[part], widths[part], strict=True):
            table.add_column(text, justify="right", no_wrap=True, width=column)
        for label, cells in zip(labels, texts, strict=True):
            styles = ["bold green" if cell.endswith("*") else "" for cell in cells[part]]
            table.add_row(Text(label), *map(Text, cells[part], styles))
        print()
        console.print(table)
    print()


def markdown_rows(heading: str, headings: Sequence[str], rows: Sequence[Row]) -> str:
    """Return the table as Markdown, with the best cells in bold."""
    lines = [f"| {' | '.join((heading, *headings))} |", "|---|" + "---:|" * len(headings)]
    for name, cells in rows:
        marked = [f"**{cell[:-1]}**" if cell.endswith("*") else cell for cell in cells]
        lines.append(f"| `{name.replace('|', chr(92) + '|')}` | " + " | ".join(marked) + " |")
    return "\n".join(lines) + "\n"


def latex_rows(heading: str, headings: Sequence[str], rows: Sequence[Row]) -> str:
    """Return the table as a ``tabular`` with rules of booktabs, and the best cells in bold."""
    lines = [rf"\begin{{tabular}}{{l{'r' * len(headings)}}}", r"\toprule"]
    lines += [" & ".join((heading, *headings)) + r" \\", r"\midrule"]
    for name, cells in rows:
        marked = [rf"\textbf{{{cell[:-1]}}}" if cell.endswith("*") else cell for cell in cells]
        text = " & ".join(marked).replace("±", r"$\pm$ ")
        lines.append(rf"\texttt{{{name.translate(str.maketrans(_LATEX))}}} & {text} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"
