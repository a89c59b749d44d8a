"""Discrete wavelet families, sampled with PyWavelets [W]: db, sym, coif, dmey, bior, rbio.

For these a table's scales are levels: column (level, b) of row delta holds sample number delta - b
of the psi that ``pywt.Wavelet(kind).wavefun(level)`` gives, and 0 outside. wavefun of the
biorthogonal families (bior, rbio) gives two pairs of functions; psi is that of decomposition.
"""

from __future__ import annotations

import re
from types import ModuleType

import numpy as np

from ._runtime import command_for

EXAMPLES = "db4, sym8, coif2, dmey, bior2.2 and rbio2.2"

# The number of samples doubles with the level: a level of 16 has millions of them.
LARGEST_LEVEL = 16

_FAMILY = re.compile(r"(?:db|sym|coif|bior|rbio)[0-9.]+|dmey")


def is_family(name: object) -> bool:
    """Whether `name` reads as a discrete wavelet of PyWavelets; "haar" is wavepe's own."""
    return isinstance(name, str) and _FAMILY.fullmatch(name) is not None


def check_family(label: str, name: str) -> str:
    """`name`, where PyWavelets has that member of the family.

    Raises
    ------
    ImportError
        PyWavelets is not installed.
    ValueError
        The family has no such member.
    """
    discrete = _pywt(name).wavelist(kind="discrete")
    members = [other for other in discrete if _family(other) == _family(name)]
    if name not in members:
        raise ValueError(f"unknown {label} {name!r}; PyWavelets has {', '.join(members)}")
    return name


def check_levels(label: str, levels: np.ndarray) -> np.ndarray:
    """`levels` as integers from 1 to `LARGEST_LEVEL`; ValueError for others."""
    levels = np.asarray(levels)
    with np.errstate(invalid="ignore"):
        wrong = levels[~((levels >= 1) & (levels <= LARGEST_LEVEL) & (levels % 1 == 0))]
    if wrong.size:
        raise ValueError(
            f"{label} must be levels, integers from 1 to {LARGEST_LEVEL}; got {wrong[0]:g}"
        )
    return levels.astype(np.int64)


def table(kind: str, t: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Sample number t - shift of psi at level `scale`, float64 (w, dim); 0 outside.

    Parameters
    ----------
    kind : str
    t : float64 array (w,) of whole numbers
    scale, shift : float64 arrays (dim,)
        Levels, and whole numbers.
    """
    levels = check_levels(f"{kind}: scales", scale)
    with np.errstate(invalid="ignore"):
        wrong = shift[~((np.abs(shift) <= 2.0**53) & (shift % 1 == 0))]
    if wrong.size:
        raise ValueError(f"{kind}: shifts must be integers within +-2^53, got {wrong[0]:g}")
    wavelet = _pywt(kind).Wavelet(kind)
    number = t[:, None] - shift
    out = np.zeros(number.shape)
    for level in np.unique(levels).tolist():
        columns = np.flatnonzero(levels == level)
        samples = wavelet.wavefun(level=level)[1]
        wanted = number[:, columns]
        inside = (wanted >= 0) & (wanted < len(samples))
        at = np.where(inside, wanted, 0).astype(np.int64)
        out[:, columns] = np.where(inside, samples[at], 0.0)
    return out


def _family(name: str) -> str:
    return name.rstrip("0123456789.")


def _pywt(name: str) -> ModuleType:
    try:
        import pywt
    except ImportError as error:
        raise ImportError(
            f"the wavelet {name!r} needs PyWavelets: {command_for('pywt')}"
        ) from error
    return pywt
