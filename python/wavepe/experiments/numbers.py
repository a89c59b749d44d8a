"""Check options that take numbers, separated by blanks or commas."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..experiments.errors import UsageError

_TOO_MANY = 2**31


def integer(option: str, value: int, least: int) -> int:
    """Return `value`; UsageError if it is below `least` or 2^31 and more."""
    if not least <= value < _TOO_MANY:
        raise UsageError(f"{option} {value}: needs {least} to {_TOO_MANY - 1}")
    return value


def integers(option: str, words: Sequence[str], least: int) -> list[int]:
    """Return the integers of an option; UsageError if one is wrong or given twice."""
    found = []
    for word in _words(option, words):
        try:
            found.append(integer(option, int(word), least))
        except ValueError:
            raise UsageError(f"{option} {word}: needs integers") from None
    return _once(option, found)


def reals(option: str, words: Sequence[str], most: float = math.inf) -> list[float]:
    """Return the numbers of an option; UsageError if one is wrong or given twice.

    Each must be from 0 to `most`; without `most`, above 0 and finite.
    """
    found = []
    wanted = "numbers above 0" if most == math.inf else f"numbers from 0 to {most:g}"
    for word in _words(option, words):
        try:
            value = float(word)
        except ValueError:
            raise UsageError(f"{option} {word}: needs {wanted}") from None
        if not (0 <= value <= most and math.isfinite(value)) or (most == math.inf and value == 0):
            raise UsageError(f"{option} {word}: needs {wanted}")
        found.append(value)
    return _once(option, found)


def _words(option: str, words: Sequence[str]) -> list[str]:
    found = ",".join(words).replace(",", " ").split()
    if not found:
        raise UsageError(f"{option}: needs at least one number")
    return found


def _once(option: str, values: list) -> list:
    for value in values:
        if values.count(value) > 1:
            raise UsageError(f"{option} {value}: given twice")
    return values
