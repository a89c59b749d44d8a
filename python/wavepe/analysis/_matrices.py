"""Rotations, shifts and wavelet transforms as matrices, for study and tests."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from .. import rope_frequencies, rope_table, wavelet_table
from ..arrays.wavelet_pywt import is_family
from ..common import checks


def rope_matrix(position: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    """Return the matrix that rotates a head by the angles of one position (RoPE).

    Parameters
    ----------
    position : int
        The position m, of any sign.
    dim : int
        Head size d, even.
    theta : float
        The base, above 0.

    Returns
    -------
    ndarray, float64 (dim, dim)
        The matrix R, where R x is the rotated head x. The pairs are interleaved: the diagonal holds
        the blocks [[cos, -sin], [sin, cos]] of the angles m * theta^(-2i/d).

    References
    ----------
    Su et al., "RoFormer", 2021, arXiv 2104.09864.
    """
    every = multiscale_rope_matrix(position, dim, theta)
    return every * np.kron(np.eye(dim // 2), np.ones((2, 2))) + 0.0  # turns -0.0 into 0.0


def shift_matrix(k: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    """Return the matrix that shifts the sinusoidal encoding by k positions, of any sign.

    It is the matrix A with f(m + k) = A f(m) for every position m, where f is the encoding of `dim`
    dims and base `theta`: the transpose of ``rope_matrix(k, dim, theta)``, with the same arguments.

    References
    ----------
    Vaswani et al., "Attention is all you need", 2017, arXiv 1706.03762.
    """
    return rope_matrix(k, dim, theta).T.copy()


def multiscale_rope_matrix(position: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    """Return the matrix of the "RoPE-based wavelet", which its authors dropped; for study only.

    The method multiplies q and k by one matrix for each absolute position, so it costs a matrix
    product for each token. It has at most dim scales. The 2x2 block (i, j) is the rotation by
    m * theta^(-2i/d) for j <= i, and 0 for j > i. Arguments, shape and dtype are those of
    `rope_matrix`; the source is that of `rope_wavelet`.
    """
    position = checks.integer("position", position)
    cos, sin = rope_table(position, rope_frequencies(dim, theta)[0], dtype=np.float64)
    blocks = np.stack([cos, -sin, sin, cos], -1).reshape(-1, 1, 2, 2)
    blocks = np.tri(len(blocks))[:, :, None, None] * blocks + 0.0
    return blocks.swapaxes(1, 2).reshape(dim, dim)


def rope_wavelet(t: ArrayLike, position: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the two wavelets psi and psi' whose transform along the head is RoPE, float64 (...).

    On [0, 1), psi(t) = cos f(t) and psi'(t) = sin f(t), with f(t) = 2 k pi t. On [1, 2),
    psi(t) = -sin f(t) and psi'(t) = cos f(t), with f(t) = 2 k pi (t - 1). Both are 0 elsewhere. k
    is the least natural number with position < 2 k pi. The integral of each wavelet is 0.

    Parameters
    ----------
    t : array (...) of real numbers
        Arguments of the wavelets.
    position : int
        The position m, from 0 on.

    References
    ----------
    Oka et al., "Wavelet-based positional representation for long context", ICLR 2025,
    arXiv 2502.02004.
    """
    t = checks.real_array("t", t).astype(np.float64)
    turns = _whole_turns(position)
    first, second = (t >= 0) & (t < 1), (t >= 1) & (t < 2)
    angle = 2 * turns * math.pi * np.where(first, t, np.where(second, t - 1, 0.0))
    cos, sin = np.cos(angle), np.sin(angle)
    return first * cos - second * sin, first * sin + second * cos


def rope_wavelet_matrix(position: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    """Return the rotation matrix of one position, computed from wavelets along the head.

    A theorem says that it equals `rope_matrix`; it differs by less than 1e-9 for positions up to
    1e5. For even j, row j holds psi(t - b_j) at t = 0..d-1, and row j + 1 holds psi'(t - b_j). The
    shift is b_j = j - m theta^(-j/d) / (2 k pi) and the scale is 1. psi, psi', k and the source are
    those of `rope_wavelet`.

    Arguments, shape and dtype are those of `rope_matrix`, but the position must be at least 0, and
    the base at least 1: with a smaller base, shifts would reach the next row.
    """
    turns = _whole_turns(position)
    theta = checks.positive("theta", theta)
    if theta < 1:
        raise ValueError(f"theta must be at least 1, got {theta}")
    inv_freq, _ = rope_frequencies(dim, theta)
    even = np.arange(0, dim, 2)
    # t - b_j in this order: in b_j itself, the small shift would lose the digits that j takes
    u = (np.arange(dim) - even[:, None]) + (position * inv_freq / (2 * turns * math.pi))[:, None]
    return np.stack(rope_wavelet(u, position), axis=1).reshape(dim, dim)


def wavelet_transform(
    x: ArrayLike, scale: ArrayLike, shift: ArrayLike, kind: str = "ricker"
) -> np.ndarray:
    """Return the wavelet transform of a signal; the source is that of `rope_wavelet`.

    W(a, b) = sum over t = 0..T-1 of a^(-1/2) psi((t - b) / a) x(t).

    Parameters
    ----------
    x : array (..., T) of real numbers
        The signal.
    scale, shift : arrays (columns,), or of other shapes that broadcast
        Scales a, above 0, and shifts b.
    kind : str
        The mother wavelet psi: ricker, gaussian, morlet, haar or a registered one.

    Returns
    -------
    ndarray, float64 (..., columns)
        W(a, b): the leading axes of `x`, then those of `scale` and `shift`.

    Examples
    --------
    >>> import wavepe.analysis
    >>> wavepe.analysis.wavelet_transform([1, 0, 0, 0], scale=1, shift=[0, 2]).round(4)
    array([ 1.   , -0.406])
    """
    if is_family(kind):
        raise ValueError(
            f"kind {kind!r} is a discrete wavelet of PyWavelets without a formula psi(t): needs "
            "ricker, gaussian, morlet, haar or a registered kind"
        )
    x = checks.real_array("x", x).astype(np.float64)
    if x.ndim < 1:
        raise ValueError("x must be an array (..., T), got a single number")
    scale, shift = checks.real_array("scale", scale), checks.real_array("shift", shift)
    columns = checks.broadcast("scale and shift of shapes", scale.shape, shift.shape)
    if not np.all(scale > 0):
        raise ValueError(f"scale must be above 0, got {scale.min()}")
    flat = [np.broadcast_to(array, columns).astype(np.float64).ravel() for array in (scale, shift)]
    p = wavelet_table(x.shape[-1], *flat, kind=kind, mirrored=False, dtype=np.float64)
    return (x @ (p / np.sqrt(flat[0]))).reshape(x.shape[:-1] + columns)


def _whole_turns(position: int) -> int:
    """Return k, the least natural number with position < 2 k pi."""
    position = checks.integer("position", position, 0)
    return math.floor(position / (2 * math.pi)) + 1
