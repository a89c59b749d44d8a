"""The marks of `_compiler` that wait for the first trace of a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

waiting: list[Callable[[], Any]] | None = []  # None: the marks have been set


def add_mark(mark: Callable[[], Any]) -> None:
    """Call `mark` when a compiler first traces a function, or now if that has happened."""
    if waiting is None:
        mark()
    else:
        waiting.append(mark)
