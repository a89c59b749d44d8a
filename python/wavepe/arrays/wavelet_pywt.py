"""Discrete wavelet families, sampled with PyWavelets [W]: db, sym, coif, dmey, bior, rbio.

The scales of their tables are levels; see the notes of `wavepe.wavelet_table`.
"""

from __future__ import annotations

import re
from types import ModuleType

import numpy as np

from ..common.errors import require

EXAMPLES = "db4, sym8, coif2, dmey, bior2.2 and rbio2.2"

# The number of samples doubles with the level: level 16 has millions.
LARGEST_LEVEL = 16

_FAMILY = re.compile(r"(?:db|sym|coif|bior|rbio)[0-9.]+|dmey")


def is_family(name: object) -> bool:
    """Tell whether `name` reads as a discrete wavelet of PyWavelets; haar is wavepe's own."""
    return isinstance(name, str) and _FAMILY.fullmatch(name) is not None


def check_family(label: str, name: str) -> str:
    """Return `name` if PyWavelets has that member of the family."""
    discrete = _pywt(name).wavelist(kind="discrete")
    family = name.rstrip("0123456789.")
    members = [other for other in discrete if other.rstrip("0123456789.") == family]
    if name not in members:
        raise ValueError(f"unknown {label} {name!r}; PyWavelets has {', '.join(members)}")
    return name


def check_levels(label: str, levels: np.ndarray) -> np.ndarray:
    """Return `levels` as int64. ValueError unless all are integers from 1 to `LARGEST_LEVEL`."""
    levels = np.asarray(levels)
    with np.errstate(invalid="ignore"):
        wrong = levels[~((levels >= 1) & (levels <= LARGEST_LEVEL) & (levels % 1 == 0))]
    if wrong.size:
        raise ValueError(
            f"{label} must be levels, integers from 1 to {LARGEST_LEVEL}; got {wrong[0]:g}"
        )
    return levels.astype(np.int64)


def table(kind: str, t: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Return sample t - shift of psi at level `scale`, (w, dim), and 0 outside."""
    levels = check_levels(f"{kind}: scales", scale)
    with np.errstate(invalid="ignore"):
        wrong = shift[~((np.abs(shift) <= 2.0**53) & (shift % 1 == 0))]
    if wrong.size:
        raise ValueError(f"{kind}: shifts must be integers within +-2^53, got {wrong[0]:g}")
    index = t[:, None] - shift
    out, wavelet = np.zeros(index.shape), _pywt(kind).Wavelet(kind)
    for level in np.unique(levels).tolist():
        columns = np.flatnonzero(levels == level)
        samples = wavelet.wavefun(level=level)[1]
        inside = (index[:, columns] >= 0) & (index[:, columns] < len(samples))
        valid = np.where(inside, index[:, columns], 0).astype(np.int64)
        out[:, columns] = np.where(inside, samples[valid], 0.0)
    return out


def _pywt(name: str) -> ModuleType:
    require(f"the wavelet {name!r}", pywt="pywt")
    import pywt

    return pywt
