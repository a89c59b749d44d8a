"""What every picture shares: the figure, its file and its colours."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from ..._runtime import command_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every kind of colour blindness, dark ones first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
MARKERS = "osD^vPX*"
LINES = ("-", "--", ":", "-.")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of `width` x `height` inches.

    It belongs to no window and no pyplot, so that threads and notebooks do not meet.
    """
    need_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def need_matplotlib() -> None:
    """Raise ImportError with the command that brings matplotlib, where it is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ImportError(f"plots need matplotlib: {command_for('plot')}") from None


def save(figure: Figure, path: str | PathLike[str], dpi: int = 150) -> None:
    """Write the figure to `path`, whose ending names the format."""
    figure.savefig(path, dpi=dpi)
