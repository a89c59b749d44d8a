"""Texts folded into lines, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def suggestion(text: Any, names: Iterable[str]) -> str:
    """Return ", did you mean NAME?" for the closest name, in any case; "" without a close one."""
    by_case = {name.lower(): name for name in names}
    close = difflib.get_close_matches(str(text).lower(), list(by_case), n=1)
    return f", did you mean {by_case[close[0]]!r}?" if close else ""


def fold(text: str, width: int) -> list[str]:
    """Cut `text` into lines of at most `width` characters, after a blank or mark where possible."""
    lines: list[str] = []
    while len(text) > width:
        # Prefer a cut after a comma to one after "=". Never leave a line nearly empty.
        cuts = (max(text.rfind(mark, 0, width) for mark in marks) + 1 for marks in (" ,", ":=+"))
        cut = next((cut for cut in cuts if cut > width // 3), width)
        lines.append(text[:cut].rstrip(" "))
        text = text[cut:]
    return [*lines, text]
