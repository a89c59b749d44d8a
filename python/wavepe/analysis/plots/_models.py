"""Pictures of measurements on a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...common import checks
from . import drawing

_FAINTEST = 1e-4  # all weights below this have one colour
_PANEL, _PANELS_IN_A_ROW = 3.4, 4
_MOST_CELLS_WITH_TEXT = 200


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
    drawing.check_texts(title=title)
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
    for name in names:
        drawing.check_texts(title=name)
    columns = min(len(panels), _PANELS_IN_A_ROW)
    rows = math.ceil(len(panels) / columns)
    lines = 1 + max(name.count("\n") for name in names)
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
        weights = np.ma.masked_less_equal(panels[number], 0.0)
        image = axes.imshow(
            np.ma.maximum(weights, _FAINTEST), norm=norm, cmap="viridis", interpolation="nearest"
        )
        axes.set_facecolor(("0.5", drawing.SHADE["alpha"]))
        axes.set(xlabel="key", ylabel="query" if number % columns == 0 else "")
        axes.locator_params(nbins=5, integer=True)
        drawing.title(axes, names[number])
    figure.colorbar(
        image, ax=grid, label="attention weight", extend="min", shrink=0.9 if rows == 1 else 0.7
    )
    drawing.save(figure, path)


def needle_grid(
    grid: ArrayLike,
    path: drawing.Path,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    title: str = "",
) -> None:
    """Draw how often a model found a fact, by length of the context and depth in it.

    Parameters
    ----------
    grid : array (lengths, depths) of real numbers
        Shares from 0 to 1, as `wavepe.analysis.needle` returns them.
    path, title : as for all pictures (`wavepe.analysis.plots`)
    lengths, depths : sequences of numbers
        The length of each row of `grid`, and the depth of each column.
    """
    rates = drawing.numbers("grid", grid, 2)
    columns, rows = drawing.numbers("lengths", lengths, 1), drawing.numbers("depths", depths, 1)
    if rates.shape != (len(columns), len(rows)):
        raise ValueError(
            f"grid must have shape ({len(columns)}, {len(rows)}) for these lengths and depths, got "
            f"{rates.shape}"
        )
    drawing.check_texts(title=title)
    figure = drawing.new_figure(
        max(4.6, 0.7 * len(columns) + 2.2), max(3.2, 0.42 * len(rows) + 1.4)
    )
    axes = figure.subplots()
    image = axes.imshow(rates.T, aspect="auto", cmap="cividis", vmin=0.0, vmax=1.0)
    axes.set_xticks(range(len(columns)), [f"{length:.15g}" for length in columns])
    axes.set_yticks(range(len(rows)), [f"{depth:g}" for depth in rows])
    if len(columns) > 8:
        axes.tick_params(axis="x", rotation=90)
    axes.set(xlabel="length of the context (tokens)", ylabel="depth of the fact")
    if rates.size <= _MOST_CELLS_WITH_TEXT:
        for (x, y), rate in np.ndenumerate(rates):
            colour = "white" if rate < 0.5 else "black"
            axes.text(x, y, f"{rate:.0%}", ha="center", va="center", color=colour, size=8)
    figure.colorbar(image, ax=axes, label="share of facts found")
    drawing.title(axes, title)
    drawing.save(figure, path)


def sweep_curve(
    values: Sequence[float],
    perplexity: Mapping[Any, Sequence[float]],
    path: drawing.Path,
    *,
    name: str,
    logarithmic: bool = False,
    unit: str = "token",
    title: str = "",
) -> None:
    """Draw perplexity over the values of an option, with a line for each length.

    Parameters
    ----------
    values : sequence of float
        Values of the option.
    perplexity : mapping of int to sequence of float
        Sequence length -> one perplexity for each of `values`.
    path, title : as for all pictures (`wavepe.analysis.plots`)
    name : str
        Name of the option, written below the picture.
    logarithmic : bool
        Whether the axis of the values is logarithmic.
    unit : str
        Unit of the perplexity: "token" or "byte".
    """
    places = drawing.numbers("values", values, 1)
    if not isinstance(perplexity, Mapping):
        raise TypeError(f"perplexity must be a mapping, got {type(perplexity).__name__}")
    lines = {length: drawing.numbers("perplexity", line, 1) for length, line in perplexity.items()}
    for length, line in lines.items():
        if len(line) != len(places):
            raise ValueError(
                f"perplexity[{length}] must hold one number for each of the {len(places)} values, "
                f"got {len(line)}"
            )
    drawing.check_texts(name=name, unit=unit, title=title)
    figure = drawing.new_figure(6.8, 4.2)
    axes = figure.subplots()
    order = np.argsort(places)
    for number, (length, line) in enumerate(lines.items()):
        axes.plot(
            places[order], line[order], color=drawing.COLOURS[number % 8], label=str(length),
            marker=drawing.MARKERS[number % 8], linestyle=drawing.LINES[number // 8 % 4],
        )  # fmt: skip
    if logarithmic:
        axes.set_xscale("log")
    drawing.plain_ticks(axes)
    axes.set(xlabel=name, ylabel=f"perplexity per {unit}")
    figure.legend(loc="outside right upper", frameon=False, title="length")
    drawing.title(axes, title)
    drawing.save(figure, path)
