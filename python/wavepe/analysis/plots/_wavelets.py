"""Pictures of wavelets: over distance, over scales and shifts, as a table, as a transform."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

import wavepe

from ...encodings import Encoding, Wavelet
from .. import _matrices
from . import _parts
from ._figure import need_matplotlib, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPECS = tuple(
    f"wavelet:kind={kind},scales=4,min_scale=4" for kind in ("ricker", "gaussian", "morlet", "haar")
)
_LINES = 4  # at most so many scales, or shifts, in a panel


def wavelets(
    path: _parts.Path,
    *,
    encodings: _parts.Specs = _SPECS,
    dim: int | None = None,
    length: int = 64,
) -> dict[str, Any]:
    """Draw wavelets over the distance of two tokens, by scale and by shift.

    The upper panels show each encoding at several scales, with shift 0. The lower ones show the
    first encoding with several shifts, literal and mirrored, at its smallest scale from 4 on.

    Parameters
    ----------
    path : path
        The picture's file; its ending names the format.
    encodings : spec or list of specs
        Encodings `wavelet`, six at most.
    dim : int, optional
        Head size; by default 64, or the nearest that the number of scales divides.
    length : int
        The largest distance drawn.

    Returns
    -------
    dict
        What is drawn: "distance", "scales" (a list of encoding, scale, p) and "shifts" (a list of
        mirrored, scale, shift, p).

    Raises
    ------
    ImportError
        matplotlib is missing.
    ValueError, TypeError
        A wrong spec or size.
    """
    need_matplotlib()
    found: list[Any] = _parts.encodings_of(
        encodings, "wavelets", lambda encoding: isinstance(encoding, Wavelet)
    )
    length = _parts.size("length", length, 2, _parts.MOST_TOKENS)
    distance = np.arange(-length, length + 1)
    scales, shifts = [], []
    for encoding in found:
        scales += _by_scale(encoding, _head_size(encoding, dim, 64), length)
    for mirrored in (False, True):
        encoding = dataclasses.replace(found[0], mirrored=mirrored)
        shifts += _by_shift(encoding, _head_size(encoding, dim, 64), length)

    figure = new_figure(max(9.0, 2.4 * len(found)), 5.4)
    upper, lower = figure.subfigures(2, 1, squeeze=False)[:, 0]
    upper.suptitle("A large scale a makes a wide wavelet", fontsize="medium")
    lower.suptitle(
        "A shift b moves it: literally b tokens back, mirrored b tokens into the masked future",
        fontsize="medium",
    )
    panels = upper.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, encoding in zip(panels, found, strict=True):
        rows = [row for row in scales if row["encoding"] == str(encoding)]
        _draw(axes, distance, rows, "scale", named=False)
        _parts.title(axes, encoding.kind)
    _parts.legend_beside(panels, "scale a")
    panels[0].set_ylabel("p(distance)")
    panels = lower.subplots(1, 2, sharey=True)
    for axes, mirrored in zip(panels, (False, True), strict=True):
        rows = [row for row in shifts if row["mirrored"] is mirrored]
        _draw(axes, distance, rows, "shift", named=not mirrored)
        reach = min(length, rows[-1]["shift"] + 8 * rows[0]["scale"])
        axes.set_xlim(-reach, reach)
        form = "mirrored: psi((-distance - b)/a)" if mirrored else "literal: psi((distance - b)/a)"
        _parts.title(axes, f"{found[0].kind}, a = {rows[0]['scale']:g}, {form}")
    _parts.legend_beside(panels, "shift b")
    panels[0].set_ylabel("p(distance)")
    save(figure, path, _parts.DPI)
    return {"distance": distance, "scales": scales, "shifts": shifts}


def _head_size(encoding: Encoding, dim: int | None, usual: int) -> int:
    """`dim`, or about `usual` where it is None: a multiple of the number of scales."""
    if dim is None:
        scales = getattr(encoding, "scales", 1)
        count = len(scales) if isinstance(scales, tuple) else scales
        dim = max(1, usual // count) * count
    return _parts.size("dim", dim, 1, _parts.MOST_DIMS)


def _by_scale(encoding: Wavelet, dim: int, length: int) -> list[dict[str, Any]]:
    """The columns of shift 0, at most _LINES of them."""
    scale, shift = encoding.grid(dim)
    p, *_ = encoding.table(length + 1, dim, causal=False)
    return [
        {"encoding": str(encoding), "scale": scale[column], "p": p[:, column]}
        for column in _some(np.flatnonzero(shift == 0), scale)
    ]


def _by_shift(encoding: Wavelet, dim: int, length: int) -> list[dict[str, Any]]:
    """The columns of a scale that is small but no mere spike, at most _LINES of them."""
    scale, shift = encoding.grid(dim)
    p, *_ = encoding.table(length + 1, dim, causal=False)
    drawn = min(scale[scale >= 4], default=scale.max())
    return [
        {
            "mirrored": encoding.mirrored,
            "scale": scale[column],
            "shift": shift[column],
            "p": p[:, column],
        }
        for column in _some(np.flatnonzero(scale == drawn), shift)
    ]


def _some(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Columns of at most _LINES different values, in their order."""
    _, firsts = np.unique(values[columns], return_index=True)
    return columns[firsts[_parts.ticks(len(firsts), _LINES)]]


