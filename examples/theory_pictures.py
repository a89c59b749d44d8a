"""Five pictures of theory: wavelet transform, RoPE as one, its base, and absolute vectors.

    python examples/theory_pictures.py [DIR]

It writes transform.png, matrices.png, decay.png, wavelengths.png and absolute.png, from public
functions of wavepe. The pages "Wavelets over distance", "RoPE and its base" and "Encodings" explain
them.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from wavepe import encoding, gaussian, rope, rope_frequencies, rope_table, sinusoidal
from wavepe.analysis import (
    multiscale_rope_matrix,
    predicted_band,
    rope_matrix,
    rope_wavelet_matrix,
    wavelet_transform,
)

# Violet below 0, vermilion above, and 0 is transparent: it reads on white and on dark pages.
COLOURS = LinearSegmentedColormap.from_list(
    "", [(0.0, "#7B52D3"), (0.5, "#7B52D300"), (0.5, "#D55E0000"), (1.0, "#D55E00")]
)


def transform(length=256, kind="ricker"):
    """Draw a signal with a narrow bump, a wide bump and a fast wave, and its transform W.

    W(a, b) is large where the wavelet of scale a at shift b looks like the signal.
    """
    t = np.arange(length)
    narrow = gaussian(t, length / 64.0, 0.15 * length)
    wide = gaussian(t, length / 10.0, 0.45 * length)
    wave = gaussian(t, length / 12.0, 0.8 * length) * np.cos(t * 48 * np.pi / length)
    signal = narrow + wide + wave
    scale = 2.0 ** np.arange(0, np.log2(length / 4) + 1e-9, 0.25)
    transformed = wavelet_transform(signal, scale[:, None], t, kind)

    figure, (upper, lower) = plt.subplots(
        2, 1, sharex=True, height_ratios=(1, 2), figsize=(6.6, 4.6), layout="constrained"
    )
    upper.plot(t, signal, color="#0072B2", linewidth=1.2)
    upper.set_ylabel("signal x(t)")
    upper.grid(color="0.5", alpha=0.25)
    largest = np.abs(transformed).max()
    image = lower.pcolormesh(
        t, scale, transformed, shading="nearest", cmap=COLOURS, vmin=-largest, vmax=largest
    )
    lower.set_yscale("log", base=2)
    lower.yaxis.set_major_formatter("{x:g}")
    lower.set(ylabel="scale a (tokens)", xlabel="t and shift b (tokens)")
    figure.colorbar(image, ax=lower, label=f"W(a, b), {kind}", pad=0.02)
    return figure


def matrices(position=8, dim=16, theta=100.0):
    """Draw the rotation of one position, the same made of wavelets, and that of several scales."""
    rotation = rope_matrix(position, dim, theta)
    wavelets = rope_wavelet_matrix(position, dim, theta)
    panels = {
        f"position {position}, rotated": rotation,
        f"made of wavelets\n(within {np.abs(rotation - wavelets).max():.0e})": wavelets,
        "of several scales": multiscale_rope_matrix(position, dim, theta),
    }
    figure, row = plt.subplots(1, 3, sharey=True, figsize=(6.6, 2.9), layout="constrained")
    for axes, (name, matrix) in zip(row, panels.items(), strict=True):
        image = axes.imshow(matrix, cmap=COLOURS, vmin=-1, vmax=1, interpolation="nearest")
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("of q or k")
    row[0].set_ylabel("of the result")
    figure.colorbar(image, ax=row, label="entry", pad=0.02)
    return figure


def decay(length=1024, dim=128, bases=(100.0, 10000.0, 500000.0)):
    """Draw the dot product of two positions over their distance, divided by that at distance 0.

    Of the sinusoidal encoding they are two vectors, of RoPE two vectors of ones that are rotated.
    """
    distance = np.arange(length)
    figure, axes = plt.subplots(figsize=(6.6, 4.8), layout="constrained")
    vectors = sinusoidal(distance, dim)
    product = vectors @ vectors[0]
    axes.plot(distance[1:], product[1:] / product[0], linewidth=5, alpha=0.5, label="sinusoidal")
    for theta in bases:
        inv_freq, _ = rope_frequencies(dim, theta)
        vectors = rope(np.ones((length, dim)), *rope_table(distance, inv_freq))
        product = vectors @ vectors[0]
        label = f"rope:theta={theta:g}"
        axes.plot(distance[1:], product[1:] / product[0], linewidth=1.1, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="distance (tokens)", ylabel="dot product / that at distance 0")
    axes.grid(color="0.5", alpha=0.25)
    figure.legend(loc="outside lower center", frameon=False, ncols=2)
    return figure


def wavelengths(length=4096, dim=128, bases=(4096.0, 10000.0, 500000.0)):
    """Draw the tokens in which each pair of RoPE turns once; a star marks the predicted band."""
    figure, axes = plt.subplots(figsize=(6.6, 5.2), layout="constrained")
    for theta in bases:
        tokens = 2 * np.pi / rope_frequencies(dim, theta)[0]
        band = predicted_band(dim, theta, length)
        label = f"rope:theta={theta:g} (star: predicted band, {band:.1f})"
        (line,) = axes.plot(tokens, label=label, marker="o", markersize=3, linewidth=1)
        height = np.exp(np.interp(band, np.arange(dim // 2), np.log(tokens)))
        axes.plot(band, height, "*", color=line.get_color(), markersize=17, markeredgecolor="0.5")
    axes.axhspan(length, axes.get_ylim()[1], color="0.5", alpha=0.08, linewidth=0)
    axes.axhline(length, color="0.4", linestyle="--", linewidth=1.2)
    words = f"no whole turn within {length} tokens"
    axes.annotate(words, (0, length), xytext=(0, 4), textcoords="offset points", fontsize="small")
    axes.set(xlabel="pair of the head, fastest first", ylabel="wavelength (tokens)", yscale="log")
    axes.grid(color="0.5", alpha=0.25)
    figure.legend(loc="outside lower center", frameon=False)
    return figure


def absolute(specs=("sinusoidal", "binary", "normalised"), length=256, dim=16):
    """Draw the vectors of absolute encodings, positions from top to bottom."""
    figure, row = plt.subplots(1, len(specs), figsize=(6.6, 4.4), layout="constrained")
    for axes, spec in zip(row, specs, strict=True):
        vectors = encoding(spec).absolute(np.arange(length), dim)
        largest = np.abs(vectors).max()
        options = {"cmap": COLOURS, "vmin": -largest, "vmax": largest}
        image = axes.imshow(vectors, aspect="auto", interpolation="nearest", **options)
        axes.set_title(spec, fontsize="medium", loc="left")
        axes.set_xlabel("dimension")
        figure.colorbar(image, ax=axes, location="bottom", pad=0.02, aspect=25, label="value")
    row[0].set_ylabel("position (tokens)")
    return figure


def main(folder="."):
    Path(folder).mkdir(parents=True, exist_ok=True)
    for draw in (transform, matrices, decay, wavelengths, absolute):
        file = Path(folder, f"{draw.__name__}.png")
        draw().savefig(file)
        print(f"picture: {file}")


if __name__ == "__main__":
    main(*sys.argv[1:])
