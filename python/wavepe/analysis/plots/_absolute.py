"""Picture of absolute encodings."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _parts
from ._figure import WIDTH, clear_at_zero, need_matplotlib, new_figure, save


def absolute(
    path: _parts.Path,
    *,
    encodings: _parts.Specs = ("sinusoidal", "binary", "normalised"),
    dim: int = 16,
    length: int = 256,
) -> dict[str, Any]:
    """Draw the vectors of absolute encodings, position by position.

    Each encoding gets a panel: positions from top to bottom, dimensions from left to right.

    Parameters
    ----------
    path : path
        File to write. Its ending names the format: .png, .pdf or .svg.
    encodings : spec or list of specs
        Absolute encodings, at most six.
    dim : int
        Size of the token embedding, at most 1024.
    length : int
        Sequence length, from 2 to 4096.

    Returns
    -------
    dict
        The drawn numbers: "panels", a list of dicts with "encoding" (str) and "values", an array
        (length, dim).

    Raises
    ------
    ImportError
        matplotlib is missing.
    ValueError, TypeError
        A spec or a size is wrong.
    """
    need_matplotlib()
    found = _parts.encodings_of(encodings, "an absolute encoding", lambda encoding: encoding.adds)
    length = _parts.size("length", length, 2, 4096)
    dim = _parts.size("dim", dim, 1, _parts.MOST_DIMS)
    panels: list[dict[str, Any]] = [
        {"encoding": str(encoding), "values": encoding.absolute(np.arange(length), dim)}
        for encoding in found
    ]
    figure = new_figure(max(WIDTH, 2.2 * len(found)), 4.4)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        values = panel["values"]
        low, high = float(values.min()), float(values.max())
        image = axes.imshow(
            values, aspect="auto", interpolation="nearest", cmap=clear_at_zero(signed=low < 0),
            vmin=-high if low < 0 else 0, vmax=high,
        )  # fmt: skip
        figure.colorbar(image, ax=axes, location="bottom", pad=0.02, aspect=25, label="value")
        axes.set_xlabel("dimension")
        if number == 0:
            axes.set_ylabel("position (tokens)")
        _parts.title(axes, _parts.name_of(panel["encoding"], 30))
    save(figure, path)
    return {"panels": panels}
