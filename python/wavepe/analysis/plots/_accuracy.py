"""Picture of the share of right answers, by encoding and length."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ...common import checks
from ...common.labels import fold, shortened
from .drawing import Path, new_figure, save

_LABEL_WIDTH = 24


def accuracy_grid(
    values: Mapping[str, Sequence[Sequence[float]]],
    lengths: Sequence[int],
    path: Path,
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
    lengths = checks.real_array("lengths", lengths).ravel().tolist()
    lengths = [checks.integer("lengths", length, 1) for length in lengths]
    if not isinstance(values, Mapping):
        raise TypeError(f"values must be a mapping, got {type(values).__name__}")
    if not values or not lengths:
        raise ValueError("values and lengths must not be empty, got none")
    values = {str(name): _shares(str(name), cells, len(lengths)) for name, cells in values.items()}
    figure = new_figure(3.4 + 0.64 * len(lengths), 1.4 + 0.5 * len(values))
    axes = figure.subplots()
    means = [[statistics.fmean(cell) for cell in cells] for cells in values.values()]
    image = axes.imshow(means, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for row, cells in enumerate(values.values()):
        for column, cell in enumerate(cells):
            mean = means[row][column]
            text = f"{100 * mean:.0f}"
            if len(cell) > 1 and round(100 * min(cell)) < round(100 * max(cell)):
                text += f"\n{100 * min(cell):.0f} to {100 * max(cell):.0f}"
            axes.text(column, row, text, ha="center", va="center", fontsize="small",
                      color="black" if mean > 0.5 else "white")  # fmt: skip
    beyond = sum(length <= train_length for length in lengths)
    if 0 < beyond < len(lengths):
        axes.axvline(beyond - 0.5, color="white", linewidth=3)
    axes.set_xticks(range(len(lengths)), [f"{n}\n({n / train_length:.3g}x)" for n in lengths])
    axes.set_yticks(range(len(values)), shortened(values, _LABEL_WIDTH)[0], fontsize="small")
    for label in axes.get_yticklabels():
        label.set_parse_math(False)  # a $ in a name does not begin a formula
    axes.set_xlabel("sequence length at evaluation (bytes)")
    figure.colorbar(image, ax=axes, label="share of right answers", format="{x:.0%}", pad=0.02)
    if title:
        figure.suptitle("\n".join(fold(title, 64)), fontsize="medium", x=0.01, ha="left")
    save(figure, path)


def _shares(name: str, cells: Sequence[Sequence[float]], count: int) -> list[list[float]]:
    """Return the cells of a row, each a list of shares."""
    if isinstance(cells, str) or not isinstance(cells, Sequence) or len(cells) != count:
        raise ValueError(
            f"values[{name!r}] must hold a list of shares for each of the {count} lengths"
        )
    rows = [checks.real_array(name, cell).ravel().tolist() for cell in cells]
    if not all(rows):
        raise ValueError(f"values[{name!r}] must hold at least one share for each length")
    return [[checks.zero_to_one(name, share) for share in row] for row in rows]
