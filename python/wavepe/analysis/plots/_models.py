"""Pictures of what was measured on a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ... import _checks
from . import _parts
from ._figure import COLOURS, LINES, MARKERS, need_matplotlib, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Weights below this are one colour.
_FAINTEST = 1e-4
_PANEL, _PANELS_IN_A_ROW = 3.4, 4
_MOST_CELLS_WITH_TEXT = 200


def band_heatmap(
    heatmap: ArrayLike,
    path: str | PathLike[str],
    *,
    measured: float | None = None,
    predicted: float | None = None,
    title: str = "",
) -> None:
    """Draw the norms of pairs, positions below each other, to the file `path` [F].

    Parameters
    ----------
    heatmap : array (positions, pairs)
        The "heatmap" of `wavepe.analysis.measured_band`.
    path : path
        The picture's file; its ending names the format.
    measured, predicted : float, optional
        The mean measured band, and j* of `wavepe.analysis.predicted_band`: each a vertical line.
    title : str, optional
        Text above the picture.

    Raises
    ------
    ImportError
        matplotlib is missing.
    ValueError, TypeError
        No array of two dimensions, or an argument of another type.
    """
    need_matplotlib()
    norms = _matrix("heatmap", heatmap)
    lines = {"measured mean": measured, "predicted j*": predicted}
    places = {name: _checks.finite(name, at) for name, at in lines.items() if at is not None}
    _check_title(title)
    figure = new_figure(6.4, 4.8)
    axes = figure.subplots()
    image = axes.imshow(norms, aspect="auto", interpolation="nearest", cmap="viridis")
    # A predicted band can lie outside the head.
    axes.set_xlim(-0.5, max(norms.shape[1] - 0.5, *(at + 0.5 for at in places.values()), 0.0))
    for (name, at), style in zip(places.items(), ("-", "--"), strict=False):
        for width, colour in ((3.2, "black"), (1.6, "white")):  # seen on light and on dark
            axes.axvline(at, color=colour, linewidth=width, linestyle=style)
        axes.plot([], [], color="black", linestyle=style, label=f"{name} {at:.1f}")
    axes.set_xlabel("pair (0 turns fastest)")
    axes.set_ylabel("position")
    figure.colorbar(image, ax=axes, label="mean L2 norm of the pair")
    if places:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    _parts.title(axes, title)
    save(figure, path)


def attention_maps(
    maps: Sequence[ArrayLike],
    path: str | PathLike[str],
    *,
    titles: Sequence[str] | None = None,
) -> None:
    """Draw attention weights side by side on one logarithmic scale, to the file `path` [W].

    Parameters
    ----------
    maps : sequence of arrays (n, n)
        Weights [query, key]. Those below 1e-4 have the darkest colour, those that are 0 none.
    path : path
        The picture's file; its ending names the format.
    titles : sequence of str, optional
        Text above each panel.

    Raises
    ------
    ImportError
        matplotlib is missing.
    ValueError, TypeError
        No maps, other shapes, another number of titles, or an argument of another type.
    """
    need_matplotlib()
    from matplotlib.colors import LogNorm

    if isinstance(maps, (str, bytes)) or not isinstance(maps, (Sequence, np.ndarray)):
        raise TypeError(f"maps must be a list of arrays, got {type(maps).__name__}")
    panels = [_matrix("maps", one) for one in maps]
    if not panels:
        raise ValueError("maps is empty: needs at least one")
    names = [""] * len(panels) if titles is None else titles
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"titles must be a list of strings, got {type(names).__name__}")
    if len(names) != len(panels):
        raise ValueError(f"titles holds {len(names)}: needs one for each of {len(panels)} maps")
    for name in names:
        _check_title(name)
    columns = min(len(panels), _PANELS_IN_A_ROW)
    rows = math.ceil(len(panels) / columns)
    lines = 1 + max(name.count("\n") for name in names)
    height = rows * (_PANEL + 0.2 * lines) + 0.3
    figure = new_figure(max(columns * _PANEL, 4.0) + 1.0, height)
    figure.set_layout_engine("compressed")  # panels are square: none of their room is left over
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
        axes.set_facecolor("0.92")
        axes.set_xlabel("key")
        axes.set_ylabel("query" if number % columns == 0 else "")
        axes.locator_params(nbins=5, integer=True)
        _parts.title(axes, names[number])
    figure.colorbar(
        image, ax=grid, label="attention weight", extend="min", shrink=0.9 if rows == 1 else 0.7
    )
    save(figure, path)


def needle_grid(
    grid: ArrayLike,
    path: str | PathLike[str],
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    title: str = "",
) -> None:
    """Draw how often a fact was found, by length and depth, to the file `path`.

    Parameters
    ----------
    grid : array (lengths, depths)
        Shares from 0 to 1, as `wavepe.analysis.needle` returns them.
    path : path
        The picture's file; its ending names the format.
    lengths, depths : sequence
        What the rows and columns of `grid` are.
    title : str, optional
        Text above the picture.

    Raises
    ------
    ImportError
        matplotlib is missing.
    ValueError, TypeError
        Sizes that do not go together, or an argument of another type.
    """
    need_matplotlib()
    rates = _matrix("grid", grid)
    columns, rows = _row("lengths", lengths), _row("depths", depths)
    if rates.shape != (len(columns), len(rows)):
        raise ValueError(
            f"grid has shape {rates.shape}: needs ({len(columns)}, {len(rows)}) for these lengths "
            "and depths"
        )
    _check_title(title)
    figure = new_figure(max(4.6, 0.7 * len(columns) + 2.2), max(3.2, 0.42 * len(rows) + 1.4))
    axes = figure.subplots()
    image = axes.imshow(rates.T, aspect="auto", cmap="cividis", vmin=0.0, vmax=1.0)
    axes.set_xticks(range(len(columns)), [f"{length:.15g}" for length in columns])
    axes.set_yticks(range(len(rows)), [f"{depth:g}" for depth in rows])
    if len(columns) > 8:
        axes.tick_params(axis="x", rotation=90)
    axes.set_xlabel("length of the context (tokens)")
    axes.set_ylabel("depth of the fact")
    if rates.size <= _MOST_CELLS_WITH_TEXT:
        for (x, y), rate in np.ndenumerate(rates):
            colour = "white" if rate < 0.5 else "black"
            axes.text(x, y, f"{rate:.0%}", ha="center", va="center", color=colour, size=8)
    figure.colorbar(image, ax=axes, label="share of facts found")
    _parts.title(axes, title)
    save(figure, path)


def sweep_curve(
    values: Sequence[float],
    perplexity: Mapping[Any, Sequence[float]],
    path: str | PathLike[str],
    *,
    name: str,
    logarithmic: bool = False,
    unit: str = "token",
    title: str = "",
) -> None:
    """Draw perplexity over an option of the encoding, a line for each length, to the file `path`.

    Parameters
    ----------
    values : sequence of float
        Of the option.
    perplexity : mapping of length to sequence of float
        One perplexity for each value.
    path : path
        The picture's file; its ending names the format.
    name : str
        What is varied, below the picture.
    logarithmic : bool
        Whether the values stand on a logarithmic axis.
    unit : str
        What perplexity is counted per.
    title : str, optional
        Text above the picture.

    Raises
    ------
    ImportError
        matplotlib is missing.
    ValueError, TypeError
        Sizes that do not go together, or an argument of another type.
    """
    need_matplotlib()
    places = _row("values", values)
    if not isinstance(perplexity, Mapping):
        raise TypeError(f"perplexity must be a mapping, got {type(perplexity).__name__}")
    lines = {length: _row("perplexity", line) for length, line in perplexity.items()}
    for length, line in lines.items():
        if len(line) != len(places):
            raise ValueError(
                f"perplexity at {length} holds {len(line)}: needs one for each of {len(places)} "
                "values"
            )
    for text in (name, unit, title):
        _check_title(text)
    figure = new_figure(6.8, 4.2)
    axes = figure.subplots()
    order = np.argsort(places)
    for number, (length, line) in enumerate(lines.items()):
        axes.plot(
            places[order], line[order], color=COLOURS[number % 8],
            marker=MARKERS[number % 8], linestyle=LINES[number // 8 % 4], label=str(length),
        )  # fmt: skip
    if logarithmic:
        axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_ticks(axes)
    axes.set_xlabel(name)
    axes.set_ylabel(f"perplexity per {unit}")
    axes.grid(True, which="major", color="0.9")
    figure.legend(
        loc="outside right upper", frameon=False, fontsize="small", title="length",
        title_fontsize="small",
    )  # fmt: skip
    _parts.title(axes, title)
    save(figure, path)


def _matrix(name: str, value: ArrayLike) -> np.ndarray:
    array = _checks.real_array(name, value)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{name} has shape {array.shape}: needs two dimensions, none of them 0")
    return array.astype(np.float64)


def _row(name: str, value: ArrayLike) -> np.ndarray:
    array = _checks.real_array(name, value)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} has shape {array.shape}: needs one dimension, not 0")
    return array.astype(np.float64)


def _check_title(title: Any) -> None:
    if not isinstance(title, str):
        raise TypeError(f"title must be a string, got {title!r}")


def _plain_ticks(axes: Axes) -> None:
    """Write perplexities as plain numbers."""
    from matplotlib.ticker import FuncFormatter

    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)
    axes.tick_params(axis="y", which="minor", labelsize="small", labelcolor="0.4")
