"""Two pictures of theory: a wavelet transform, and RoPE as a wavelet transform.

    python examples/theory_pictures.py [DIR]

It writes transform.png and matrices.png. The pages "Wavelets over distance" and "RoPE and its base"
explain them. The theorem is of Oka et al., "Wavelet-based positional representation for long
context", ICLR 2025, arXiv 2502.02004.
"""

import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from wavepe import gaussian, rope_frequencies, rope_table, wavelet_table

# Violet below 0, vermilion above, and 0 is transparent: it reads on white and on dark pages.
COLOURS = LinearSegmentedColormap.from_list(
    "", [(0.0, "#7B52D3"), (0.5, "#7B52D300"), (0.5, "#D55E0000"), (1.0, "#D55E00")]
)


def wavelet_transform(x, scale, shift, kind="ricker"):
    """Return W(a, b) = sum over t of a^(-1/2) psi((t - b) / a) x(t), for pairs of a and b."""
    scale, shift = np.broadcast_arrays(np.asarray(scale, float), np.asarray(shift, float))
    columns = scale.ravel(), shift.ravel()
    p = wavelet_table(len(x), *columns, kind=kind, mirrored=False, dtype=np.float64)
    return (x @ (p / np.sqrt(columns[0]))).reshape(scale.shape)


def rope_matrix(position, dim, theta=10000.0, places=np.eye):
    """Return the matrix that rotates a head by the angles of a position; the pairs are interleaved.

    The block (i, j) is the rotation of pair i times places(pairs)[i, j]. With np.tri it is the
    "RoPE-based wavelet" of several scales, which its authors dropped.
    """
    cos, sin = rope_table(position, rope_frequencies(dim, theta)[0], dtype=np.float64)
    blocks = np.stack([cos, -sin, sin, cos], -1).reshape(-1, 1, 2, 2)
    blocks = places(len(blocks))[:, :, None, None] * blocks
    return blocks.swapaxes(1, 2).reshape(dim, dim)


def rope_wavelet(t, position):
    """Return the wavelets psi and psi' whose transform along the head is RoPE.

    On [0, 1) they are cos f and sin f, and on [1, 2) -sin f and cos f, with f = 2 k pi t. k is the
    least natural number with position < 2 k pi.
    """
    first, second = (t >= 0) & (t < 1), (t >= 1) & (t < 2)
    angle = 2 * math.pi * whole_turns(position) * np.where(first, t, np.where(second, t - 1, 0.0))
    cos, sin = np.cos(angle), np.sin(angle)
    return first * cos - second * sin, first * sin + second * cos


def rope_wavelet_matrix(position, dim, theta=10000.0):
    """Return the rotation of a position, computed from wavelets along the head.

    Row j holds psi(t - b_j) at t = 0..d-1 for even j, and row j + 1 psi'(t - b_j). The shift is
    b_j = j - m theta^(-j/d) / (2 k pi).
    """
    inv_freq, even = rope_frequencies(dim, theta)[0], np.arange(0, dim, 2)
    # t - b_j in this order: in b_j itself, the small shift would lose the digits that j takes
    turned = position * inv_freq / (2 * math.pi * whole_turns(position))
    u = (np.arange(dim) - even[:, None]) + turned[:, None]
    return np.stack(rope_wavelet(u, position), axis=1).reshape(dim, dim)


def whole_turns(position):
    return math.floor(position / (2 * math.pi)) + 1


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
        "of several scales": rope_matrix(position, dim, theta, np.tri),
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
