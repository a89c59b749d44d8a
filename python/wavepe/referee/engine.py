"""Engines that rotate: the right one for a configuration, and each with one known mistake."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from ..arrays.rope import rope, rope_table
from ..arrays.rope_frequencies import DEFAULT_THETA, ORIGINAL, rope_frequencies

# dtype -> the distance of two numbers next to 1
_STEPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
# Frequencies are computed with several roundings: transformers' are off by up to 20 steps.
_ROUNDINGS = 21
FLOAT32 = "float32 angles"


class Arrays(NamedTuple):
    """The arrays of an engine in float64, and the dtype of each by its name."""

    values: dict[str, np.ndarray]
    dtypes: dict[str, str]
    positions: np.ndarray
    q: np.ndarray
    float32: bool  # angles that were computed in float32 count as right

    def sample(self) -> Arrays:
        """Return some positions, by which mistakes can be told apart."""
        # The step is odd, because 16-bit numbers hold multiples of a power of two up to high ones.
        step = len(self.positions) // 256 | 1 if self.positions.ndim == 1 else 1
        rows = np.s_[..., ::step, :]
        values = {k: x if k == "inv_freq" else x[rows] for k, x in self.values.items()}
        return self._replace(values=values, positions=self.positions[::step], q=self.q[rows])


@dataclass(frozen=True)
class Engine:
    """A rotation. The fields from `factor` on are for mistakes."""

    dim: int
    parameters: Mapping[str, Any]  # in the standard form of `rope_frequencies`
    max_length: int | None
    length: int | None
    interleaved: bool | None  # None: the file does not say
    factor: float | None = None  # in place of the attention factor
    rounding: tuple[str, str] = ("", "float64")  # what is rounded, and to which dtype
    step: int = 1  # a position becomes step * position + shift
    shift: int = 0
    swapped: bool = False

    @property
    def trained_length(self) -> float | None:
        """The length before a raise, where the rule has it."""
        return self.parameters.get(ORIGINAL, self.max_length)

    @cached_property
    def frequencies(self) -> tuple[np.ndarray, float]:
        """The frequencies of the pairs, and the attention factor."""
        with warnings.catch_warnings():  # the report shows them as notes
            warnings.simplefilter("ignore")
            inv_freq, factor = rope_frequencies(
                self.dim, scaling=self.parameters, length=self.length, max_length=self.max_length
            )
        factor = factor if self.factor is None else self.factor
        return self._rounded("frequencies", inv_freq), factor

    def having(self, **changes: Any) -> Engine:
        """Return the engine with other parameters; None removes one."""
        merged = {**self.parameters, **changes}
        return replace(self, parameters={k: x for k, x in merged.items() if x is not None})

    def _rounded(self, name: str, x: np.ndarray) -> np.ndarray:
        return rounded(x, self.rounding[1]) if name in self.rounding[0] else x

    def tables(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines."""
        inv_freq, factor = self.frequencies
        positions = self.step * positions + self.shift
        if self.rounding[0]:
            places = self._rounded("positions", positions[..., None].astype(np.float64))
            angles = self._rounded("angles", places * inv_freq)
            with np.errstate(invalid="ignore"):  # float16 positions may be infinite
                cos, sin = factor * np.cos(angles), factor * np.sin(angles)
        else:
            cos, sin = rope_table(positions, inv_freq, attention_factor=factor, dtype=np.float64)
        return (sin, cos) if self.swapped else (cos, sin)

    def pairs(self, name: str, width: int) -> np.ndarray | None:
        """Return the pair of each column of an array, -1 for columns that do not rotate.

        None if the array of this engine has another width.
        """
        pairs = np.arange(self.frequencies[0].size)
        twice = np.repeat(pairs, 2) if self.interleaved else np.tile(pairs, 2)
        if name == "rotated":
            return np.pad(twice, (0, width - twice.size), constant_values=-1)
        if width in (pairs.size, np.count_nonzero(self.frequencies[0])):
            return pairs[:width]  # pairs that do not turn may be left out at the end
        return twice if width == twice.size and name != "inv_freq" else None

    def predict(self, arrays: Arrays) -> dict[str, tuple[np.ndarray, np.ndarray]] | None:
        """Return the arrays that the engine would give, each with how far off its numbers may be.

        None if the arrays of this engine have other shapes.
        """
        inv_freq, factor = self.frequencies
        tables = dict(zip(("cos", "sin"), self.tables(arrays.positions), strict=True))
        relative = _ROUNDINGS * _STEPS["float32" if arrays.float32 else "float64"]
        turned = relative * np.abs(arrays.positions[..., None] * inv_freq)
        made = {}
        for name, array in arrays.values.items():
            step, pairs = _STEPS[arrays.dtypes[name]], self.pairs(name, array.shape[-1])
            if pairs is None:
                return None
            if name == "inv_freq":
                value = inv_freq[pairs]
                roundings = 1 if step > 1e-4 else _ROUNDINGS  # 16-bit ones are rounded once
                tolerance = np.abs(value) * max(roundings * step, relative)
                tolerance += 2.0**-24 * (arrays.dtypes[name] == "float16")  # its smallest number
            elif name == "rotated":
                value = rope(arrays.q, *tables.values(), interleaved=bool(self.interleaved))
                size = abs(factor) * np.sqrt(2) * np.abs(arrays.q).max(-1, keepdims=True)
                tolerance = size * (3 * step + turned[..., pairs] * (pairs >= 0))
            else:
                value = tables[name][..., pairs]
                tolerance = abs(factor) * (2 * step + turned[..., pairs])
            made[name] = value, tolerance
        return made


