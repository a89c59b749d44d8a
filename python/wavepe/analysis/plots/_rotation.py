"""Pictures of rotations: decay with distance, and wavelengths of pairs."""

from __future__ import annotations

from typing import Any

import numpy as np

import wavepe

from ...arrays.rope_frequencies import DEFAULT_THETA
from ...common import checks
from ...encodings import Encoding, RoPE, Sinusoidal
from .._bands import predicted_band
from . import drawing


def decay(
    path: drawing.Path,
    *,
    encodings: drawing.Specs = ("sinusoidal", "rope:theta=100", "rope", "rope:theta=500000"),
    dim: int = 128,
    length: int = 1024,
) -> dict[str, Any]:
    """Draw how the dot product of two positions falls with their distance.

    For `sinusoidal`, it is the dot product of the vectors of positions 0 and distance. For `rope`,
    it is the dot product of a query and a key of ones that are rotated to these positions: the mean
    over the pairs of cos(distance * frequency). Both are divided by their value at distance 0.

    Parameters
    ----------
    path, encodings : as for all pictures; `sinusoidal` or `rope`
    dim : int
        Head size, or size of the vectors of `sinusoidal`; even.
    length : int
        Number of distances, 0..length-1, from 2 on; also the trained length of ropes that need it.

    Returns
    -------
    dict
        "distance", an int array (length,), and "lines", a list of dicts with "encoding" (str) and
        "product", an array (length,).
    """
    waves = drawing.encodings_of(
        encodings, "rope or sinusoidal", lambda encoding: isinstance(encoding, (RoPE, Sinusoidal))
    )
    length = drawing.size("length", length, 2, drawing.MOST_TOKENS)
    dim = drawing.size("dim", dim, 2, drawing.MOST_DIMS)
    distance = np.arange(length)
    lines = []
    for encoding in waves:
        vectors = _vectors(encoding, distance, dim)
        product = vectors @ vectors[0]
        lines.append({"encoding": str(encoding), "product": product / product[0]})

    figure = drawing.new_figure(drawing.WIDTH, 4.8)
    axes = figure.subplots()
    for colour, encoding, line in zip(drawing.shades(len(lines)), waves, lines, strict=True):
        # A sinusoid covers the rope of its base. Drawn as a wide band, both are visible.
        band = encoding.adds
        axes.plot(distance[1:], line["product"][1:], color=colour,
            linewidth=5 if band else 1.1, alpha=0.5 if band else 1,
            label=drawing.folded(str(encoding), 100))  # fmt: skip
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, max(length - 1, 2))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="distance (tokens)", ylabel="dot product / that at distance 0")
    axes.grid(True, **drawing.GRID)
    drawing.legend_below(figure, axes)
    drawing.save(figure, path)
    return {"distance": distance, "lines": lines}


def _vectors(encoding: Encoding, positions: np.ndarray, dim: int) -> np.ndarray:
    """Return the vectors of an absolute encoding, or rotated vectors of ones, (positions, dim)."""
    length = len(positions)
    if encoding.adds:
        return encoding.absolute(positions, dim, length=length)
    table = encoding.rope_table(positions, dim, length=length, trained_length=length)
    return wavepe.rope(np.ones((length, dim)), *table)


def wavelengths(
    path: drawing.Path,
    *,
    encodings: drawing.Specs = ("rope:theta=4096", "rope:theta=10000", "rope:theta=500000"),
    dim: int = 128,
    length: int = 4096,
) -> dict[str, Any]:
    """Draw the wavelength of each pair of RoPE against the trained length.

    The wavelength of a pair is the number of tokens in which it turns once. A pair with a
    wavelength above the trained length never completes a turn in training. For encodings with a
    plain base, a star marks the predicted band, the pair at which keys should be largest (see
    `wavepe.analysis.predicted_band`).

    Parameters
    ----------
    path, encodings : as for all pictures; `rope` with any base and scaling
    dim : int
        Head size, even.
    length : int
        Trained length in tokens, of any size; the sequence has the same length.

    Returns
    -------
    dict
        "trained_length" (int) and "lines", a list of dicts with "encoding" (str), "wavelength", an
        array (pairs,) that is infinite for pairs that do not turn, and "predicted_band" (float, or
        None if theory predicts none).
    """
    rotating = drawing.encodings_of(encodings, "rope", lambda encoding: encoding.rotates)
    length = checks.integer("length", length, 1)
    dim = drawing.size("dim", dim, 2, drawing.MOST_DIMS)
    lines = []
    for encoding in rotating:
        frequencies, _ = encoding.rotary.frequencies(dim, length=length, trained_length=length)
        with np.errstate(divide="ignore"):
            wavelength = 2 * np.pi / frequencies
        band = _predicted(encoding.rotary, dim, length)
        lines.append({"encoding": str(encoding), "wavelength": wavelength, "predicted_band": band})

    figure = drawing.new_figure(drawing.WIDTH, 5.2)
    axes = figure.subplots()
    for colour, line in zip(drawing.shades(len(lines)), lines, strict=True):
        name, band = drawing.folded(line["encoding"], 90), line["predicted_band"]
        name += "" if band is None else f" (star: predicted band, {band:.1f})"
        axes.plot(
            line["wavelength"], label=name, color=colour, marker="o", markersize=3, linewidth=1
        )
        if band is not None and 0 <= band <= dim // 2 - 1:
            height = np.exp(np.interp(band, np.arange(dim // 2), np.log(line["wavelength"])))
            axes.plot(
                [band], [height], "*", color=colour, markersize=17, markeredgecolor="0.5", zorder=5
            )
    finite = [w for line in lines for w in line["wavelength"] if np.isfinite(w)]
    low, high = 0.5 * min([*finite, length]), 3 * max([*finite, length])
    axes.axhspan(length, high, zorder=0, **drawing.SHADE)
    axes.axhline(length, color="0.4", linestyle=(0, (4, 3)), linewidth=1.2, zorder=1)
    axes.set(yscale="log", ylim=(low, high))
    axes.annotate(
        f"no whole turn within {length} tokens",
        (0.01, length), xycoords=("axes fraction", "data"), xytext=(0, 4),
        textcoords="offset points", fontsize="small",
    )  # fmt: skip
    axes.set(xlabel="pair of the head, fastest first", ylabel="wavelength (tokens)")
    axes.grid(True, **drawing.GRID)
    drawing.legend_below(figure, axes)
    drawing.save(figure, path)
    return {"trained_length": length, "lines": lines}


def _predicted(encoding: RoPE, dim: int, length: int) -> float | None:
    """Return the predicted pair of an encoding with a plain base; None for other encodings."""
    theta = DEFAULT_THETA if encoding.theta is None else encoding.theta
    plain = type(encoding) is RoPE and set(encoding.options()) <= {"theta", "interleaved"}
    return predicted_band(dim, theta, length) if plain and theta > 1 else None
