"""Shared by all pictures: figure, file and colours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from ..._runtime import command_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, dark ones first: readers with colour blindness can tell them apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
MARKERS = "osD^vPX*"
LINES = ("-", "--", ":", "-.")
# An encoding has the same colour and the same first marker in every picture.
_COLOUR_OF = {
    "wavelet": COLOURS[0], "rope": COLOURS[1], "alibi": COLOURS[2], "none": COLOURS[3],
    "transformer_xl": COLOURS[4], "kerple": COLOURS[5], "sinusoidal": COLOURS[6],
    "shaw": COLOURS[7], "t5": "#882255", "sandwich": "#999933", "binary": "#AA4499",
    "integer": "#44AA99", "normalised": "#6699CC", "relative": "#117733", "fox": "#332288",
    "pope": "#BB5566", "xpos": "#DDAA33",
}  # fmt: skip
_SHADES = (0.0, -0.5, 0.45, -0.75, 0.65)  # of the rows of one encoding: below 0 towards black


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


def save(figure: Figure, path: str | PathLike[str], dpi: int = 150) -> None:
    """Write the figure to `path`; the ending of the name is the format."""
    figure.savefig(path, dpi=dpi)