def probes(length: int) -> np.ndarray:
    """Return positions that show most mistakes: 0, the powers of two, and the last one."""
    return np.unique([0, length - 1, *(1 << k for k in range((length - 1).bit_length()))])


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return numbers in float64 after a rounding to a dtype."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return x.astype(dtype).astype(np.float64)
    bits = x.astype(np.float32).view(np.uint32)  # rounded, ties to even
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


# ---------------------------------------------------------------- what goes wrong in engines


# The name of each mistake, and a function from the right engine to one that makes it. A rope type
# ignores the parameters that it does not know.
MISTAKES: dict[str, Callable[[Engine], Engine]] = {
    "attention factor dropped": lambda x: replace(x, factor=1.0),
    "attention factor squared": lambda x: replace(x, factor=x.frequencies[1] ** 2),
    "attention factor computed from factor, its own keys ignored": lambda x: x.having(
        attention_factor=None, mscale=None, mscale_all_dim=None
    ),
    "not rotated": lambda x: replace(x, step=0, factor=1.0),
    "rotated twice": lambda x: replace(x, step=2, factor=x.frequencies[1] ** 2),
    "half-split read as interleaved": lambda x: replace(x, interleaved=True),
    "interleaved read as half-split": lambda x: replace(x, interleaved=False),
    "positions off by one (too large)": lambda x: replace(x, shift=1),
    "positions off by one (too small)": lambda x: replace(x, shift=-1),
    "cos and sin swapped": lambda x: replace(x, swapped=True),
    "sign (the inverse rotation)": lambda x: replace(x, step=-1),
    "scaling ignored (plain RoPE)": lambda x: x.having(rope_type="default"),
    "linear scaling in place of the rule": lambda x: x.having(rope_type="linear"),
    # From length 1 to 2, the dynamic rule multiplies the base by (factor + 1)^(d / (d - 2)).
    "NTK base in place of the rule": lambda x: replace(
        x.having(rope_type="dynamic", factor=x.parameters["factor"] - 1), max_length=1, length=2
    ),
    "dynamic NTK base in place of the rule": lambda x: x.having(rope_type="dynamic"),
    "yarn in place of the rule": lambda x: x.having(rope_type="yarn"),
    "llama3 in place of the rule": lambda x: x.having(
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, **x.parameters, "rope_type": "llama3"}
    ),
    "base 10000 in place of theta": lambda x: x.having(rope_theta=DEFAULT_THETA),
    "yarn bounds truncated": lambda x: x.having(truncate=True),
    "yarn bounds not truncated": lambda x: x.having(truncate=False),
    "beta_fast and beta_slow swapped": lambda x: x.having(
        beta_fast=x.parameters.get("beta_slow", 1.0), beta_slow=x.parameters.get("beta_fast", 32.0)
    ),
    "short and long factors swapped": lambda x: x.having(
        short_factor=x.parameters["long_factor"], long_factor=x.parameters["short_factor"]
    ),
    "original length missing": lambda x: x.having(**{ORIGINAL: None}),
    "partial rotation ignored": lambda x: x.having(partial_rotary_factor=None),
    "partial rotation of a quarter of the head": lambda x: x.having(partial_rotary_factor=0.25),
    "partial rotation of half of the head": lambda x: x.having(partial_rotary_factor=0.5),
    "partial rotation of three quarters": lambda x: x.having(partial_rotary_factor=0.75),
    # The exponents are divided by the whole head instead of the rotated part, or the reverse.
    "partial rotation with the exponents of the other kind": lambda x: x.having(
        rope_theta=x.parameters["rope_theta"]
        ** x.parameters["partial_rotary_factor"]
        ** (-1 if x.parameters["rope_type"] == "proportional" else 1)
    ),
    **{
        f"{dtype} {what}": partial(replace, rounding=(what, dtype))
        for dtype in ("float16", "bfloat16")
        for what in ("frequencies", "positions", "angles", "frequencies, positions and angles")
    },
    FLOAT32: lambda x: replace(x, rounding=("angles", "float32")),
}


def mistaken(right: Engine) -> dict[str, Engine]:
    """Return engines with one mistake by its name. Some can be equal to the right one."""
    engines, factor = {}, right.frequencies[1]
    for name, change in MISTAKES.items():
        try:
            engine = change(right)
            other = engine.frequencies[1]
        except (ArithmeticError, KeyError, ValueError):
            continue  # a rule lacks one of its parameters: the mistake is impossible
        engines[name] = engine
        if engine.parameters != right.parameters and other != factor:
            name = f"{name}, with the attention factor of the rule"
            engines[name] = replace(engine, factor=factor)
    return engines
