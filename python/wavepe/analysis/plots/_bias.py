"""Picture of encodings that add a number to the score, by distance and head."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays.relative_bias import rows_at
from ...encodings import Encoding
from . import _parts
from ._figure import GRID, WIDTH, need_matplotlib, new_figure, save


def bias(
    path: _parts.Path,
    *,
    encodings: _parts.Specs = ("alibi", "kerple", "sandwich"),
    heads: int = 8,
    length: int = 256,
) -> dict[str, Any]:
    """Draw what slopes and biases add to the score, by distance and head.

    Each encoding gets a panel with one line for each head. Learned encodings show their initial
    values.

    Parameters
    ----------
    path : path
        File to write. Its ending names the format: .png, .pdf or .svg.
    encodings : spec or list of specs
        Encodings with slopes or biases (alibi, t5, kerple, sandwich), at most six.
    heads : int
        Number of heads, at most 32.
    length : int
        Number of distances, 0..length-1; from 2 to 65536.

    Returns
    -------
    dict
        The drawn numbers: "distance", an int array (length,), and "panels", a list of dicts with
        "encoding" (str) and "bias", an array (heads, length).

    Raises
    ------
    ImportError
        matplotlib is missing.
    ValueError, TypeError
        A spec or a size is wrong.
    """
    need_matplotlib()
    found = _parts.encodings_of(
        encodings,
        "an encoding with slopes or biases",
        lambda encoding: {"slopes", "bias"} & set(encoding.terms),
    )
    length = _parts.size("length", length, 2, _parts.MOST_TOKENS)
    heads = _parts.size("heads", heads, 1, _parts.MOST_HEADS)
    panels: list[dict[str, Any]] = [
        {"encoding": str(e), "bias": _values(e, length, heads)} for e in found
    ]
    figure = new_figure(max(WIDTH, 2.2 * len(found)), 3.6)
    listed = _parts.ticks(heads, 8)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        for head, colour in enumerate(_parts.shades(heads)):
            name = f"{head + 1}" if head in listed else None
            axes.plot(panel["bias"][head], color=colour, linewidth=1.4, label=name)
        axes.set_xlabel("distance")
        if number == 0:
            axes.set_ylabel("added to the score")
        axes.grid(True, **GRID)
        axes.set_xlim(0, length - 1)
        _parts.title(axes, _parts.name_of(panel["encoding"], 30))
    _parts.legend_beside([axes], "head")
    save(figure, path)
    return {"distance": np.arange(length), "panels": panels}


def _values(encoding: Encoding, length: int, heads: int) -> np.ndarray:
    """Return the bias of each head and distance, (heads, length)."""
    sloping: Any = 0.0
    if "slopes" in encoding.terms:
        sloping = -encoding.slopes(heads)[:, None] * np.arange(length)
    if "bias" not in encoding.terms:
        return sloping
    return sloping + rows_at(np.arange(length), *encoding.bias(length, heads), axis=-1)
