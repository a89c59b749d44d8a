"""Shared by all pictures: figure, file and colours.

Every colour here is visible on white and on dark paper. Texts and papers have those of matplotlib's
rcParams: docs/matplotlibrc is for pictures of the docs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from ...common.runtime import command_for

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

# Okabe and Ito's colours, grey for black: readers with colour blindness can tell them apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#7F7F7F", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
MARKERS = "osD^vPX*"
GRID: dict[str, Any] = {"color": "0.5", "alpha": 0.25}
SHADE: dict[str, Any] = {"color": "0.5", "alpha": 0.08, "linewidth": 0}  # of a part of the axes
WIDTH = 6.6  # inches, of most pictures: with it a phone shows texts that can be read
LINES = ("-", "--", ":", "-.")
# An encoding has the same colour and the same first marker in every picture.
_COLOUR_OF = {
    "wavelet": COLOURS[0], "rope": COLOURS[1], "alibi": COLOURS[2], "none": COLOURS[3],
    "transformer_xl": COLOURS[4], "kerple": COLOURS[5], "sinusoidal": COLOURS[6],
    "shaw": COLOURS[7], "t5": "#AA3377", "sandwich": "#999933", "binary": "#AA4499",
    "integer": "#44AA99", "normalised": "#6699CC", "relative": "#228833", "fox": "#7059C9",
    "pope": "#EE6677", "xpos": "#DDAA33",
}  # fmt: skip
_SHADES = (0.0, 0.45, -0.3, 0.25, -0.15)  # of the rows of one encoding: below 0 towards black


def line_looks(specs: Sequence[str]) -> list[dict[str, Any]]:
    """Return colour, line style and marker of each row of a comparison.

    They are those of the first encoding which the row evaluates: "rope" of
    "none/rope:theta=128+alibi". Rows of one encoding differ in shade, style and marker.
    """
    seen: dict[str, int] = {}
    looks = []
    for number, spec in enumerate(specs):
        name = re.split("[:,+@]", re.split(r"/|-> ", spec)[-1])[0].strip()
        colour = _COLOUR_OF.get(name, COLOURS[number % len(COLOURS)])
        before = seen[name] = seen.get(name, -1) + 1
        first = [*_COLOUR_OF].index(name) if name in _COLOUR_OF else number
        looks.append(
            {
                "color": _shaded(colour, _SHADES[before % len(_SHADES)]),
                "linestyle": LINES[before % len(LINES)],
                "marker": MARKERS[(first + before) % len(MARKERS)],
            }
        )
    return looks


def _shaded(colour: str, shade: float) -> str:
    """Mix a colour with white, or below 0 with black."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    target = 255 if shade > 0 else 0
    return "#" + "".join(f"{round(c + abs(shade) * (target - c)):02X}" for c in channels)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of `width` x `height` inches.

    It is not registered with pyplot, so figures of other threads and of notebooks do not change.
    """
    need_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def need_matplotlib() -> None:
    """Raise ImportError with the command that installs matplotlib, if it is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ImportError(f"plots need matplotlib: {command_for('plot')}") from None


def clear_at_zero(*, signed: bool) -> Colormap:
    """Return colours for values around 0, or from 0 on, in which 0 is transparent."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    below, above = "#7B52D3", "#D55E00"
    colours = [to_rgba(below), to_rgba(below, 0.0)] if signed else []
    colours += [to_rgba(above, 0.0), to_rgba(above)]
    places = [0.0, 0.5, 0.5, 1.0] if signed else [0.0, 1.0]
    return LinearSegmentedColormap.from_list("", [*zip(places, colours, strict=True)])


def save(figure: Figure, path: str | PathLike[str]) -> None:
    """Write the figure to `path`; the ending of the name is the format."""
    from matplotlib import rcParams

    dpi = rcParams["savefig.dpi"]
    figure.savefig(path, dpi=150 if dpi == "figure" else dpi)
