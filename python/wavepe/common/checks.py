"""Argument checks shared by the public functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .labels import suggestion


def integer(name: str, value: Any, minimum: int | None = None) -> int:
    """Return `value` as an int; NumPy integers are accepted, bool and float are not."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{name} must be an integer, got {value!r} ({kind})") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def even(name: str, value: Any, minimum: int) -> int:
    """Return `value` as an even int from `minimum` on."""
    number = integer(name, value, minimum)
    if number % 2:
        raise ValueError(f"{name} must be even, got {number}")
    return number


def flag(name: str, value: Any) -> bool:
    """Return `value` as a bool. Strings are refused: Python counts "false" as true."""
    if not isinstance(value, (bool, np.bool_, int)) or value not in (0, 1):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def positive(name: str, value: Any) -> float:
    """Return `value` as a finite float above 0."""
    if (number := finite(name, value)) <= 0:
        raise ValueError(f"{name} must be above 0, got {number}")
    return number


def zero_to_one(name: str, value: Any) -> float:
    """Return `value` as a float from 0 to 1; both ends are allowed."""
    number = finite(name, value) + 0.0  # turns -0.0 into 0.0
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {number!r}")
    return number


def finite(name: str, value: Any) -> float:
    """Return `value` as a finite float."""
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
    """Return `value` if it is one of the known strings."""
    known = list(known)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, one of {', '.join(known)}; got {value!r}")
    if value not in known:
        close = suggestion(value, known)
        raise ValueError(f"unknown {name} {value!r}{close}; known: {', '.join(known)}")
    return value


def is_short(values: Any) -> bool:
    """Tell whether a loop over `values` is short; a range can be very long in little memory."""
    return not hasattr(values, "__len__") or len(values) < 2**20


def array_of(name: str, value: ArrayLike) -> np.ndarray:
    """Return `value` as an array of any dtype."""
    try:
        return np.asarray(value)
    except ValueError as error:  # a list of rows with different lengths
        raise ValueError(f"{name}: {error}") from None


def real_array(
    name: str, value: ArrayLike, *, integers: bool = True, bfloat16: bool = False
) -> np.ndarray:
    """Return `value` as an array of real numbers in its own dtype, `bfloat16` that of ml_dtypes."""
    array = array_of(name, value)
    kinds = "fiu" if integers else "f"
    if array.dtype.kind not in kinds and not (bfloat16 and is_bfloat16(array.dtype)):
        needed = "real numbers" if integers else "floating point numbers"
        raise TypeError(f"{name} must hold {needed}, got dtype {array.dtype}")
    return array


def native(array: np.ndarray) -> np.ndarray:
    """Return the array in the machine's byte order."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def float_dtype(value: Any) -> np.dtype:
    """Return `value` as the dtype of a table: float16, float32 or float64, in native byte order."""
    try:
        dtype = np.dtype(value).newbyteorder("=")
    except (TypeError, ValueError):
        dtype = None
    if dtype not in (np.float16, np.float32, np.float64):
        shown = repr(value) if dtype is None else dtype
        raise TypeError(f"dtype must be float16, float32 or float64, got {shown}")
    return dtype


def is_bfloat16(dtype: np.dtype) -> bool:
    """Tell whether `dtype` is the bfloat16 of ml_dtypes, without importing ml_dtypes."""
    return dtype.kind == "V" and dtype.itemsize == 2 and dtype.name == "bfloat16"


def float_array(name: str, value: ArrayLike) -> np.ndarray:
    """Return `value` as an array of a floating point dtype, bfloat16 included."""
    return real_array(name, value, integers=False, bfloat16=True)


def distinct(array: np.ndarray) -> np.ndarray:
    """Return a view without the repeats along axes of stride 0; there can be 2^60 repeats."""
    return array[tuple(slice(None) if stride else slice(1) for stride in array.strides)]


def with_room(name: str, array: np.ndarray) -> np.ndarray:
    """Return the array if NumPy, whose arrays have 64 axes, has room for one more."""
    if array.ndim > 63:
        raise ValueError(f"{name} must have at most 63 axes, got {array.ndim}")
    return array


def position_array(name: str, value: ArrayLike) -> np.ndarray:
    """Return `value` as an array of integers within +-2^53, which float64 holds exactly."""
    array = with_room(name, array_of(name, value))
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)  # np.asarray([]) has dtype float64
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
    """Return `value` as int64 positions of tokens, which start at 0."""
    array = position_array(name, value).astype(np.int64)
    if array.size and array.min() < 0:
        raise ValueError(f"{name} must be at least 0, got {int(array.min())}")
    return array


def out_array(out: np.ndarray | None, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Return `out` if it has the exact shape and dtype of the result; None gives a new array."""
    if out is None:
        return np.empty(shape, dtype)
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, got {type(out).__name__}")
    if out.dtype != dtype:
        raise TypeError(f"out must have dtype {np.dtype(dtype)}, got {out.dtype}")
    if out.shape != tuple(shape):
        raise ValueError(f"out must have shape {tuple(shape)}, got {out.shape}")
    if not out.flags.writeable:
        raise ValueError("out must be writeable, got a read-only array")
    return out


