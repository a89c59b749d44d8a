"""Shared by all pictures: figure, file and colours."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from ..._runtime import command_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, dark ones first: readers with colour blindness can tell them apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
MARKERS = "osD^vPX*"
LINES = ("-", "--", ":", "-.")


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
