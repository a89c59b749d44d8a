"""Pictures of what the analyses return (needs matplotlib: ``pip install "wavepe[plot]"``)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

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
        `runs` is empty.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, NullFormatter
    except ImportError:
        raise ImportError('plots need matplotlib: pip install "wavepe[plot]"') from None
    if not runs:
        raise ValueError("runs is empty: needs at least one")

    figure = Figure(figsize=(9.0, 4.8), layout="constrained")
    axes = figure.subplots()
    every_length: set[int] = set()
    lines = []
    for number, (encoding, by_length) in enumerate(_by_encoding(runs).items()):
        lengths = sorted(by_length)
        every_length.update(lengths)
        mean = [statistics.fmean(by_length[length]) for length in lengths]
        colour = _COLOURS[number % len(_COLOURS)]
        style = _LINES[(number // len(_COLOURS)) % len(_LINES)]
        marker = _MARKERS[number % len(_MARKERS)]
        (line,) = axes.plot(lengths, mean, style, color=colour, marker=marker, label=encoding)
        lines.append(line)
        low = [min(by_length[length]) for length in lengths]
        high = [max(by_length[length]) for length in lengths]
        axes.fill_between(lengths, low, high, color=colour, alpha=0.15, linewidth=0)

    axes.axvline(train_length, color="0.4", linestyle=(0, (4, 3)), linewidth=1.5, zorder=1)
    axes.annotate(
        " trained length", (train_length, 0.985), xycoords=("data", "axes fraction"), color="0.3",
        fontsize="small", va="top",
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(every_length), [str(length) for length in sorted(every_length)])
    axes.xaxis.set_minor_formatter(NullFormatter())
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)
    axes.tick_params(axis="y", which="minor", labelsize="small", labelcolor="0.4")
    axes.set_xlabel("sequence length at evaluation (bytes)")
    axes.set_ylabel("perplexity per byte")
    axes.grid(True, which="major", color="0.9")
    if title:
        axes.set_title(title, fontsize="medium", loc="left")
    lines.sort(key=lambda line: -line.get_ydata()[-1])  # the legend in the order of the line ends
    figure.legend(handles=lines, loc="outside right upper", frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def _by_encoding(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, list[float]]]:
    """encoding -> length -> one value per seed."""
    table: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        by_length = table.setdefault(run["encoding"], defaultdict(list))
        for length, value in run["perplexity"].items():
            by_length[int(length)].append(value)
    return table
