"""Pictures of shares from 0 to 1: right answers by encoding, and facts found by depth."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...common import checks
from . import drawing

_LABEL_WIDTH = 24


def accuracy_grid(
    values: Mapping[str, Sequence[Sequence[float]]],
    lengths: Sequence[int],
    path: drawing.Path,
    *,
    train_length: int,
    title: str = "",
) -> None:
    """Draw a table of the share of right answers: encodings by sequence length.

    A cell shows the mean over the seeds, and with several seeds the lowest and the highest share.

    Parameters
    ----------
    values : mapping of str to sequence
        Encoding -> one list for each of `lengths`, with the share of each seed, from 0 to 1.
    lengths : sequence of int
        Lengths of the evaluated sequences in bytes.
    path, title : as for all pictures (`wavepe.analysis.plots`)
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
    path: drawing.Path, rows: Sequence[tuple[str, Any]], columns: list[str],
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
            low, mean, high = (
                f"{100 * share:.0f}" for share in (min(cell), means[y][x], max(cell))
            )
            text = mean if low == high else f"{mean}\n{low} to {high}"
            axes.text(x, y, text, ha="center", va="center", fontsize="small",
                      color="black" if means[y][x] > 0.5 else "white")  # fmt: skip
    if 0 < divider < len(columns):
        axes.axvline(divider - 0.5, color="white", linewidth=3)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(
        range(len(rows)), [name for name, _ in rows], fontsize="small", parse_math=False
    )
    axes.set(xlabel=xlabel, ylabel=ylabel)
    figure.colorbar(image, ax=axes, label=what, format="{x:.0%}", pad=0.02)
    lines = drawing.folded_title(title)
    figure.suptitle(lines, fontsize="medium", x=0.01, ha="left", parse_math=False)
    drawing.save(figure, path)
