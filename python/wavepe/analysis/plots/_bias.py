"""Picture of encodings that add a number by distance and head."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...encodings import Encoding
from . import _parts
from ._figure import need_matplotlib, new_figure, save


def bias(
    path: _parts.Path,
    *,
    encodings: _parts.Specs = ("alibi", "kerple", "sandwich"),
    heads: int = 8,
    length: int = 256,
) -> dict[str, Any]:
    """Draw what slopes and biases add to the score, by distance and head.

    Learned ones show their initial values.

    Parameters
    ----------
    path : path
        The picture's file; its ending names the format.
    encodings : spec or list of specs
        Encodings with slopes or biases: alibi, t5, kerple, sandwich; six at most.
    heads : int
        Number of heads.
    length : int
        Distances 0..length-1.

    Returns
    -------
    dict
        What is drawn: "distance" and "panels", a list of encoding and bias (heads, length).

    Raises
    ------
    ImportError
        matplotlib is missing.
    ValueError, TypeError
        A wrong spec or size.
    """
    need_matplotlib()
    found = _parts.encodings_of(
        encodings,
        "an encoding with slopes or biases",
        lambda encoding: encoding.entry in ("slope", "bias"),
    )
    length = _parts.size("length", length, 2, _parts.MOST_TOKENS)
    heads = _parts.size("heads", heads, 1, _parts.MOST_HEADS)
    panels: list[dict[str, Any]] = [
        {"encoding": str(e), "bias": _values(e, length, heads)} for e in found
    ]
    figure = new_figure(max(5.5, 3.2 * len(found)), 3.8)
    figure.suptitle("The farther a token, the lower its score, in each head to its own degree",
        fontsize="medium")  # fmt: skip
    listed = _parts.ticks(heads, 8)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        for head, colour in enumerate(_parts.shades(heads)):
            name = f"{head + 1}" if head in listed else None
            axes.plot(panel["bias"][head], color=colour, linewidth=1.4, label=name)
        axes.set_xlabel("distance (tokens)")
        if number == 0:
            axes.set_ylabel("added to the score")
        axes.grid(True, color="0.9")
        axes.set_xlim(0, length - 1)
        _parts.title(axes, _parts.name_of(panel["encoding"], 30))
    _parts.legend_beside([axes], "head")
    save(figure, path, _parts.DPI)
    return {"distance": np.arange(length), "panels": panels}


def _values(encoding: Encoding, length: int, heads: int) -> np.ndarray:
    """(heads, length), by distance."""
    if encoding.entry == "slope":
        return -encoding.slopes(heads)[:, None] * np.arange(length)
    values, first, beyond = encoding.bias(length, heads)
    places = np.arange(length) - first
    inside = places < values.shape[1]
    held = values[:, np.minimum(places, values.shape[1] - 1)]
    return held if beyond == "edge" else np.where(inside, held, 0.0)
