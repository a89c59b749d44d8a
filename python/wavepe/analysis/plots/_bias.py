"""Picture of encodings that add a number to the score, by distance and head."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays.relative_bias import rows_at
from ...encodings import Encoding
from . import drawing


def bias(
    path: drawing.Path,
    *,
    encodings: drawing.Specs = ("alibi", "kerple", "sandwich"),
    heads: int = 8,
    length: int = 256,
) -> dict[str, Any]:
    """Draw what slopes and biases add to the score, by distance and head.

    Each encoding gets a panel with one line for each head. Learned encodings show their initial
    values.

    Parameters
    ----------
    path, encodings : as for all pictures; encodings with slopes or biases
    heads : int
        Number of heads, at most 32.
    length : int
        Number of distances, 0..length-1; at least 2.

    Returns
    -------
    dict
        "distance", an int array (length,), and "panels", a list of dicts with "encoding" (str) and
        "bias", an array (heads, length).
    """
    biasing = drawing.encodings_of(
        encodings,
        "an encoding with slopes or biases",
        lambda encoding: {"slopes", "bias"} & set(encoding.terms),
    )
    length = drawing.size("length", length, 2, drawing.MOST_TOKENS)
    heads = drawing.size("heads", heads, 1, drawing.MOST_HEADS)
    panels: list[dict[str, Any]] = [
        {"encoding": str(e), "bias": _values(e, length, heads)} for e in biasing
    ]
    figure, row = drawing.panel_row(panels, 3.6, "distance", "added to the score")
    listed = drawing.ticks(heads, 8)
    for axes, panel in zip(row, panels, strict=True):
        for head, colour in enumerate(drawing.shades(heads)):
            name = f"{head + 1}" if head in listed else None
            axes.plot(panel["bias"][head], color=colour, linewidth=1.4, label=name)
        axes.grid(True, **drawing.GRID)
        axes.set_xlim(0, length - 1)
    drawing.legend_beside(row[-1:], "head")
    drawing.save(figure, path)
    return {"distance": np.arange(length), "panels": panels}


def _values(encoding: Encoding, length: int, heads: int) -> np.ndarray:
    """Return the bias of each head and distance, (heads, length)."""
    sloping: Any = 0.0
    if "slopes" in encoding.terms:
        sloping = -encoding.slopes(heads)[:, None] * np.arange(length)
    if "bias" not in encoding.terms:
        return sloping
    return sloping + rows_at(np.arange(length), *encoding.bias(length, heads), axis=-1)
