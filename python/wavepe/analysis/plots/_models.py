"""Pictures of measurements on a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ...common import checks
from . import drawing

_FAINTEST = 1e-4  # all weights below this have one colour
_PANEL, _PANELS_IN_A_ROW = 3.4, 4


def band_heatmap(
    heatmap: ArrayLike,
    path: drawing.Path,
    *,
    measured: float | None = None,
    predicted: float | None = None,
    title: str = "",
) -> None:
    """Draw the norms of rotary pairs by position, with the measured and the predicted band.

    Parameters
    ----------
    heatmap : array (positions, pairs) of real numbers
        The "heatmap" of `wavepe.analysis.measured_band`, which names the source.
    path, title : as for all pictures (`wavepe.analysis.plots`)
    measured, predicted : float, optional
        Indices of pairs for a solid and a dashed line: the mean of the measured bands, and the
        result of `wavepe.analysis.predicted_band`.
    """
    norms = drawing.numbers("heatmap", heatmap, 2)
    lines = {"measured mean": measured, "predicted j*": predicted}
    places = {name: checks.finite(name, pair) for name, pair in lines.items() if pair is not None}
    figure = drawing.new_figure(6.4, 4.8)
    axes = figure.subplots()
    image = axes.imshow(norms, aspect="auto", interpolation="nearest", cmap="viridis")
    # A predicted band can lie outside the head.
    axes.set_xlim(-0.5, max(norms.shape[1] - 0.5, *(pair + 0.5 for pair in places.values()), 0.0))
    for (name, pair), style in zip(places.items(), ("-", "--"), strict=False):
        for width, colour in ((3.2, "black"), (1.6, "white")):  # visible on light and on dark
            axes.axvline(pair, color=colour, linewidth=width, linestyle=style)
        axes.plot([], [], color="0.5", linestyle=style, label=f"{name} {pair:.1f}")
    axes.set(xlabel="pair (0 turns fastest)", ylabel="position")
    figure.colorbar(image, ax=axes, label="mean L2 norm of the pair")
    if places:
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    drawing.title(axes, title)
    drawing.save(figure, path)


def attention_maps(
    maps: Sequence[ArrayLike], path: drawing.Path, *, titles: Sequence[str] | None = None
) -> None:
    """Draw attention weights side by side, on one logarithmic scale.

    Parameters
    ----------
    maps : sequence of arrays (n, n) of real numbers
        Weights [query, key]. Weights below 1e-4 get the darkest colour; weights of 0 stay grey.
    path : as for all pictures (`wavepe.analysis.plots`)
    titles : sequence of str, optional
        Text above each panel, one for each map.
    """
    if isinstance(maps, (str, bytes)) or not isinstance(maps, (Sequence, np.ndarray)):
        raise TypeError(f"maps must be a list of arrays, got {type(maps).__name__}")
    panels = [drawing.numbers("maps", weights, 2) for weights in maps]
    if not panels:
        raise ValueError("maps must hold at least one map, got none")
    names = [""] * len(panels) if titles is None else titles
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"titles must be a list of strings, got {type(names).__name__}")
    if len(names) != len(panels):
        raise ValueError(
            f"titles must hold one text for each of the {len(panels)} maps, got {len(names)}"
        )
    columns = min(len(panels), _PANELS_IN_A_ROW)
    rows = math.ceil(len(panels) / columns)
    lines = 1 + max(drawing.folded_title(name).count("\n") for name in names)
    height = rows * (_PANEL + 0.2 * lines) + 0.3
    figure = drawing.new_figure(max(columns * _PANEL, 4.0) + 1.0, height)
    from matplotlib.colors import LogNorm

    figure.set_layout_engine("compressed")  # no empty space between the square panels
    grid = figure.subplots(rows, columns, squeeze=False)
    norm = LogNorm(_FAINTEST, 1.0)
    for number, axes in enumerate(grid.flat):
        if number >= len(panels):
            axes.set_axis_off()
            continue
        image = axes.imshow(panels[number], norm=norm, cmap="viridis", interpolation="nearest")
        axes.set_facecolor(("0.5", drawing.SHADE["alpha"]))
        axes.set(xlabel="key", ylabel="query" if number % columns == 0 else "")
        axes.locator_params(nbins=5, integer=True)
        drawing.title(axes, names[number])
    figure.colorbar(
        image, ax=grid, label="attention weight", extend="min", shrink=0.9 if rows == 1 else 0.7
    )
    drawing.save(figure, path)