def _draw(
    axes: Axes, distance: np.ndarray, rows: list[dict[str, Any]], label: str, *, named: bool
) -> None:
    _parts.hide_future(axes, distance[0], named)
    for row, colour in zip(rows, _parts.shades(len(rows)), strict=True):
        # the first on top: of scales it is the narrowest
        axes.plot(distance, row["p"], color=colour, label=f"{row[label]:g}", linewidth=1.4,
            zorder=3 - row[label] / (1 + rows[-1][label]))  # fmt: skip
    axes.set_xlim(distance[0], distance[-1])
    axes.set_xlabel("distance (tokens)")
    axes.grid(True, color="0.88")


def table(
    path: _parts.Path,
    *,
    encoding: str | Encoding = "wavelet",
    dim: int | None = None,
    length: int = 256,
) -> dict[str, Any]:
    """Draw the table of a relative encoding: all columns over distance, and some over L x L.

    The map shows p(distance) for each column of the head. Beside it stand the squares that three
    columns make of it: what is added to the scores (before the division by sqrt(d)) for queries
    that are 1 in that column and 0 elsewhere.

    Parameters
    ----------
    path : path
        The picture's file; its ending names the format.
    encoding : spec
        A relative encoding: wavelet, shaw or transformer_xl. Learned ones show initial values.
    dim : int, optional
        Head size; by default 128, or the nearest that the number of scales divides.
    length : int
        Sequence length L.

    Returns
    -------
    dict
        What is drawn: "encoding", "p" (L, dim) by distance, and "squares", a list of column and
        bias (L, L), None where a causal mask hides the key.

    Raises
    ------
    ImportError
        matplotlib is missing.
    ValueError, TypeError
        A wrong spec or size.
    """
    need_matplotlib()
    chosen = _parts.encoding_of(
        encoding, "a relative encoding", lambda encoding: encoding.entry == "relative"
    )
    length = _parts.size("length", length, 2, 2048)
    dim = _head_size(chosen, dim, 128)
    p, first, beyond = chosen.table(length, dim)
    deltas = np.arange(length) - first
    rows = p[np.clip(deltas, 0, len(p) - 1)]
    if beyond == "zero":
        rows = np.where((deltas < len(p))[:, None], rows, 0)
    columns = sorted({(2 * number + 1) * dim // 6 for number in range(3)})
    squares: list[dict[str, Any]] = []
    hidden = np.arange(length)[:, None] < np.arange(length)
    for column in columns:
        query = np.broadcast_to(np.eye(dim, dtype=np.float32)[column], (length, dim))
        bias = wavepe.relative_bias(query, p, length, first=first, beyond=beyond)
        squares.append({"column": column, "bias": np.where(hidden, np.nan, bias)})

    figure = new_figure(9.4, 6.2)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1.75, 1))[0]
    figure.suptitle(
        "A row of numbers for each distance; each column becomes bands of the square of scores",
        fontsize="medium",
    )
    most = max(float(np.abs(rows).max()), 1e-12)
    colours = {"cmap": "PuOr_r", "vmin": -most, "vmax": most, "interpolation": "nearest"}
    axes = left.subplots()
    image = axes.imshow(rows, aspect="auto", **colours)
    axes.set_ylabel("distance (tokens)")
    axes.set_xlabel("column of the head")
    _parts.title(axes, _parts.name_of(str(chosen), 60))
    _mark_scales(axes, chosen, dim)
    left.colorbar(image, ax=axes, label="p(distance)", pad=0.02)
    panels = right.subplots(len(squares), 1, sharex=True, squeeze=False)[:, 0]
    for axes, square in zip(panels, squares, strict=True):
        axes.imshow(square["bias"], **colours)
        _parts.title(axes, _column_name(chosen, dim, square["column"]))
        axes.set_ylabel("query (token)")
    panels[-1].set_xlabel("key (token)")
    save(figure, path, _parts.DPI)
    return {"encoding": str(chosen), "p": rows, "squares": squares}


