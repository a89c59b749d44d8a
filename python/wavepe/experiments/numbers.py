"""Check numbers, which may be words of a command line, separated by blanks or commas."""

from __future__ import annotations

import math
import operator
from typing import Any

from ..common.errors import UsageError

_TOO_MANY = 2**31


def whole_number(text: str) -> int:
    """Read an integer, which may be written as 1e6; ValueError for another text."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def integer(name: str, value: Any, least: int) -> int:
    """Return `value` as an int; UsageError if it is not one, below `least`, or 2^31 and more."""
    try:
        number = whole_number(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        raise UsageError(f"`{name}` {value}: needs integers") from None
    if not least <= number < _TOO_MANY:
        raise UsageError(f"`{name}` {value}: needs {least} to {_TOO_MANY - 1}")
    return number


def integers(name: str, values: Any, least: int = 1) -> list[int]:
    """Return the integers of an argument; UsageError if one is wrong or given twice."""
    return once(name, [integer(name, word, least) for word in words(name, values)])


def reals(name: str, values: Any, most: float = math.inf) -> list[float]:
    """Return the numbers of an argument; UsageError if one is wrong or given twice.

    Each must be from 0 to `most`; without `most`, above 0 and finite.
    """
    wanted = "numbers above 0" if most == math.inf else f"numbers from 0 to {most:g}"
    numbers = []
    for word in words(name, values):
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not 0 <= value <= most or (most == math.inf and value in (0, math.inf)):
            raise UsageError(f"`{name}` {word}: needs {wanted}")
        numbers.append(value)
    return once(name, numbers)


def words(name: str, values: Any) -> list[Any]:
    """Return the values, or the words of texts; UsageError without a value."""
    values = [values] if isinstance(values, str) or not hasattr(values, "__iter__") else values
    parts = (x.replace(",", " ").split() if isinstance(x, str) else [x] for x in values)
    if not (split := [word for part in parts for word in part]):
        raise UsageError(f"`{name}`: needs at least one")
    return split


def once(name: str, values: list[Any]) -> list[Any]:
    """Return the values; UsageError if one is given twice."""
    if twice := [value for value in values if values.count(value) > 1]:
        raise UsageError(f"`{name}` {twice[0]}: given twice")
    return values
