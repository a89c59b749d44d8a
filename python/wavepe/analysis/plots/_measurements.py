"""Pictures of measurements: perplexity, right answers, facts found, bands and attention."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...common import checks
from . import drawing
from .drawing import Path

# Height of the picture without its legend, and of a line of text, in inches.
_HEIGHT, _LINE = 4.2, 0.18
_LEGEND_WIDTH = 34  # characters that fit into a column of the legend
_LABEL_WIDTH = 24  # the same, beside a table
_FAINTEST = 1e-4  # all weights below this have one colour
_PANEL, _PANELS_IN_A_ROW = 3.4, 4


def perplexity_by_length(
    runs: Sequence[Mapping[str, Any]], path: Path, *, train_length: int, title: str = "",
    unit: str = "byte",
) -> None:  # fmt: skip
    """Draw perplexity over sequence length, with one line for each encoding.

    With several seeds, the line is their mean, with a band from the lowest to the highest. The
    picture grows with the legend, which shows three lines of a spec at most.

    Parameters
    ----------
    runs : sequence of mappings
        The "runs" of a results.json of ``wavepe compare``. Each has "encoding" (str), "seed" (int)
        and "perplexity", a mapping of length to value.
    train_length : int
        The trained length. A vertical line marks it.
    unit : str
        Unit of the lengths and of the perplexity: "byte" or "token".

    Examples
    --------
    >>> from wavepe.analysis.plots import perplexity_by_length
    >>> runs = [{"encoding": "rope", "seed": 0, "perplexity": {"128": 3.4, "256": 4.9}},
    ...         {"encoding": "alibi", "seed": 0, "perplexity": {"128": 3.6, "256": 3.5}}]
    >>> perplexity_by_length(runs, "perplexity.png", train_length=128)  # doctest: +SKIP
    """
    if not isinstance(runs, Sequence) or not all(isinstance(run, Mapping) for run in runs):
        raise TypeError(f"runs must be a list of mappings, got {type(runs).__name__}")
    if not runs:
        raise ValueError("runs must hold at least one run, got none")
    train_length = checks.integer("train_length", train_length, 1)
    rows: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for length, value in run["perplexity"].items():
            rows[run["encoding"]][int(length)].append(value)
    labels = [drawing.folded(name, _LEGEND_WIDTH) for name in rows]
    tallest = sorted((1.3 + label.count("\n") for label in labels), reverse=True)
    in_legend = sum(tallest[: (len(labels) + 1) // 2])  # the taller one of two columns at most
    figure = drawing.new_figure(drawing.WIDTH, _HEIGHT + _LINE * in_legend)
    axes = figure.subplots()
    lines = []
    for label, look, by_length in zip(
        labels, drawing.line_looks([*rows]), rows.values(), strict=True
    ):
        at, values = zip(*sorted(by_length.items()), strict=True)
        lines += axes.plot(at, [*map(statistics.fmean, values)], label=label, **look)
        low, high = [*map(min, values)], [*map(max, values)]
        axes.fill_between(at, low, high, color=look["color"], alpha=0.15, linewidth=0)
    lengths = sorted(set().union(*rows.values()))
    axes.axvline(train_length, color="0.4", linestyle=(0, (4, 3)), linewidth=1.5, zorder=1)
    side = "right" if train_length >= lengths[-1] else "left"  # of the point where the text is
    axes.annotate(" trained length ", (train_length, 0.985), xycoords=("data", "axes fraction"),
        fontsize="small", ha=side, va="top")  # fmt: skip
    # Logarithmic axes with plain numbers. A length whose text would overlap that at its left has a
    # tick alone.
    apart = 0.07 * math.log(lengths[-1] / lengths[0])
    texts, last = [], 0
    for length in lengths:
        free = not last or math.log(length / last) > apart
        texts.append(str(length) if free else "")
        last = length if free else last
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, texts)
    axes.xaxis.set_minor_formatter("")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="y", which="minor", labelsize="small")
    axes.grid(True, which="major", **drawing.GRID)
    axes.set(xlabel=f"sequence length at evaluation ({unit}s)", ylabel=f"perplexity per {unit}")
    drawing.title(axes, title)
    # The legend has the order of the ends of the lines.
    lines.sort(key=lambda line: np.asarray(line.get_ydata())[-1], reverse=True)
    legend = figure.legend(handles=lines, loc="outside lower left", frameon=False, ncols=2)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ in a name does not begin a formula
    figure.savefig(path)


def accuracy_grid(
    values: Mapping[str, Sequence[Sequence[float]]], lengths: Sequence[int], path: Path, *,
    train_length: int, title: str = "",
) -> None:  # fmt: skip
    """Draw a table of the share of right answers: encodings by sequence length.

    A cell shows the mean over the seeds, and with several seeds the lowest and the highest share.

    Parameters
    ----------
    values : mapping of str to sequence
        Encoding -> one list for each of `lengths`, with the share of each seed, from 0 to 1.
    lengths : sequence of int
        Lengths of the evaluated sequences in bytes.
    train_length : int
        The trained length in bytes. A line separates longer lengths.
    """
    train_length = checks.integer("train_length", train_length, 1)
    lengths = [checks.integer("lengths", x, 1) for x in np.ravel(lengths).tolist()]
    if not isinstance(values, Mapping):
        raise TypeError(f"values must be a mapping, got {type(values).__name__}")
    columns = [f"{n}\n({n / train_length:.3g}x)" for n in lengths]
    rows = [(drawing.folded(str(name), _LABEL_WIDTH), cells) for name, cells in values.items()]
    if not rows:
        raise ValueError("values must hold at least one encoding, got none")
    seen = sum(length <= train_length for length in lengths)
    _draw_table(
        path, rows, columns, "share of right answers", title, divider=seen,
        xlabel="sequence length at evaluation (bytes)",
    )  # fmt: skip


def needle_grid(
    grid: ArrayLike, path: Path, *, lengths: Sequence[int], depths: Sequence[float],
    title: str = "",
) -> None:  # fmt: skip
    """Draw how often a model found a fact, by length of the context and depth in it.

    Parameters
    ----------
    grid : array (lengths, depths) of real numbers
        Shares from 0 to 1, as `wavepe.analysis.needle` returns them.
    lengths, depths : sequences of numbers
        The length of each row of `grid`, and the depth of each column.
    """
    shares = drawing.numbers("grid", grid, 2)
    columns, rows = drawing.numbers("lengths", lengths, 1), drawing.numbers("depths", depths, 1)
    if shares.shape != (len(columns), len(rows)):
        raise ValueError(
            f"grid must have shape ({len(columns)}, {len(rows)}) for these lengths and depths, got "
            f"{shares.shape}"
        )
    _draw_table(
        path, [(f"{depth:g}", x[:, None]) for depth, x in zip(rows, shares.T, strict=True)],
        [f"{length:.15g}" for length in columns], "share of facts found", title,
        xlabel="length of the context (tokens)", ylabel="depth of the fact",
    )  # fmt: skip


def _draw_table(
    path: Path, rows: Sequence[tuple[str, Any]], columns: list[str],
    what: str, title: str, *, xlabel: str, ylabel: str = "", divider: int = 0,
) -> None:  # fmt: skip
    """Draw rows of cells, each of one share or of one for each seed."""
    cells = [[[checks.zero_to_one(what, x) for x in cell] for cell in row] for _, row in rows]
    if any(len(row) != len(columns) or not all(row) for row in cells):
        raise ValueError(f"each row must hold shares for each of the {len(columns)} lengths")
    figure = drawing.new_figure(max(5.6, 3.4 + 0.64 * len(columns)), 2.0 + 0.5 * len(cells))
    axes = figure.subplots()
    means = [[statistics.fmean(cell) for cell in row] for row in cells]
    image = axes.imshow(means, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(cells):
        for x, cell in enumerate(row):
            shares = min(cell), means[y][x], max(cell)
            low, mean, high = (f"{100 * share:.0f}" for share in shares)
            text = mean if low == high else f"{mean}\n{low} to {high}"
            axes.text(x, y, text, ha="center", va="center", fontsize="small",
                      color="black" if means[y][x] > 0.5 else "white")  # fmt: skip
    if 0 < divider < len(columns):
        axes.axvline(divider - 0.5, color="white", linewidth=3)
    axes.set_xticks(range(len(columns)), columns)
    names = [name for name, _ in rows]
    axes.set_yticks(range(len(rows)), names, fontsize="small", parse_math=False)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    figure.colorbar(image, ax=axes, label=what, format="{x:.0%}", pad=0.02)
    lines = drawing.folded_title(title)
    figure.suptitle(lines, fontsize="medium", x=0.01, ha="left", parse_math=False)
    figure.savefig(path)


def band_heatmap(
    heatmap: ArrayLike, path: Path, *, measured: float | None = None,
    predicted: float | None = None, title: str = "",
) -> None:  # fmt: skip
    """Draw the norms of rotary pairs by position, with the measured and the predicted band.

    Parameters
    ----------
    heatmap : array (positions, pairs) of real numbers
        The "heatmap" of `wavepe.analysis.measured_band`, which names the source.
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
    figure.savefig(path)


def attention_maps(
    maps: Sequence[ArrayLike], path: Path, *, titles: Sequence[str] | None = None
) -> None:
    """Draw attention weights side by side, on one logarithmic scale.

    Parameters
    ----------
    maps : sequence of arrays (n, n) of real numbers
        Weights [query, key]. Weights below 1e-4 get the darkest colour; weights of 0 stay grey.
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
    figure.savefig(path)
