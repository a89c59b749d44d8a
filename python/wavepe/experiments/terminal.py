"""Fit text into the terminal; if stdout is not a terminal, nothing is cut or wrapped."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

GAP = 2  # blanks between two columns of a table
_WIDEST = 1000  # the variable COLUMNS may hold anything


def columns() -> int | None:
    """Return the width of the terminal; None if stdout is not a terminal."""
    return min(shutil.get_terminal_size().columns, _WIDEST) if sys.stdout.isatty() else None


def wrapped(text: str, indent: int = 2) -> str:
    """Wrap `text`, one line, to the terminal; lines after the first are indented."""
    width = columns()
    if width is None or len(text) <= width:
        return text
    lines = textwrap.wrap(
        text, max(width, 2 * indent), subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(lines)


def groups(label: int, widths: Sequence[int], room: int | None) -> list[slice]:
    """Group columns of these widths into tables that fit the terminal, at least one in each."""
    starts, used = [0], label
    for column, width in enumerate(widths):
        used += GAP + width
        if room is not None and used > room and column > starts[-1]:
            starts.append(column)
            used = label + GAP + width
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(widths)], strict=True)]
