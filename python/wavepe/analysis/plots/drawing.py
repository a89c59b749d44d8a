"""Shared by all pictures: figures and files, colours, marks on axes, and checks of arguments.

Every colour here is visible on white and on dark paper. Texts and papers have those of matplotlib's
rcParams: docs/matplotlibrc is for pictures of the docs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

import wavepe

from ...common import checks
from ...common.errors import need_matplotlib
from ...common.labels import fold
from ...encodings import Encoding, Wavelet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Path = str | PathLike[str]
Specs = str | Encoding | Sequence[str | Encoding]

# Okabe and Ito's colours, grey for black: readers with colour blindness can tell them apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#7F7F7F", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
MARKERS = "osD^vPX*"
GRID: dict[str, Any] = {"color": "0.5", "alpha": 0.25}
SHADE: dict[str, Any] = {"color": "0.5", "alpha": 0.08, "linewidth": 0}  # of a part of the axes
WIDTH = 6.6  # inches, of most pictures: with it a phone shows texts that can be read
LINES = ("-", "--", ":", "-.")
# A picture of encodings -> which it shows, in words and as a test.
SHOWN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "wavelets": ("wavelets", lambda e: isinstance(e, Wavelet)),
    "table": ("a relative encoding", lambda e: "table" in e.terms),
    "bias": ("an encoding with slopes or biases", lambda e: {"slopes", "bias"} & {*e.terms}),
}
_MOST = {"dim": 1024, "length": 1 << 16, "heads": 32}  # that a picture can show
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
        channels, shade = bytes.fromhex(colour[1:]), _SHADES[before % len(_SHADES)]
        target = 255 if shade > 0 else 0  # white or black
        looks.append({
            "color": "#" + "".join(f"{round(x + abs(shade) * (target - x)):02X}" for x in channels),
            "linestyle": LINES[before % len(LINES)],
            "marker": MARKERS[(first + before) % len(MARKERS)],
        })  # fmt: skip
    return looks


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of `width` x `height` inches.

    It is not registered with pyplot, so figures of other threads and of notebooks do not change.
    """
    need_matplotlib("a picture")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def clear_at_zero(values: np.ndarray) -> dict[str, Any]:
    """Return arguments of imshow: colours by the sign and size of the values; 0 is transparent."""
    from matplotlib.colors import LinearSegmentedColormap

    stops, low = [(0.0, "#D55E0000"), (1.0, "#D55E00")], 0.0
    largest = float(np.abs(values).max()) or 1.0
    if values.min() < 0:
        stops = [(0.0, "#7B52D3"), (0.5, "#7B52D300"), (0.5, "#D55E0000"), (1.0, "#D55E00")]
        low = -largest
    cmap = LinearSegmentedColormap.from_list("", stops)
    return {"cmap": cmap, "vmin": low, "vmax": largest, "interpolation": "nearest"}


def shades(count: int) -> list[Any]:
    """Return `count` colours from dark to light, for lines in an order."""
    from matplotlib import colormaps

    return list(colormaps["viridis"](np.linspace(0.3, 0.9, count)))


def folded(spec: str, width: int) -> str:
    """Return the spec in at most three lines of `width` characters."""
    lines = fold(spec, width)
    return "\n".join(lines if len(lines) <= 3 else [*lines[:3], "..."])


def title(axes: Axes, text: str) -> None:
    """Put a spec or a few words above a panel; a $ does not begin a formula."""
    axes.set_title(folded_title(text), fontsize="medium", loc="left", parse_math=False)


def folded_title(text: str) -> str:
    """Return a title in lines that fit a picture; TypeError unless it is a string."""
    if not isinstance(text, str):
        raise TypeError(f"title must be a string, got {text!r}")
    return "\n".join(line for part in text.splitlines() for line in fold(part, 64))


def legend_beside(panels: Sequence[Axes], heading: str) -> None:
    """Put the names of the lines beside the last panel, or beside each panel if they differ."""
    names = [axes.get_legend_handles_labels()[1] for axes in panels]
    for axes in panels if any(labels != names[0] for labels in names) else panels[-1:]:
        axes.legend(
            title=heading, frameon=False, loc="upper left", bbox_to_anchor=(1, 1), borderpad=0,
            handlelength=1.2,
        )  # fmt: skip


def ticks(count: int, most: int) -> list[int]:
    """Return at most `most` indices from 0 to count - 1, evenly spread, with both ends."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most))})


def encodings_of(picture: str, specs: Specs) -> list[Any]:
    """Return the encodings of one spec or several; ValueError unless the picture shows each."""
    if isinstance(specs, (str, Encoding)):
        specs = [specs]
    if not isinstance(specs, Sequence):
        raise TypeError(f"encodings must be a spec or a list of specs, got {specs!r}")
    most, count = (1, "one spec") if picture == "table" else (6, "1 to 6 specs")
    if not 1 <= len(specs) <= most:
        raise ValueError(f"encodings must hold {count}, got {len(specs)}")
    encodings = [wavepe.encoding(spec) for spec in specs]
    needed, fits = SHOWN[picture]
    for encoding in encodings:
        if not fits(encoding):
            raise ValueError(f"this picture needs {needed}, got the encoding {encoding}")
    return encodings


def size(name: str, value: int, least: int, most: int | None = None) -> int:
    """Return `value`; an error unless it is an integer from `least` to what a picture can show."""
    value, most = checks.integer(name, value, least), most or _MOST[name]
    if value > most:
        raise ValueError(f"{name} must be at most {most} for a picture, got {value}")
    return value


def numbers(name: str, value: ArrayLike, dims: int) -> np.ndarray:
    """Return `value` as float64 with one or two dimensions, none of them 0."""
    array = checks.real_array(name, value)
    if array.ndim != dims or not array.size:
        needed = "one dimension, not 0" if dims == 1 else "two dimensions, none of them 0"
        raise ValueError(f"{name} must have {needed}, got shape {array.shape}")
    return array.astype(np.float64)
