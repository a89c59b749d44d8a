"""Picture of perplexity over sequence length."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...common import checks
from .drawing import GRID, WIDTH, Path, folded, line_looks, new_figure, save
from .drawing import title as draw_title

# Height of the picture without its legend, and of a line of text, in inches.
_HEIGHT, _LINE = 4.2, 0.18
_LEGEND_WIDTH = 34  # characters that fit into a column of the legend


def perplexity_by_length(
    runs: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    train_length: int,
    title: str = "",
    unit: str = "byte",
) -> None:
    """Draw perplexity over sequence length, with one line for each encoding.

    With several seeds, the line is their mean, with a band from the lowest to the highest. The
    picture grows with the legend, which shows three lines of a spec at most.

    Parameters
    ----------
    runs : sequence of mappings
        The "runs" of a results.json of ``wavepe compare``. Each has "encoding" (str), "seed" (int)
        and "perplexity", a mapping of length to value.
    path, title : as for all pictures (`wavepe.analysis.plots`)
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
    labels = [folded(name, _LEGEND_WIDTH) for name in rows]
    tallest = sorted((1.3 + label.count("\n") for label in labels), reverse=True)
    in_legend = sum(tallest[: (len(labels) + 1) // 2])  # the taller one of two columns at most
    figure = new_figure(WIDTH, _HEIGHT + _LINE * in_legend)
    axes = figure.subplots()
    lines = []
    for label, look, by_length in zip(labels, line_looks([*rows]), rows.values(), strict=True):
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
    axes.grid(True, which="major", **GRID)
    axes.set(xlabel=f"sequence length at evaluation ({unit}s)", ylabel=f"perplexity per {unit}")
    draw_title(axes, title)
    # The legend has the order of the ends of the lines.
    lines.sort(key=lambda line: np.asarray(line.get_ydata())[-1], reverse=True)
    legend = figure.legend(handles=lines, loc="outside lower left", frameon=False, ncols=2)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ in a name does not begin a formula
    save(figure, path)
