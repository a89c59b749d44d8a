"""Specs of encodings as labels of tables and pictures, where a long one must not crowd the rest."""

from __future__ import annotations

from collections.abc import Iterable


def shortened(specs: Iterable[str], width: int, lines: int = 3) -> tuple[list[str], list[str]]:
    """Return a label for each spec, and the notes that the labels refer to.

    A label has at most `lines` lines of `width` characters, cut behind marks of the spec. A label
    that needs more ends in the number of its note, which holds the whole spec.
    """
    labels: list[str] = []
    notes: list[str] = []
    for spec in specs:
        label = fold(spec, width)
        if len(label) > lines:
            end = f"... [{len(notes) + 1}]"
            notes.append(f"[{len(notes) + 1}] {spec}")
            label = [*label[: lines - 1], label[lines - 1][: max(0, width - len(end))] + end]
        labels.append("\n".join(label))
    return labels, notes


def fold(text: str, width: int) -> list[str]:
    """Cut `text` into lines of at most `width` characters, behind blanks or marks where it can."""
    lines: list[str] = []
    while len(text) > width:
        # behind a comma rather than a key's =, and not so early that the line is nearly empty
        cuts = (max(text.rfind(mark, 0, width) for mark in marks) + 1 for marks in (" ,", ":=+"))
        cut = next((cut for cut in cuts if cut > width // 3), width)
        lines.append(text[:cut].rstrip(" "))
        text = text[cut:]
    return [*lines, text]