def broadcast(what: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that the given shapes broadcast to."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        listed = " and ".join(str(tuple(s)) for s in shapes)
        raise ValueError(f"{what} {listed} do not broadcast") from None
    except RuntimeError:  # NumPy's limit
        most = max(map(len, shapes))
        raise ValueError(f"{what} must be at most 32 to broadcast, got {most}") from None


# ---- operands of attention, NumPy arrays or torch tensors ---------------------------------------
# Messages are made on failure only, because a compiler would fix the symbolic sizes in them.


def listed(operands: Mapping[str, Any]) -> str:
    """Return names, dtypes and shapes, for messages."""
    shown = (f"{name} {x.dtype} {tuple(x.shape)}" for name, x in operands.items())
    return ", ".join(shown).replace(" torch.", " ")


def sizes(operands: Mapping[str, Any], same: Callable[[Any, Any], bool] = operator.eq) -> None:
    """Raise ValueError unless the last two axes of q, k, v, p and q_rel fit together."""
    if min(len(x.shape) for x in operands.values()) < 2:
        needed = "q must be (..., m, d), k (..., n, d), v (..., n, dv), p (..., w, c) and q_rel"
        raise ValueError(f"{needed} (..., m, c), got {listed(operands)}")
    if "q_rel" in operands and "p" not in operands:
        raise ValueError("q_rel needs a table p")
    r = "q_rel" if "q_rel" in operands else "q"
    equal = {"q k": "head size", "k v": "number of keys", "q q_rel": "queries", f"{r} p": "size"}
    for pair, what in equal.items():
        axis = -1 if what.endswith("size") else -2
        one, *other = (operands[name].shape[axis] for name in pair.split() if name in operands)
        if other and not same(one, c := other[0]):
            advice = f"; p of size {c} with q of head size {one} needs q_rel of size {c}"
            raise ValueError(
                f"{pair.replace(' ', ' and ')} must have the same {what}, got {listed(operands)}"
                + advice * (pair == "q p")
            )


def heads(of_q: int, of_keys: int, operands: Mapping[str, Any]) -> None:
    """Raise ValueError unless the number of heads of q is a multiple of that of k and v."""
    if of_q % of_keys if of_keys else of_q:
        message = f"q has {of_q} heads, which must be a multiple of the {of_keys} heads of k and v"
        raise ValueError(f"{message}: {listed(operands)}")


def edge(option: str, beyond: str, rows: int) -> None:
    """Raise ValueError if nothing could stand for the rows beyond the edge of a table or bias."""
    if beyond == "edge" and rows == 0:
        of = {"beyond": "table of at least one row", "bias_beyond": "bias of at least one number"}
        raise ValueError(f"{option}='edge' needs a {of[option]}")
