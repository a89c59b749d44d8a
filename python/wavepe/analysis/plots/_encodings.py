"""Pictures of encodings, by formula: what each of them puts into a model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.relative_bias import rows_at
from ...encodings import Encoding, Wavelet
from . import drawing
from .drawing import Path, Specs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KINDS = tuple(
    f"wavelet:kind={kind},scales=4,min_scale=4" for kind in ("ricker", "gaussian", "morlet", "haar")
)
_LINES = 4  # the largest number of scales, or shifts, in a panel


def wavelets(
    path: Path, *, encodings: Specs = _KINDS, dim: int | None = None, length: int = 64
) -> dict[str, Any]:
    """Draw wavelets over the distance of two tokens, for several scales and shifts.

    The upper panels show each encoding at several scales, with shift 0. The lower panels show the
    first encoding at several shifts, literal and mirrored. Their scale is the smallest one that is
    at least 4. `length` is the largest distance.

    The numbers: "distance", an int array (2 length + 1,); "scales", a list of dicts with "encoding"
    (str), "scale" (float) and "p", an array like "distance"; and "shifts", a list of dicts with
    "mirrored" (bool), "scale", "shift" (floats) and "p".
    """
    kinds: list[Wavelet] = drawing.encodings_of("wavelets", encodings)
    length = drawing.size("length", length, 2)
    distance = np.arange(-length, length + 1)
    count = -(-len(kinds) // 2)
    figure = drawing.new_figure(drawing.WIDTH, 2.0 + 1.9 * count)
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(count, 1.1))[:, 0]
    grid = upper.subplots(count, 2, sharex=True, sharey=True, squeeze=False)
    scales, shifts = [], []
    for axes, kind in zip(grid.flat, kinds, strict=False):
        rows = _columns(kind, dim, length, by="scale")
        scales += [{"encoding": str(kind), "scale": x["scale"], "p": x["p"]} for x in rows]
        _draw(axes, distance, rows, "scale", kind.kind)
    if len(kinds) % 2:
        grid[-1, 1].set_axis_off()
    drawing.legend_beside(grid.flat[: len(kinds)], "scale a")
    panels = lower.subplots(1, 2, sharey=True)
    for axes, mirrored in zip(panels, (False, True), strict=True):
        rows = _columns(dataclasses.replace(kinds[0], mirrored=mirrored), dim, length, by="shift")
        shifts += [{"mirrored": mirrored, **row} for row in rows]
        scale, form = rows[0]["scale"], "mirrored" if mirrored else "literal"
        _draw(axes, distance, rows, "shift", f"{kinds[0].kind}, a = {scale:g}, {form}")
        reach = min(length, rows[-1]["shift"] + 8 * scale)
        axes.set_xlim(-reach, reach)
    panels[0].annotate(
        "future, masked", (0.02, 0.97), xycoords="axes fraction", fontsize="small", va="top"
    )
    drawing.legend_beside(panels, "shift b")
    figure.savefig(path)
    return {"distance": distance, "scales": scales, "shifts": shifts}


def _head_size(encoding: Encoding, dim: int | None, usual: int) -> int:
    """Return `dim`; for None, the largest multiple of the number of scales up to `usual`."""
    scales = getattr(encoding, "scales", 1)
    count = len(scales) if isinstance(scales, tuple) else scales
    return drawing.size("dim", max(1, usual // count) * count if dim is None else dim, 1)


def _columns(encoding: Wavelet, dim: int | None, length: int, *, by: str) -> list[dict[str, Any]]:
    """Return at most _LINES columns that differ in scale or shift, evenly spread, in rising order.

    By scale, their shift is 0; by shift, their scale is the smallest one from 4 on.
    """
    dim = _head_size(encoding, dim, 64)
    scale, shift = encoding.grid(dim)
    p, *_ = encoding.table(length + 1, dim, causal=False)
    drawn = min(scale[scale >= 4], default=scale.max())
    columns = np.flatnonzero(shift == 0 if by == "scale" else scale == drawn)
    values = (scale if by == "scale" else shift)[columns]
    _, firsts = np.unique(values, return_index=True)
    return [
        {"scale": scale[column], "shift": shift[column], "p": p[:, column]}
        for column in columns[firsts[drawing.ticks(len(firsts), _LINES)]]
    ]


def _draw(
    axes: Axes, distance: np.ndarray, rows: list[dict[str, Any]], label: str, title: str
) -> None:
    """Draw the rows over the distance, with a shade over later keys."""
    axes.axvspan(distance[0], 0, zorder=0, **drawing.SHADE)
    axes.axvline(0, color="0.5", linewidth=0.8, zorder=1)
    for row, colour in zip(rows, drawing.shades(len(rows)), strict=True):
        jumps = len(np.unique(row["p"])) <= 3  # as Haar does
        # The first line is on top: it has the narrowest scale.
        axes.plot(distance, row["p"], color=colour, label=f"{row[label]:g}", linewidth=1.4,
            zorder=3 - row[label] / (1 + rows[-1][label]),
            drawstyle="steps-mid" if jumps else "default")  # fmt: skip
    axes.set(xlim=(distance[0], distance[-1]), xlabel="distance (tokens)", ylabel="p(distance)")
    axes.label_outer()
    axes.grid(True, **drawing.GRID)
    drawing.title(axes, title)


def table(
    path: Path, *, encodings: Specs = ("wavelet",), dim: int | None = None, length: int = 256
) -> dict[str, Any]:
    """Draw the table of a relative encoding, and the scores that three of its columns give.

    The map above shows p(distance) for each column of the head. Each square below is for one
    column: it shows the number that is added to the score of query and key (before the division by
    sqrt(d)) if the query is 1 in this column and 0 in the others. The picture takes one encoding,
    and lengths up to 2048.

    The numbers: "encoding" (str), "p", an array (length, columns) by distance, and "squares", a
    list of dicts with "column" (int) and "bias", an array (length, length) that is NaN where a
    causal mask hides keys.
    """
    (relative,) = drawing.encodings_of("table", encodings)
    length = drawing.size("length", length, 2, 2048)
    dim = _head_size(relative, dim, 128)
    p, first, beyond = relative.table(length, dim)
    rows = rows_at(np.arange(length), p, first, beyond, axis=-2)
    width = rows.shape[-1]  # another than `dim`, if not the queries themselves read the table
    columns = sorted({(2 * number + 1) * width // 6 for number in range(3)})
    distance = np.subtract.outer(np.arange(length), np.arange(length))
    squares = [
        {"column": c, "bias": np.where(distance < 0, np.nan, rows[np.abs(distance), c])}
        for c in columns
    ]

    figure = drawing.new_figure(drawing.WIDTH, 7.2)
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.25, 1))[:, 0]
    colours = drawing.clear_at_zero(rows)
    axes = upper.subplots()
    upper.colorbar(
        axes.imshow(rows, aspect="auto", **colours), ax=axes, label="p(distance)", pad=0.02
    )
    axes.set(ylabel="distance (tokens)", xlabel="column")
    drawing.title(axes, drawing.folded(str(relative), 60))
    names = [f"column {column}" for column in columns]
    if isinstance(relative, Wavelet):
        scale, shift = relative.grid(dim)
        names = [f"column {c}\na = {scale[c]:g}, b = {shift[c]:g}" for c in columns]
        starts = np.flatnonzero(shift == 0)
        if len(starts) <= 16:  # else the scales of the blocks would overlap
            texts = [f"{start}\na={scale[start]:g}" for start in starts]
            axes.set_xticks(starts, texts, fontsize="small")
            for start in starts[1:]:
                axes.axvline(start - 0.5, color="0.4", linewidth=0.5)
    panels = lower.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, square, name in zip(panels, squares, names, strict=True):
        axes.imshow(square["bias"], **colours)
        drawing.title(axes, name)
        axes.set_xlabel("key (token)")
    panels[0].set_ylabel("query (token)")
    figure.savefig(path)
    return {"encoding": str(relative), "p": rows, "squares": squares}


def bias(
    path: Path, *, encodings: Specs = ("alibi", "kerple", "sandwich"), heads: int = 8,
    length: int = 256,
) -> dict[str, Any]:  # fmt: skip
    """Draw what slopes and biases add to the score, by distance and head.

    Each encoding gets a panel with one line for each head.

    The numbers: "distance", an int array (length,), and "panels", a list of dicts with "encoding"
    (str) and "bias", an array (heads, length).
    """
    biasing: list[Encoding] = drawing.encodings_of("bias", encodings)
    distance = np.arange(drawing.size("length", length, 2))
    heads = drawing.size("heads", heads, 1)
    panels: list[dict[str, Any]] = []
    for encoding in biasing:
        values: Any = 0.0
        if "slopes" in encoding.terms:
            values = -encoding.slopes(heads)[:, None] * distance
        if "bias" in encoding.terms:
            values = values + rows_at(distance, *encoding.bias(len(distance), heads), axis=-1)
        panels.append({"encoding": str(encoding), "bias": values})
    figure = drawing.new_figure(max(drawing.WIDTH, 2.2 * len(panels)), 3.6)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    listed = drawing.ticks(heads, 8)
    names = [f"{head + 1}" if head in listed else "_" for head in range(heads)]
    for axes, panel in zip(row, panels, strict=True):
        axes.set_prop_cycle(color=drawing.shades(heads))
        axes.plot(panel["bias"].T, linewidth=1.4, label=names)
        axes.grid(True, **drawing.GRID)
        axes.set(xlim=(0, distance[-1]), xlabel="distance")
        drawing.title(axes, drawing.folded(panel["encoding"], 30))
    row[0].set_ylabel("added to the score")
    drawing.legend_beside(row[-1:], "head")
    figure.savefig(path)
    return {"distance": distance, "panels": panels}