def _mark_scales(axes: Axes, encoding: Encoding, dim: int) -> None:
    """Name the scale of each block of columns above the map."""
    if not isinstance(encoding, Wavelet):
        return
    scale, shift = encoding.grid(dim)
    starts = np.flatnonzero(shift == 0)
    if len(starts) > 16:
        return
    for start in starts[1:]:
        axes.axvline(start - 0.5, color="0.4", linewidth=0.5)
    axes.set_xticks(starts, [f"{start}\na={scale[start]:g}" for start in starts], fontsize="small")


def _column_name(encoding: Encoding, dim: int, column: int) -> str:
    if not isinstance(encoding, Wavelet):
        return f"column {column}"
    scale, shift = encoding.grid(dim)
    return f"column {column}: a = {scale[column]:g}, b = {shift[column]:g}"


def transform(path: _parts.Path, *, kind: str = "ricker", length: int = 256) -> dict[str, Any]:
    """Draw the wavelet transform of a signal: where it lies, and how wide it is.

    The signal has a narrow bump, a wide one and a fast wave. W(a, b) is large where a wavelet of
    scale a at the shift b looks like the signal.

    Parameters
    ----------
    path : path
        The picture's file; its ending names the format.
    kind : str
        The mother wavelet: ricker, gaussian, morlet, haar or a registered one.
    length : int
        Samples of the signal.

    Returns
    -------
    dict
        What is drawn: "signal" (length,), "scale" (scales,), and "W" (scales, length) by shift.

    Raises
    ------
    ImportError
        matplotlib is missing.
    ValueError, TypeError
        An unknown kind or a wrong size.
    """
    need_matplotlib()
    length = _parts.size("length", length, 16, 2048)
    t = np.arange(length)
    narrow = wavepe.gaussian(t, length / 64.0, 0.15 * length)
    wide = wavepe.gaussian(t, length / 10.0, 0.45 * length)
    wave = wavepe.gaussian(t, length / 12.0, 0.8 * length) * np.cos(t * 24 * np.pi / length * 2)
    signal = narrow + wide + wave
    scale = 2.0 ** np.arange(0, np.log2(length / 4) + 1e-9, 0.25)
    found = _matrices.wavelet_transform(signal, scale[:, None], t, kind)

    figure = new_figure(8.0, 4.6)
    figure.suptitle(
        "The transform finds each bump at its place, and at the scale of its width",
        fontsize="medium",
    )
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    upper.plot(t, signal, color="k", linewidth=1.2)
    upper.set_ylabel("signal x(t)")
    upper.grid(True, color="0.9")
    most = max(float(np.abs(found).max()), 1e-12)
    image = lower.pcolormesh(
        t, scale, found, cmap="PuOr_r", vmin=-most, vmax=most, shading="nearest", rasterized=True
    )
    lower.set_yscale("log", base=2)
    lower.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    lower.set_ylabel("scale a (tokens)")
    lower.set_xlabel("t and shift b (tokens)")
    figure.colorbar(image, ax=lower, label=f"W(a, b), {kind}", pad=0.02)
    save(figure, path, _parts.DPI)
    return {"signal": signal, "scale": scale, "W": found}
