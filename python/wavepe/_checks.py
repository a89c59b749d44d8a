"""Argument checks shared by the public functions: each says what was given and what is needed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike


def integer(name: str, value: Any, minimum: int | None = None) -> int:
    """`value` as an int (NumPy integers too; no bool, no float). Sizes have a minimum."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{name} must be an integer, got {value!r} ({kind})") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    if minimum is not None and number >= 2**62:
        raise ValueError(f"{name} must be below 2^62, got {number}")
    return number


def flag(name: str, value: Any) -> bool:
    """`value` as a bool; a string such as "false" would be true."""
    if not isinstance(value, (bool, np.bool_, int)) or value not in (0, 1):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def positive(name: str, value: Any) -> float:
    """`value` as a finite float above 0."""
    number = finite(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be above 0, got {number}")
    return number


def share(name: str, value: Any) -> float:
    """`value` as a float from 0 to 1, both included."""
    number = finite(name, value) + 0.0  # -0.0 becomes 0.0
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {number!r}")
    return number


def finite(name: str, value: Any) -> float:
    """`value` as a finite float."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a number, got {value!r} ({kind})") from None
    except OverflowError:
        number = math.inf
    if isinstance(value, (str, bytes, bool, np.bool_)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def choice(name: str, value: Any, known: Iterable[str]) -> str:
    """`value`, one of the known strings."""
    known = list(known)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, one of {', '.join(known)}; got {value!r}")
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")
    return value


def real_array(name: str, value: ArrayLike, *, integers: bool = True) -> np.ndarray:
    """`value` as an array of real numbers, its dtype kept."""
    array = np.asarray(value)
    if array.dtype.kind not in ("fiu" if integers else "f"):
        wanted = "real numbers" if integers else "floating point"
        raise TypeError(f"{name} must hold {wanted}, got dtype {array.dtype}")
    return array


def is_bfloat16(dtype: np.dtype) -> bool:
    """Whether it is the bfloat16 of ml_dtypes, which need not be installed to ask."""
    return dtype.kind == "V" and dtype.itemsize == 2 and dtype.name == "bfloat16"


def float_array(name: str, value: ArrayLike) -> np.ndarray:
    """`value` as an array of a floating point dtype, bfloat16 too."""
    array = np.asarray(value)
    return array if is_bfloat16(array.dtype) else real_array(name, array, integers=False)


def distinct(array: np.ndarray) -> np.ndarray:
    """The array without the repeats along axes of stride 0, of which there may be 2^60."""
    return array[tuple(slice(None) if stride else slice(1) for stride in array.strides)]


def position_array(name: str, value: ArrayLike) -> np.ndarray:
    """`value` as an array of integers that float64 holds exactly."""
    array = np.asarray(value)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)  # np.asarray([]) is float64
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    if array.size and array.dtype.itemsize == 8:
        values = distinct(array)
        low, high = int(values.min()), int(values.max())
        if low < -(2**53) or high > 2**53:
            worst = low if low < -(2**53) else high
            raise ValueError(f"{name} must lie within +-2^53, got {worst}")
    return array


def counted_positions(name: str, value: ArrayLike) -> np.ndarray:
    """`value` as int64 positions of tokens, counted from 0."""
    array = position_array(name, value).astype(np.int64)
    if array.size and array.min() < 0:
        raise ValueError(f"{name} must be at least 0, got {int(array.min())}")
    return array


def out_array(out: np.ndarray | None, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """`out` checked against the exact shape and dtype of the result, or a new array."""
    if out is None:
        return np.empty(shape, dtype)
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, got {type(out).__name__}")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}, needs {np.dtype(dtype)}")
    if out.shape != tuple(shape):
        raise ValueError(f"out has shape {out.shape}, needs {tuple(shape)}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    return out


def broadcast(what: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        listed = " and ".join(str(tuple(s)) for s in shapes)
        raise ValueError(f"{what} {listed} do not broadcast") from None
