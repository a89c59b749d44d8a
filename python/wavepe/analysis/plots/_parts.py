"""Shared by the pictures of encodings: checks of arguments, colours, marks on axes."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

import wavepe

from ...common import checks
from ...common.labels import fold
from ...encodings import Encoding
from ._figure import SHADE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Path = str | PathLike[str]
Specs = str | Encoding | Sequence[str | Encoding]

# The largest numbers that a picture can show: panels or lines, tokens, dims, heads.
MOST_ENCODINGS, MOST_TOKENS, MOST_DIMS, MOST_HEADS = 6, 1 << 16, 1024, 32
_LINES = 3  # the most lines of a written spec


def encodings_of(specs: Specs, needed: str, fits: Any) -> list[Encoding]:
    """Return the encodings of one spec or several; ValueError unless each `fits`.

    `needed` describes in words the encodings that fit.
    """
    if isinstance(specs, (str, Encoding)):
        specs = [specs]
    if not isinstance(specs, Sequence):
        raise TypeError(f"encodings must be a spec or a list of specs, got {specs!r}")
    if not 1 <= len(specs) <= MOST_ENCODINGS:
        raise ValueError(f"encodings must hold 1 to {MOST_ENCODINGS} specs, got {len(specs)}")
    found = [wavepe.encoding(spec) for spec in specs]
    for encoding in found:
        if not fits(encoding):
            raise ValueError(f"this picture needs {needed}, got the encoding {encoding}")
    return found


def encoding_of(spec: str | Encoding, needed: str, fits: Any) -> Encoding:
    """Return the encoding of one spec; see `encodings_of`."""
    if not isinstance(spec, (str, Encoding)):
        raise TypeError(f"encoding must be a spec or an encoding, got {spec!r}")
    return encodings_of(spec, needed, fits)[0]


def size(name: str, value: int, least: int, most: int) -> int:
    """Return `value`; an error unless it is an integer from `least` to `most`."""
    value = checks.integer(name, value, least)
    if value > most:
        raise ValueError(f"{name} must be at most {most} for a picture, got {value}")
    return value


def shades(count: int) -> list[Any]:
    """Return `count` colours from dark to light, for lines in an order."""
    from matplotlib import colormaps

    return list(colormaps["viridis"](np.linspace(0.3, 0.9, count)))


def name_of(spec: str, width: int) -> str:
    """Return the spec in at most three lines of `width` characters."""
    lines = fold(spec, width)
    return "\n".join(lines if len(lines) <= _LINES else [*lines[:_LINES], "..."])


def title(axes: Axes, text: str) -> None:
    """Put a spec or a few words above a panel; a $ does not begin a formula."""
    axes.set_title(text, fontsize="medium", loc="left", parse_math=False)


def legend_below(figure: Figure, axes: Axes) -> None:
    """Put the names of the lines below the picture, which has room for specs of any length."""
    handles, labels = axes.get_legend_handles_labels()
    legend = figure.legend(
        handles, labels, loc="outside lower center", frameon=False,
        ncols=2 if max(map(len, labels)) < 32 else 1,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def legend_beside(panels: Sequence[Axes], heading: str) -> None:
    """Put the names of the lines beside the last panel, or beside each panel if they differ."""
    names = [axes.get_legend_handles_labels()[1] for axes in panels]
    for axes in panels if any(found != names[0] for found in names) else panels[-1:]:
        axes.legend(
            title=heading, frameon=False, loc="upper left", bbox_to_anchor=(1, 1), borderpad=0,
            handlelength=1.2,
        )  # fmt: skip


def hide_future(axes: Axes, first: float, named: bool) -> None:
    """Shade the distances below 0; if `named`, write why."""
    axes.axvspan(first, 0, zorder=0, **SHADE)
    axes.axvline(0, color="0.5", linewidth=0.8, zorder=1)
    if named:
        axes.text(0.02, 0.97, "future, masked", transform=axes.transAxes, fontsize="small",
            va="top")  # fmt: skip


def ticks(count: int, most: int) -> list[int]:
    """Return at most `most` indices from 0 to count - 1, evenly spread, with both ends."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most))})
