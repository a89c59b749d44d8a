"""Rotations, shifts and wavelet transforms written out as matrices, for study and tests."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from .. import _checks, rope_frequencies, rope_table, wavelet_table
from .._wavelet_pywt import is_family


def rope_matrix(position: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    """The rotation of one position, in the layout of interleaved pairs [R].

    Parameters
    ----------
    position : int
        m, of any sign.
    dim : int
        Head size d, even.
    theta : float
        The base, above 0.

    Returns
    -------
    ndarray, float64 (dim, dim)
        R with R x the rotated head x: blocks [[cos, -sin], [sin, cos]] of the angles
        m * theta^(-2i/d) on the diagonal.

    Raises
    ------
    ValueError, TypeError
        An odd `dim`, a base not above 0, a position that is no integer.
    """
    cos, sin = _turns(position, dim, theta)
    return _block_diagonal(_rotation(cos, sin))


def shift_matrix(k: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    """A with f(m + k) = A f(m) for every m, f the sinusoidal encoding [V].

    Parameters
    ----------
    k : int
        The shift, of any sign.
    dim : int
        Size of f, even.
    theta : float
        The base of f, above 0.

    Returns
    -------
    ndarray, float64 (dim, dim)
        Blocks [[cos, sin], [-sin, cos]] of the angles k * theta^(-2i/dim): the transpose of
        ``rope_matrix(k, dim, theta)``.

    Raises
    ------
    ValueError, TypeError
        As `rope_matrix`.
    """
    return rope_matrix(k, dim, theta).T.copy()


def multiscale_rope_matrix(position: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    """The "RoPE-based wavelet" that its authors dropped [W]; for study only.

    One matrix per absolute position, applied to q and to k, at most dim scales: its cost is that
    of a matrix product per token.

    Parameters
    ----------
    position : int
        m, of any sign.
    dim : int
        Head size d, even.
    theta : float
        The base, above 0.

    Returns
    -------
    ndarray, float64 (dim, dim)
        The 2x2 block (i, j) is the rotation by m * theta^(-2i/d) for j <= i, and 0 for j > i.

    Raises
    ------
    ValueError, TypeError
        As `rope_matrix`.
    """
    blocks = _rotation(*_turns(position, dim, theta))
    pairs = len(blocks)
    lower = np.tri(pairs)[:, :, None, None] * blocks[:, None]  # (i, j, 2, 2)
    return lower.swapaxes(1, 2).reshape(2 * pairs, 2 * pairs)


def rope_wavelet(t: ArrayLike, position: int) -> tuple[np.ndarray, np.ndarray]:
    """The pair of wavelets whose transform along the head is RoPE [W].

    psi is cos f(t) on [0, 1) and -sin f(t) on [1, 2), psi' is sin f(t) and cos f(t) there, and
    both are 0 elsewhere; f(t) = 2 k pi t, or 2 k pi (t - 1) from 1 on, with k the least natural
    number for which position < 2 k pi. The integral of each is 0.

    Parameters
    ----------
    t : array (...) of real numbers
    position : int
        m, from 0.

    Returns
    -------
    (psi, psi') : float64 arrays (...)

    Raises
    ------
    ValueError, TypeError
        A negative position, or one that is no integer.
    """
    t = _checks.real_array("t", t).astype(np.float64)
    turns = _natural(position)
    first, second = (t >= 0) & (t < 1), (t >= 1) & (t < 2)
    angle = 2 * turns * math.pi * np.where(first, t, np.where(second, t - 1, 0.0))
    cos, sin = np.cos(angle), np.sin(angle)
    return first * cos - second * sin, first * sin + second * cos


def rope_wavelet_matrix(position: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    """The rotation of one position, made of wavelets along the head dimension [W].

    The theorem says that it is `rope_matrix`: row j, for even j, is psi(t - b_j) at t = 0..d-1 and
    row j + 1 is psi'(t - b_j), with b_j = j - m theta^(-j/d) / (2 k pi) and scale 1 (psi, psi' and
    k as in `rope_wavelet`).

    Parameters
    ----------
    position : int
        m, from 0.
    dim : int
        Head size d, even.
    theta : float
        The base, at least 1: the shifts must stay below 1.

    Returns
    -------
    ndarray, float64 (dim, dim)
        Within 1e-9 of `rope_matrix` for positions to 1e5.

    Raises
    ------
    ValueError, TypeError
        A negative position, a base below 1, an odd `dim`, a position that is no integer.
    """
    turns = _natural(position)
    theta = _checks.positive("theta", theta)
    if theta < 1:
        raise ValueError(f"theta must be at least 1 for the wavelets' shifts, got {theta}")
    inv_freq = _frequencies(dim, theta)
    even = np.arange(0, dim, 2)
    # t - b_j in this order: b_j itself would round the small shift to the digits of j
    u = (np.arange(dim) - even[:, None]) + (position * inv_freq / (2 * turns * math.pi))[:, None]
    return np.stack(rope_wavelet(u, position), axis=1).reshape(dim, dim)


def wavelet_transform(
    x: ArrayLike, scale: ArrayLike, shift: ArrayLike, kind: str = "ricker"
) -> np.ndarray:
    """W(a, b) = sum over t of a^(-1/2) psi((t - b) / a) x(t), t = 0..T-1 [W].

    Parameters
    ----------
    x : array (..., T) of real numbers
    scale, shift : arrays (columns,) or of other shapes that broadcast
        a, above 0, and b.
    kind : str
        The mother wavelet psi: ricker, gaussian, morlet, haar or a registered one.

    Returns
    -------
    ndarray, float64 (..., columns)
        The leading axes are x's, the others those of `scale` and `shift`.

    Raises
    ------
    ValueError
        An unknown kind or a discrete one of PyWavelets, a scale not above 0, shapes that do not
        broadcast.
    TypeError
        No real numbers.

    Examples
    --------
    >>> import wavepe.analysis
    >>> wavepe.analysis.wavelet_transform([1, 0, 0, 0], scale=1, shift=[0, 2]).round(4)
    array([ 1.   , -0.406])
    """
    if is_family(kind):
        raise ValueError(f"kind {kind!r} is sampled at levels and has no psi(t): see PyWavelets")
    x = _checks.real_array("x", x).astype(np.float64)
    if x.ndim < 1:
        raise ValueError("x must be (..., T), got a single number")
    scale, shift = _checks.real_array("scale", scale), _checks.real_array("shift", shift)
    columns = _checks.broadcast("scale and shift of shapes", scale.shape, shift.shape)
    if not np.all(scale > 0):
        raise ValueError(f"scale must be above 0, got {scale.min()}")
    flat = [np.broadcast_to(array, columns).astype(np.float64).ravel() for array in (scale, shift)]
    p = wavelet_table(x.shape[-1], *flat, kind=kind, mirrored=False, dtype=np.float64)
    return (x @ (p / np.sqrt(flat[0]))).reshape(x.shape[:-1] + columns)


def _turns(position: int, dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of each pair, float64 (dim/2,)."""
    position = _checks.integer("position", position)
    return rope_table(position, _frequencies(dim, theta), dtype=np.float64)


def _frequencies(dim: int, theta: float) -> np.ndarray:
    """Radians per position of each pair, float64 (dim/2,)."""
    if _checks.integer("dim", dim, 1) % 2:
        raise ValueError(f"dim must be even, got {dim}")
    return rope_frequencies(dim, theta)[0]


def _rotation(cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """The 2x2 matrix of each pair, (pairs, 2, 2)."""
    return np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2)


def _block_diagonal(blocks: np.ndarray) -> np.ndarray:
    pairs = np.arange(len(blocks))
    matrix = np.zeros((len(blocks), 2, len(blocks), 2))
    matrix[pairs, :, pairs] = blocks
    return matrix.reshape(2 * len(blocks), 2 * len(blocks))


def _natural(position: int) -> int:
    """k, the least natural number for which position < 2 k pi."""
    position = _checks.integer("position", position, 0)
    return math.floor(position / (2 * math.pi)) + 1
