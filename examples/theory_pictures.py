"""Two pictures of theory: a wavelet transform, and RoPE as a wavelet transform.

    python examples/theory_pictures.py [DIR]

It writes transform.png and matrices.png, from public functions of wavepe. The pages "Wavelets over
distance" and "RoPE and its base" explain them.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from wavepe import gaussian
from wavepe.analysis import (
    multiscale_rope_matrix,
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


def main(folder="."):
    Path(folder).mkdir(parents=True, exist_ok=True)
    for draw in (transform, matrices):
        file = Path(folder, f"{draw.__name__}.png")
        draw().savefig(file)
        print(f"picture: {file}")


if __name__ == "__main__":
    main(*sys.argv[1:])
