"""Compare the arrays of an engine with the right ones, and name the mistake."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..arrays.rope_frequencies import ORIGINAL, ROPE_TYPES
from ..common import checks
from ..common.errors import require
from ..common.files import leading_names, read_object
from .engine import FLOAT32, Arrays, Engine, mistaken, rounded

_AXES = {"inv_freq": 1, "cos": 2, "sin": 2, "q": 2, "rotated": 2}  # the fewest axes of each
NAMES = (*_AXES, "positions")
_SAFETENSORS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "bfloat16", "I64": "<i8"}


class Verdict(NamedTuple):
    """Whether an engine agrees with a configuration. A verdict is true if it does.

    Attributes
    ----------
    agrees : bool
        Whether every difference is within the rounding of the arrays' dtypes.
    mistakes : tuple of str
        The mistake that gives these arrays; none if the engine agrees, or differs otherwise.
    text : str
        What `str` returns: the mistake, by how much, and where. If the engine agrees, the mistakes
        that its arrays are too few or too coarse to show.
    """

    agrees: bool
    mistakes: tuple[str, ...]
    text: str

    def __bool__(self) -> bool:
        return self.agrees

    def __str__(self) -> str:
        return self.text


def read_file(path: Path) -> dict[str, Any]:
    """Return the arrays of `NAMES` in a file; a .npy is an inv_freq."""
    arrays: Any
    try:
        if path.suffix == ".json":
            arrays = read_object(path.parent, path.name)
        elif path.suffix == ".safetensors":
            arrays = _read_safetensors(path.read_bytes())
        elif path.suffix in (".npy", ".npz"):
            loaded = np.load(path, allow_pickle=False)
            arrays = {"inv_freq": loaded} if path.suffix == ".npy" else dict(loaded)
        else:
            raise ValueError("its name must end in .npz, .npy, .json or .safetensors")
    except (AttributeError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no whole file of arrays: {error}") from error
    return {name: arrays[name] for name in NAMES if name in arrays}


def _read_safetensors(data: bytes) -> dict[str, np.ndarray]:
    """Read safetensors: the size of the header, the header in JSON, and the numbers."""
    start = 8 + int.from_bytes(data[:8], "little")
    if b'"BF16"' in data[8:start]:
        require("a file with bfloat16", ml_dtypes="bfloat16")
        import ml_dtypes  # noqa: F401 - it gives NumPy the dtype
    arrays = {}
    for name, about in json.loads(data[8:start]).items():
        if about.get("dtype") in _SAFETENSORS:
            first, last = (start + x for x in about["data_offsets"])
            numbers = np.frombuffer(data[first:last], _SAFETENSORS[about["dtype"]])
            arrays[name] = numbers.reshape(about["shape"])
    return arrays


def checked_arrays(engine: Engine, inputs: Mapping[str, Any], float32: bool) -> Arrays:
    """Check the arrays of an engine, and convert them."""
    values, dtypes = {}, {}
    for name in [name for name in _AXES if inputs[name] is not None]:
        array = checks.real_array(name, inputs[name], bfloat16=True)
        if array.ndim < _AXES[name] or not array.size:
            raise _misfit(engine, {name: array.shape})
        values[name] = array.astype(np.float64)
        if not (np.abs(values[name]) < 1e100).all():  # else tolerances overflow
            raise ValueError(f"{name} must be finite and below 1e100, got NaN or larger numbers")
        dtypes[name] = _dtype(name, array.dtype.name, values[name])
    shapes = {name: array.shape for name, array in values.items()}
    leading = {shape[:-1] for name, shape in shapes.items() if name != "inv_freq"}
    places, counted = inputs["positions"], np.arange(min(leading)[-1] if leading else 1)
    positions = checks.position_array("positions", counted if places is None else places)
    positions = np.atleast_1d(positions).astype(np.int64)
    if positions.size == positions.shape[-1]:
        positions = positions.ravel()  # all other axes have length 1
    fit = all(shapes.get(x) == shapes.get(y) for x, y in (("cos", "sin"), ("q", "rotated")))
    fit = fit and all(checks.broadcast("positions", positions.shape, x) == x for x in leading)
    unplaced = places is None and leading and counted.size == 1
    q = values.pop("q", np.zeros((1, engine.dim)))
    if not (values and fit) or unplaced or q.shape[-1] != engine.dim:
        raise _misfit(engine, {**shapes, "positions": np.shape(places)})
    return Arrays(values, dtypes, positions, q, float32)


def _misfit(engine: Engine, shapes: Mapping[str, tuple[int, ...]]) -> ValueError:
    pairs = engine.frequencies[0].size
    return ValueError(
        f"check needs inv_freq (..., {pairs}), or cos and sin (..., L, {pairs} or {2 * pairs}), or "
        f"q and rotated (..., L, {engine.dim}), with positions if L is 1; got the shapes {shapes}"
    )


def _dtype(name: str, dtype: str, values: np.ndarray) -> str:
    """Return the dtype of an array; for a wide one the narrowest that holds all of its values.

    Files often hold narrow numbers in a wide dtype. A wide inv_freq of 16-bit numbers is a mistake.
    """
    narrow = ("float32",) if name == "inv_freq" else ("bfloat16", "float16", "float32")
    if dtype in ("float16", "bfloat16"):
        return dtype
    return next((x for x in narrow if np.array_equal(rounded(values, x), values)), "float64")


def check(right: Engine, others: Mapping[str, Engine], arrays: Arrays) -> Verdict:
    """Compare arrays with those of the right engine; `others` are those of other layer types."""
    if right.interleaved is None:  # both orders are right for a GGUF file
        verdicts = [check(replace(right, interleaved=x), others, arrays) for x in (False, True)]
        return max(verdicts, key=lambda x: (x.agrees, bool(x.mistakes), "read as" not in x.text))
    kind, at = right.parameters["rope_type"], arrays.positions
    limit = right.length or right.parameters.get(ORIGINAL, right.max_length)
    if ROPE_TYPES[kind].follows_length and at.max() >= limit:
        raise ValueError(f"for {kind!r} and position {at.max()} rope_report needs a length above")
    engines = {f"rotation of the layer type {name}": x for name, x in others.items()}
    engines |= mistaken(right)
    lenient = arrays._replace(float32=True)
    if not _compare(right, arrays)[0]:
        for group in (("cos", "sin"), ("rotated",)):
            part = lenient._replace(values={k: x for k, x in arrays.values.items() if k in group})
            if part.values and not _compare(replace(right, step=0), part)[0]:
                raise ValueError(
                    f"{' and '.join(group)} cannot show a rotation, because positions from "
                    f"{at.min()} to {at.max()} do not turn these numbers"
                )
        hidden = leading_names([*_fitting(right, engines, arrays.sample())])
        names = ", ".join(f"{name} ({arrays.dtypes[name]})" for name in arrays.values)
        text = f"agrees within rounding: {names}{'; cannot exclude: ' * bool(hidden)}{hidden}"
        return Verdict(True, (), text)
    mistakes: tuple[str, ...] = (FLOAT32,)
    if _compare(right, lenient)[0]:
        likely = _fitting(right, engines, lenient.sample())
        mistakes = tuple(_fitting(right, likely, lenient))[:1]
    if (expected := right.predict(arrays)) is not None:
        where = "; ".join(filter(None, (_where(right, arrays, x, *expected[x]) for x in expected)))
    elif mistakes:
        where = f"there must be {right.frequencies[0].size} pairs"
    else:
        raise _misfit(right, {name: value.shape for name, value in arrays.values.items()})
    return Verdict(False, mistakes, f"{''.join(mistakes) or 'differs'}: {where}")


def joined(verdicts: Mapping[int, Verdict]) -> Verdict:
    """Return the verdict of several layers, with a line for each kind: ``layers 0, 1: agrees``."""
    kinds: dict[tuple[Any, ...], list[str]] = {}
    texts = {verdict[:2]: verdict.text for verdict in verdicts.values()}
    for index, verdict in verdicts.items():
        kinds.setdefault(verdict[:2], []).append(str(index))
    mistakes = dict.fromkeys(name for _, names in kinds for name in names)
    lines = (f"layers {leading_names(x)}: {texts[kind]}" for kind, x in kinds.items())
    return Verdict(all(verdicts.values()), tuple(mistakes), "\n".join(lines))


def _compare(engine: Engine, arrays: Arrays) -> tuple[int, float, Any]:
    """Return how many numbers differ from the engine's by more than rounding, the mean difference
    in units of the tolerance, and its numbers, which are None if it has other shapes."""
    if (expected := engine.predict(arrays)) is None:
        return sys.maxsize, np.inf, None
    misses, error = 0, 0.0
    for name, (value, tolerance) in expected.items():
        off = np.abs(arrays.values[name] - value)
        misses += int((~(off <= tolerance)).sum())  # NaN counts as a difference
        error += np.nan_to_num(off).mean() / (tolerance.max() or 1.0)
    return misses, error, [x[0].tobytes() for x in expected.values()]


def _fitting(right: Engine, engines: Mapping[str, Engine], arrays: Arrays) -> dict[str, Engine]:
    """Return the engines that give these arrays within rounding, the nearest first.

    Of engines that give equal numbers, the first is returned.
    """
    wrong, _, numbers = _compare(right, arrays)
    seen, errors = [numbers], {}
    for name, engine in engines.items():
        # A rounding to 16 bits can fall to either side of a number that lies between two of them.
        few = wrong // 100 if engine.rounding[0] else 0
        misses, error, numbers = _compare(engine, arrays)
        if misses <= few and numbers not in seen and not (arrays.float32 and name == FLOAT32):
            seen.append(numbers)
            errors[name] = error
    return {name: engines[name] for name in sorted(errors, key=errors.__getitem__)}


def _where(
    right: Engine, arrays: Arrays, name: str, expected: np.ndarray, tolerance: np.ndarray
) -> str:
    """Say how large the largest difference of an array is, and which pairs and positions differ."""
    value = arrays.values[name]
    pairs: Any = right.pairs(name, value.shape[-1])
    expected = np.broadcast_to(expected, value.shape)
    off = np.abs(value - expected)
    *_, columns = wrong = np.nonzero(off > tolerance)
    if not columns.size:
        return ""
    if of_itself := name == "inv_freq":
        off = off / np.maximum(expected, 1e-300)
    worst = tuple(index[off[wrong].argmax()] for index in wrong)
    place = f"pair {pairs[worst[-1]]}".replace("pair -1", "an element that must not rotate")
    turned = pairs[columns][pairs[columns] >= 0]
    rest = f"pairs {turned.min()} to {turned.max()}" if turned.size else "no pair"
    if not of_itself:
        positions = np.broadcast_to(arrays.positions[..., None], value.shape)
        place = f"position {positions[worst]}, {place}"
        rest += f", positions {positions[wrong].min()} to {positions[wrong].max()}"
    layer, unit = [*map(int, worst[: -_AXES[name]])] or "", " of itself" * of_itself
    return (
        f"{name}{layer} is off by {off[worst]:.3g}{unit} at {place} "
        f"({value[worst]:.9g}, must be {expected[worst]:.9g}); wrong in {rest}"
    )
