"""What fits into the terminal that stdout is; without one nothing is cut or wrapped."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

GAP = 2  # blanks between two columns of a table
_WIDEST = 1000  # COLUMNS may say anything


def columns() -> int | None:
    """The width of the terminal; None where stdout is none."""
    return min(shutil.get_terminal_size().columns, _WIDEST) if sys.stdout.isatty() else None


def wrapped(text: str, indent: int = 2) -> str:
    """`text`, which is one line, in lines that fit; those after the first are indented."""
    width = columns()
    if width is None or len(text) <= width:
        return text
    lines = textwrap.wrap(
        text, max(width, 2 * indent), subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(lines)


def groups(label: int, widths: Sequence[int], room: int | None) -> list[slice]:
    """Columns of these widths in tables that fit beside their labels, at least one in each."""
    starts, used = [0], label
    for column, width in enumerate(widths):
        used += GAP + width
        if room is not None and used > room and column > starts[-1]:
            starts.append(column)
            used = label + GAP + width
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(widths)], strict=True)]
