"""Pictures of what the analyses return (needs matplotlib, of the extra "plot")."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from .. import _checks
from .._runtime import command_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

# Okabe and Ito's colours, told apart with every kind of colour blindness, dark ones first.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
_MARKERS = "osD^vPX*"
_LINES = ("-", "--", ":", "-.")


def perplexity_by_length(
    runs: Sequence[Mapping[str, Any]],
    path: str | PathLike[str],
    *,
    train_length: int,
    title: str = "",
) -> None:
    """Draw perplexity over sequence length, one line per encoding, to the file `path`.

    Parameters
    ----------
    runs : sequence of mappings
        The "runs" of a results.json: "encoding", "seed", "perplexity" {length: value}. Several
        seeds of an encoding become their mean, with a band from the lowest to the highest.
    path : path
        The picture's file; its ending names the format.
    train_length : int
        The trained length, marked by a vertical line.
    title : str, optional
        Text above the picture.

    Raises
    ------
    ImportError
        matplotlib is missing.
    ValueError
        `runs` is empty, or the length is below 1.
    TypeError
        An argument of another type.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"plots need matplotlib: {command_for('plot')}") from None
    if not isinstance(runs, Sequence) or not all(isinstance(run, Mapping) for run in runs):
        raise TypeError(f"runs must be a list of mappings, got {type(runs).__name__}")
    if not runs:
        raise ValueError("runs is empty: needs at least one")
    train_length = _checks.integer("train_length", train_length, 1)
    if not isinstance(title, str):
        raise TypeError(f"title must be a string, got {title!r}")

    figure = Figure(figsize=(9.0, 4.8), layout="constrained")
    axes = figure.subplots()
    every_length: set[int] = set()
    lines = []
    for number, (encoding, by_length) in enumerate(_by_encoding(runs).items()):
        every_length.update(by_length)
        lines.append(_draw_line(axes, number, encoding, by_length))
    _mark_length(axes, train_length)
    _scale_axes(axes, sorted(every_length))
    axes.set_xlabel("sequence length at evaluation (bytes)")
    axes.set_ylabel("perplexity per byte")
    if title:
        axes.set_title(title, fontsize="medium", loc="left")
    lines.sort(key=_last, reverse=True)  # the legend in the order of the line ends
    figure.legend(handles=lines, loc="outside right upper", frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def _last(line: Any) -> float:
    return line.get_ydata()[-1]


def _draw_line(axes: Axes, number: int, label: str, by_length: Mapping[int, list[float]]) -> Line2D:
    """The mean over seeds, with a band from the lowest to the highest."""
    lengths = sorted(by_length)
    colour = _COLOURS[number % len(_COLOURS)]
    (line,) = axes.plot(
        lengths,
        [statistics.fmean(by_length[length]) for length in lengths],
        linestyle=_LINES[(number // len(_COLOURS)) % len(_LINES)],
        marker=_MARKERS[number % len(_MARKERS)],
        color=colour,
        label=label,
    )
    low = [min(by_length[length]) for length in lengths]
    high = [max(by_length[length]) for length in lengths]
    axes.fill_between(lengths, low, high, color=colour, alpha=0.15, linewidth=0)
    return line


def _mark_length(axes: Axes, length: int) -> None:
    axes.axvline(length, color="0.4", linestyle=(0, (4, 3)), linewidth=1.5, zorder=1)
    axes.annotate(
        " trained length",
        (length, 0.985),
        xycoords=("data", "axes fraction"),
        color="0.3",
        fontsize="small",
        va="top",
    )


def _scale_axes(axes: Axes, lengths: Sequence[int]) -> None:
    """Both axes logarithmic, with plain numbers; x shows the lengths alone."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.xaxis.set_minor_formatter(NullFormatter())
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)
    axes.tick_params(axis="y", which="minor", labelsize="small", labelcolor="0.4")
    axes.grid(True, which="major", color="0.9")


def _by_encoding(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, list[float]]]:
    """encoding -> length -> one value per seed."""
    table: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        by_length = table.setdefault(run["encoding"], defaultdict(list))
        for length, value in run["perplexity"].items():
            by_length[int(length)].append(value)
    return table
