"""Pictures of wavelets by distance, scale and shift, and of tables."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

import wavepe

from ...arrays.relative_bias import rows_at
from ...encodings import Encoding, Wavelet
from . import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPECS = tuple(
    f"wavelet:kind={kind},scales=4,min_scale=4" for kind in ("ricker", "gaussian", "morlet", "haar")
)
_LINES = 4  # the largest number of scales, or shifts, in a panel


def wavelets(
    path: drawing.Path,
    *,
    encodings: drawing.Specs = _SPECS,
    dim: int | None = None,
    length: int = 64,
) -> dict[str, Any]:
    """Draw wavelets over the distance of two tokens, for several scales and shifts.

    The upper panels show each encoding at several scales, with shift 0. The lower panels show the
    first encoding at several shifts, literal and mirrored. Their scale is the smallest one that is
    at least 4.

    Parameters
    ----------
    path, encodings : as for all pictures; encodings `wavelet`
    dim : int, optional
        Head size. By default the largest multiple of the number of scales up to 64.
    length : int
        The largest distance, at least 2.

    Returns
    -------
    dict
        "distance", an int array (2 length + 1,); "scales", a list of dicts with "encoding" (str),
        "scale" (float) and "p", an array like "distance"; and "shifts", a list of dicts with
        "mirrored" (bool), "scale", "shift" (floats) and "p".
    """
    kinds: list[Wavelet] = drawing.encodings_of(
        encodings, "wavelets", lambda encoding: isinstance(encoding, Wavelet)
    )
    length = drawing.size("length", length, 2, drawing.MOST_TOKENS)
    distance = np.arange(-length, length + 1)
    scales, shifts = [], []
    for encoding in kinds:
        for row in _columns(encoding, dim, length, by="scale"):
            scales.append({"encoding": str(encoding), "scale": row["scale"], "p": row["p"]})
    for mirrored in (False, True):
        encoding = dataclasses.replace(kinds[0], mirrored=mirrored)
        for row in _columns(encoding, dim, length, by="shift"):
            shifts.append({"mirrored": mirrored, **row})

    count = -(-len(kinds) // 2)
    figure = drawing.new_figure(drawing.WIDTH, 2.0 + 1.9 * count)
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(count, 1.1))[:, 0]
    grid = upper.subplots(count, 2, sharex=True, sharey=True, squeeze=False)
    for axes, kind in itertools.zip_longest(grid.flat, kinds):
        if kind is None:
            axes.set_axis_off()
            continue
        rows = [row for row in scales if row["encoding"] == str(kind)]
        _draw(axes, distance, rows, "scale", named=False)
        drawing.title(axes, kind.kind)
    drawing.legend_beside(
        grid[:, -1] if len(kinds) % 2 == 0 else grid.flat[: len(kinds)], "scale a"
    )
    for axes in grid[:, 0]:
        axes.set_ylabel("p(distance)")
    panels = lower.subplots(1, 2, sharey=True)
    for axes, form in zip(panels, ("literal", "mirrored"), strict=True):
        rows = [row for row in shifts if row["mirrored"] == (form == "mirrored")]
        _draw(axes, distance, rows, "shift", named=form == "literal")
        reach = min(length, rows[-1]["shift"] + 8 * rows[0]["scale"])
        axes.set_xlim(-reach, reach)
        drawing.title(axes, f"{kinds[0].kind}, a = {rows[0]['scale']:g}, {form}")
    drawing.legend_beside(panels, "shift b")
    panels[0].set_ylabel("p(distance)")
    drawing.save(figure, path)
    return {"distance": distance, "scales": scales, "shifts": shifts}


def _head_size(encoding: Encoding, dim: int | None, usual: int) -> int:
    """Return `dim`; for None, the largest multiple of the number of scales up to `usual`."""
    if dim is None:
        scales = getattr(encoding, "scales", 1)
        count = len(scales) if isinstance(scales, tuple) else scales
        dim = max(1, usual // count) * count
    return drawing.size("dim", dim, 1, drawing.MOST_DIMS)


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
    axes: Axes, distance: np.ndarray, rows: list[dict[str, Any]], label: str, *, named: bool
) -> None:
    """Draw the rows over the distance; the shade of later keys says why if `named`."""
    axes.axvspan(distance[0], 0, zorder=0, **drawing.SHADE)
    axes.axvline(0, color="0.5", linewidth=0.8, zorder=1)
    if named:
        axes.text(0.02, 0.97, "future, masked", transform=axes.transAxes, fontsize="small",
            va="top")  # fmt: skip
    for row, colour in zip(rows, drawing.shades(len(rows)), strict=True):
        jumps = len(np.unique(row["p"])) <= 3  # as Haar does
        # The first line is on top: it has the narrowest scale.
        axes.plot(distance, row["p"], color=colour, label=f"{row[label]:g}", linewidth=1.4,
            zorder=3 - row[label] / (1 + rows[-1][label]),
            drawstyle="steps-mid" if jumps else "default")  # fmt: skip
    axes.set_xlim(distance[0], distance[-1])
    place = axes.get_subplotspec()
    if place is None or place.is_last_row():
        axes.set_xlabel("distance (tokens)")
    axes.grid(True, **drawing.GRID)


def table(
    path: drawing.Path,
    *,
    encodings: drawing.Specs = ("wavelet",),
    dim: int | None = None,
    length: int = 256,
) -> dict[str, Any]:
    """Draw the table of a relative encoding, and the scores that three of its columns give.

    The map above shows p(distance) for each column of the head. Each square below is for one
    column: it shows the number that is added to the score of query and key (before the division by
    sqrt(d)) if the query is 1 in this column and 0 in the others.

    Parameters
    ----------
    path : as for all pictures (`wavepe.analysis.plots`)
    encodings : spec
        One relative encoding. Learned encodings show their initial values.
    dim : int, optional
        Head size. By default the largest multiple of the number of scales up to 128.
    length : int
        Sequence length L, from 2 to 2048.

    Returns
    -------
    dict
        "encoding" (str), "p", an array (L, columns) by distance, and "squares", a list of dicts
        with "column" (int) and "bias", an array (L, L) that is NaN where a causal mask hides keys.
    """
    (relative,) = drawing.encodings_of(
        encodings, "a relative encoding", lambda encoding: "table" in encoding.terms, most=1
    )
    length = drawing.size("length", length, 2, 2048)
    dim = _head_size(relative, dim, 128)
    p, first, beyond = relative.table(length, dim)
    rows = rows_at(np.arange(length), p, first, beyond, axis=-2)
    width = p.shape[-1]  # another than `dim`, if not the queries themselves read the table
    columns = sorted({(2 * number + 1) * width // 6 for number in range(3)})
    squares: list[dict[str, Any]] = []
    hidden = np.arange(length)[:, None] < np.arange(length)
    for column in columns:
        query = np.broadcast_to(np.eye(width, dtype=np.float32)[column], (length, width))
        bias = wavepe.relative_bias(query, p, length, first=first, beyond=beyond)
        squares.append({"column": column, "bias": np.where(hidden, np.nan, bias)})

    figure = drawing.new_figure(drawing.WIDTH, 7.2)
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.25, 1))[:, 0]
    colours = drawing.clear_at_zero(max(float(np.abs(rows).max()), 1e-12))
    axes = upper.subplots()
    image = axes.imshow(rows, aspect="auto", interpolation="nearest", **colours)
    axes.set(ylabel="distance (tokens)", xlabel="column")
    drawing.title(axes, drawing.folded(str(relative), 60))
    names = _name_columns(axes, relative, dim, columns)
    upper.colorbar(image, ax=axes, label="p(distance)", pad=0.02)
    panels = lower.subplots(1, len(squares), sharey=True, squeeze=False)[0]
    for axes, square, name in zip(panels, squares, names, strict=True):
        axes.imshow(square["bias"], interpolation="nearest", **colours)
        drawing.title(axes, name)
        axes.set_xlabel("key (token)")
    panels[0].set_ylabel("query (token)")
    drawing.save(figure, path)
    return {"encoding": str(relative), "p": rows, "squares": squares}


def _name_columns(axes: Axes, encoding: Encoding, dim: int, columns: list[int]) -> list[str]:
    """Write the scale of each block of columns on the axis of the map; return names of columns."""
    if not isinstance(encoding, Wavelet):
        return [f"column {column}" for column in columns]
    scale, shift = encoding.grid(dim)
    starts = np.flatnonzero(shift == 0)
    if len(starts) <= 16:
        for start in starts[1:]:
            axes.axvline(start - 0.5, color="0.4", linewidth=0.5)
        texts = [f"{start}\na={scale[start]:g}" for start in starts]
        axes.set_xticks(starts, texts, fontsize="small")
    return [f"column {c}\na = {scale[c]:g}, b = {shift[c]:g}" for c in columns]
