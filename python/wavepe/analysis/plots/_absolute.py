"""Picture of absolute encodings."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import drawing


def absolute(
    path: drawing.Path,
    *,
    encodings: drawing.Specs = ("sinusoidal", "binary", "normalised"),
    dim: int = 16,
    length: int = 256,
) -> dict[str, Any]:
    """Draw the vectors of absolute encodings, position by position.

    Each encoding gets a panel: positions from top to bottom, dimensions from left to right.

    Parameters
    ----------
    path, encodings : as for all pictures (`wavepe.analysis.plots`); absolute encodings
    dim : int
        Size of the token embedding.
    length : int
        Sequence length, from 2 to 4096.

    Returns
    -------
    dict
        "panels", a list of dicts with "encoding" (str) and "values", an array (length, dim).
    """
    adding = drawing.encodings_of(encodings, "an absolute encoding", lambda encoding: encoding.adds)
    length = drawing.size("length", length, 2, 4096)
    dim = drawing.size("dim", dim, 1, drawing.MOST_DIMS)
    panels = [
        {"encoding": str(encoding), "values": encoding.absolute(np.arange(length), dim)}
        for encoding in adding
    ]
    figure, row = drawing.panel_row(panels, 4.4, "dimension", "position (tokens)")
    for axes, panel in zip(row, panels, strict=True):
        values = panel["values"]
        colours = drawing.clear_at_zero(float(values.max()), signed=bool(values.min() < 0))
        image = axes.imshow(values, aspect="auto", interpolation="nearest", **colours)
        figure.colorbar(image, ax=axes, location="bottom", pad=0.02, aspect=25, label="value")
    drawing.save(figure, path)
    return {"panels": panels}
