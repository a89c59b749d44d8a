"""Argument checks shared by the public functions: each says what was given and what is needed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

# No array has so many elements, and the bytes of one that is a little smaller can be counted.
_SIZES = 2**53


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
    if minimum is not None and number >= _SIZES:
        raise ValueError(f"{name} must be below 2^53, got {number}")
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


def is_short(values: Any) -> bool:
    """Whether values may be gone through: a range, or an array with a stride of 0, may be long."""
    try:
        return not hasattr(values, "__len__") or len(values) < 2**20
    except OverflowError:  # range(2**70)
        return False


def array_of(name: str, value: ArrayLike) -> np.ndarray:
    """`value` as an array of any dtype."""
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of several lengths
        raise ValueError(f"{name}: {error}") from None
    except MemoryError:  # range(2**60)
        raise MemoryError(f"{name} needs more memory than there is") from None
    if array.ndim > 32:  # more than NumPy broadcasts in every version
        raise ValueError(f"{name} must have at most 32 axes, got {array.ndim}")
    return array


def check_size(name: str, array: np.ndarray) -> None:
    """Refuse more elements than memory holds, as an array with strides of 0 may have them."""
    if math.prod(size for size in array.shape if size) >= _SIZES:
        raise ValueError(f"{name} must hold fewer than 2^53 elements, got shape {array.shape}")


def new_array(
    shape: tuple[int, ...], dtype: DTypeLike = np.float64, make: Any = np.empty
) -> np.ndarray:
    """make(shape, dtype); MemoryError for any size that no memory holds, beyond 2^63 bytes too."""
    try:
        return make(shape, dtype)
    except ValueError:
        wanted = f"an array with shape {shape} and data type {np.dtype(dtype)}"
        raise MemoryError(f"Unable to allocate {wanted}") from None


def real_array(
    name: str, value: ArrayLike, *, integers: bool = True, any_size: bool = False
) -> np.ndarray:
    """`value` as an array of real numbers, its dtype kept; one that can be copied, or any."""
    array = array_of(name, value)
    if array.dtype.kind not in ("fiu" if integers else "f"):
        wanted = "real numbers" if integers else "floating point"
        raise TypeError(f"{name} must hold {wanted}, got dtype {array.dtype}")
    if not any_size:
        check_size(name, array)
    return array


def float_dtype(value: Any) -> np.dtype:
    """`value` as a dtype that tables are computed in."""
    try:
        dtype = np.dtype(value)
    except (TypeError, ValueError):
        dtype = None
    if dtype not in (np.float16, np.float32, np.float64):
        given = repr(value) if dtype is None else dtype
        raise TypeError(f"dtype must be float16, float32 or float64, got {given}")
    return dtype


def is_bfloat16(dtype: np.dtype) -> bool:
    """Whether it is the bfloat16 of ml_dtypes, which need not be installed to ask."""
    return dtype.kind == "V" and dtype.itemsize == 2 and dtype.name == "bfloat16"


def float_array(name: str, value: ArrayLike) -> np.ndarray:
    """`value` as an array of a floating point dtype, bfloat16 too."""
    array = array_of(name, value)
    return array if is_bfloat16(array.dtype) else real_array(name, array, integers=False)


def distinct(array: np.ndarray) -> np.ndarray:
    """The array without the repeats along axes of stride 0, of which there may be 2^60."""
    return array[tuple(slice(None) if stride else slice(1) for stride in array.strides)]


def position_array(name: str, value: ArrayLike) -> np.ndarray:
    """`value` as an array of integers that float64 holds exactly."""
    array = array_of(name, value)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)  # np.asarray([]) is float64
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    check_size(name, array)
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
        return new_array(shape, dtype)
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
