"""Check numbers, which may be words of a command line, separated by blanks or commas."""

from __future__ import annotations

import math
import operator
from typing import Any

from ..common.errors import UsageError

_TOO_MANY = 2**31


def whole_number(text: str) -> int:
    """Read an integer, which may be written as 1e6; ValueError for other texts."""
    try:
        return int(text)
    except ValueError:
        found = float(text)
        if not found.is_integer():
            raise
        return int(found)


def integer(name: str, value: Any, least: int) -> int:
    """Return `value` as an int; UsageError for another type, below `least`, or from 2^31 on."""
    try:
        found = whole_number(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        raise UsageError(f"`{name}` {value}: needs integers") from None
    if not least <= found < _TOO_MANY:
        raise UsageError(f"`{name}` {value}: needs {least} to {_TOO_MANY - 1}")
    return found


def integers(name: str, values: Any, least: int = 1) -> list[int]:
    """Return the integers of an argument; UsageError if one is wrong or given twice."""
    return once(name, [integer(name, word, least) for word in words(name, values)])


def reals(name: str, values: Any, most: float = math.inf) -> list[float]:
    """Return the numbers of an argument; UsageError if one is wrong or given twice.

    Each must be from 0 to `most`; without `most`, above 0 and finite.
    """
    wanted = "numbers above 0" if most == math.inf else f"numbers from 0 to {most:g}"
    found = []
    for word in words(name, values):
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not 0 <= value <= most or (most == math.inf and value in (0, math.inf)):
            raise UsageError(f"`{name}` {word}: needs {wanted}")
        found.append(value)
    return once(name, found)


def words(name: str, values: Any) -> list[Any]:
    """Return the values, or the words of texts; UsageError for an empty list."""
    found: list[Any] = []
    for value in [values] if isinstance(values, str) or not hasattr(values, "__iter__") else values:
        found += value.replace(",", " ").split() if isinstance(value, str) else [value]
    if not found:
        raise UsageError(f"`{name}`: needs at least one")
    return found


def once(name: str, values: list[Any]) -> list[Any]:
    """Return the values; UsageError if one is given twice."""
    for number, value in enumerate(values):
        if value in values[:number]:
            raise UsageError(f"`{name}` {value}: given twice")
    return values
