"""Options of an encoding: each has a default and a check.

A check takes a label ("rope theta") and a value. It returns the value in the form that is stored
(float, int, bool, str, tuple). For a wrong type it raises TypeError, for a wrong value ValueError.
An option without a check must have the type of its default.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..common import checks
from ..common.spec import Value, fits_spec

Check = Callable[[str, Any], Value]


def option(default: Value | None, check: Check) -> Any:
    """Declare an option of an encoding class: a dataclass field with a default and a check.

    Parameters
    ----------
    default : value or None
        The default. None means that the option is not set.
    check : callable
        ``check(label, value)`` returns the value to store, or raises TypeError or ValueError with
        a message that begins with the label.

    Returns
    -------
    field : dataclasses.Field

    Examples
    --------
    >>> import numpy as np
    >>> import wavepe
    >>> from wavepe.encodings import Encoding, option
    >>> def below_one(label, value):
    ...     if not 0 < float(value) < 1:
    ...         raise ValueError(f"{label} must be between 0 and 1, got {value!r}")
    ...     return float(value)
    >>> @wavepe.register_encoding
    ... class Even(Encoding):
    ...     name = "even"
    ...     slope: float = option(0.1, below_one)
    ...     def slopes(self, heads):
    ...         return np.full(heads, self.slope)
    >>> Even(slope=2)
    Traceback (most recent call last):
    ValueError: even slope must be between 0 and 1, got 2
    """
    return dataclasses.field(default=default, metadata={"check": check})


def checked(label: str, value: Any, field: dataclasses.Field[Any]) -> Value | None:
    """Return `value` as the option `field` stores it. None is allowed only as the default."""
    if value is None and field.default is None:
        return None
    of_type = (check for kind, check in _CHECKS.items() if isinstance(field.default, kind))
    value = (field.metadata.get("check") or next(of_type, _anything))(label, value)
    if not fits_spec(value):
        raise ValueError(
            f"{label} must be a value that a spec can hold (without blank, : , = + or @, no text "
            "that reads as a number or a truth value, and in a list only the first item may begin "
            f"with a letter), got {value!r}"
        )
    return value


def flag(label: str, value: Any) -> bool:
    """Check that the value is true or false."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{label} must be true or false, got {value!r}")
    return bool(value)


def text(label: str, value: Any) -> str:
    """Check that the value is text; `checked` then checks that a spec can hold it."""
    if not isinstance(value, str):
        raise TypeError(f"{label} must be text, got {value!r}")
    return str(value)


def one_of(*words: str) -> Check:
    """Return a check that the value is one of the given words."""
    return lambda label, value: str(checks.choice(label, value, words))


def number(label: str, value: Any) -> float:
    """Check that the value is a finite number. -0.0 becomes 0.0: a spec writes both as 0."""
    return checks.finite(label, value) + 0.0


def positive(*words: str) -> Check:
    """Return a check that the value is a finite number above 0, or one of `words`."""

    def check(label: str, value: Any) -> float | str:
        if not (words and isinstance(value, str)):
            return checks.positive(label, value)
        if value not in words:
            raise ValueError(f"{label} must be a number or {' or '.join(words)}, got {value!r}")
        return str(value)

    return check


# The default of `most` is far above any useful number and keeps memory use within bounds.
def integer(least: int, most: int = 1 << 20) -> Check:
    """Return a check that the value is an integer from `least` to `most`."""

    def check(label: str, value: Any) -> int:
        value = checks.integer(label, value, least)
        if value > most:
            raise ValueError(f"{label} must be at most {most}, got {value}")
        return value

    return check


def items(label: str, value: Any) -> tuple[Any, ...]:
    """Check that the value is a list of at least one value, and return a tuple."""
    array = isinstance(value, np.ndarray) and value.ndim == 1
    if not (array or isinstance(value, Sequence)) or isinstance(value, str | bytes):
        raise TypeError(f"{label} must be a list, got {value!r}")
    if not checks.is_short(value):
        raise ValueError(f"{label} must be a list of fewer than 2^20 values, got {value!r}")
    value = list(value)
    if not value:
        raise ValueError(f"{label} must be a list of at least one value, got {value!r}")
    return tuple(_scalar(label, item) for item in value)


def _scalar(label: str, value: Any) -> Any:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool | np.bool_):
        return bool(value)
    return int(value) if isinstance(value, numbers.Integral) else number(label, value)


def _anything(label: str, value: Any) -> Any:
    nested = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
    return items(label, value) if nested else _scalar(label, value)


# The checks of options by the types of their defaults; bool is first, because a bool is an int.
_CHECKS: dict[type, Check] = {
    bool: flag, int: checks.integer, float: number, str: text, tuple: items,
}  # fmt: skip
