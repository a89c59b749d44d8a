"""Frequencies of rotary pairs: plain [R], and all length scalings of Hugging Face models.

Each rope type is one function below; names, defaults and precedence of its parameters are those of
transformers >= 5. Everything is float64. [Y] is Peng et al., YaRN, arXiv 2309.00071.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import _checks

DEFAULT_THETA = 10000.0
ORIGINAL = "original_max_position_embeddings"


def rope_frequencies(
    dim: int,
    theta: float | None = None,
    *,
    scaling: Mapping[str, Any] | None = None,
    length: int | None = None,
    max_length: int | None = None,
) -> tuple[np.ndarray, float]:
    """Radians per position of each pair, ``theta**(-2i/dim)`` or scaled for longer sequences [R].

    Parameters
    ----------
    dim : int
        Head size.
    theta : float, optional
        Base. None: the base of `scaling`, else 10000.
    scaling : dict, optional
        Hugging Face ``rope_parameters`` of one of the types default, linear, dynamic, yarn,
        longrope, llama3, proportional: rope_type (or type), rope_theta, partial_rotary_factor
        and the keys of the type. A value None counts as not given, but for the factor of yarn:
        None is max_length / original_max_position_embeddings.
    length : int, optional
        Current sequence length, for dynamic and longrope; None is a short one.
    max_length : int, optional
        The model's max_position_embeddings. dynamic needs it; for yarn, longrope and llama3 it
        stands in for original_max_position_embeddings, and gives longrope its factor.

    Returns
    -------
    inv_freq : float64 array (pairs,)
        rotary_dim / 2 pairs, rotary_dim = int(dim * partial_rotary_factor); an odd one is rounded
        up. proportional: dim / 2 pairs, those that are not rotated 0.
    attention_factor : float
        Multiplies cos and sin; not 1 for yarn and longrope alone.

    Raises
    ------
    ValueError
        A missing key (the message names it), two different bases, a value out of its range.
    TypeError
        A value of a wrong type.

    Warns
    -----
    UserWarning
        Keys that the type does not know, a factor below 1, beta_fast below beta_slow.

    Examples
    --------
    >>> import wavepe
    >>> wavepe.rope_frequencies(4, 100.0)
    (array([1. , 0.1]), 1.0)
    >>> wavepe.rope_frequencies(4, 100.0, scaling={"rope_type": "linear", "factor": 4})
    (array([0.25 , 0.025]), 1.0)
    """
    dim = _checks.integer("dim", dim, 1)
    length = None if length is None else _checks.integer("length", length, 1)
    max_length = None if max_length is None else _checks.integer("max_length", max_length, 1)
    given, doubts = standard_parameters(scaling, max_length)
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=2)
    kind = given["rope_type"]
    check_parameters(kind, given)
    case = _Case(dim, base_of(theta, given.get("rope_theta")), given, length, max_length)
    with np.errstate(all="ignore"):
        inv_freq, factor = ROPE_TYPES[kind].formula(case)
    if not (np.isfinite(inv_freq).all() and math.isfinite(factor)):
        raise ValueError(
            f"rope_type {kind!r} gives no finite frequencies for theta {case.theta}, "
            f"scaling {dict(scaling or {})}, length {length}, max_length {max_length}"
        )
    return inv_freq, factor


def standard_parameters(
    scaling: Mapping[str, Any] | None, max_length: int | None
) -> tuple[dict[str, Any], list[str]]:
    """`scaling` with its type named, its values checked, and what a length gives filled in.

    Returns
    -------
    given : dict
        "rope_type" and the keys that it knows, no value None.
    doubts : list of str
        What the caller is to be warned of.
    """
    if scaling is None:
        scaling = {}
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling must be a dict of rope parameters, got {scaling!r}")
    if any(isinstance(v, Mapping) for v in scaling.values()) and not {"rope_type", "type"} & set(
        scaling
    ):
        layers = ", ".join(map(str, scaling))
        raise ValueError(f"scaling holds a dict per layer type, {layers}: give one")
    given = {key: value for key, value in scaling.items() if value is not None}
    kind = _checks.choice(
        "rope_type", given.pop("rope_type", given.get("type", "default")), ROPE_TYPES
    )
    given.pop("type", None)
    unknown = [key for key in given if key not in known_keys(kind)]
    doubts = []
    if unknown:
        keys = ", ".join(sorted(map(str, unknown)))
        doubts.append(f"unknown keys in scaling for rope_type {kind!r}: {keys}")
    given = {k: PARAMETERS[k](k, value) for k, value in given.items() if k not in unknown}
    if given.get("factor", 1) < 1:
        doubts.append(f"factor is {given['factor']}; below 1 it shortens the context")
    if given.get("beta_fast", 32) < given.get("beta_slow", 1):
        pair = f"beta_fast {given.get('beta_fast', 32)}, beta_slow {given.get('beta_slow', 1)}"
        doubts.append(f"beta_fast should be above beta_slow, got {pair}")
    if max_length is not None and ORIGINAL in ROPE_TYPES[kind].required:
        original = given.setdefault(ORIGINAL, float(max_length))
        # DeepSeek-V3 has the key with None; without the key, yarn misses it.
        if kind == "longrope" or (kind == "yarn" and "factor" in scaling):
            given.setdefault("factor", max_length / original)
    return {"rope_type": kind, **given}, doubts


def check_parameters(kind: str, given: Mapping[str, Any], *, later: Sequence[str] = ()) -> None:
    """Raise ValueError where keys that the type needs are missing, or do not go together.

    Parameters
    ----------
    kind : str
        The rope type.
    given : mapping
        Its parameters, each checked.
    later : sequence of str
        Keys that may still be missing.
    """
    missing = [key for key in ROPE_TYPES[kind].required if key not in given and key not in later]
    if missing:
        instead = " or max_length (trained_length of an encoding)" * (missing == [ORIGINAL])
        raise ValueError(f"rope_type {kind!r} needs {', '.join(missing)}{instead}")
    if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        raise ValueError(
            f"high_freq_factor must be above low_freq_factor, got {given['high_freq_factor']} and "
            f"{given['low_freq_factor']}"
        )
    if kind == "longrope" and len(given["short_factor"]) != len(given["long_factor"]):
        raise ValueError(
            f"short_factor and long_factor must have one value a pair each, got "
            f"{len(given['short_factor'])} and {len(given['long_factor'])}"
        )


def known_keys(kind: str) -> tuple[str, ...]:
    """Keys that a rope type reads, beside rope_type itself."""
    row = ROPE_TYPES[kind]
    return ("rope_theta", "partial_rotary_factor", *row.required, *row.optional)


def base_of(theta: float | None, rope_theta: float | None) -> float:
    """Return the base, which is given once or not at all."""
    theta = None if theta is None else _checks.positive("theta", theta)
    if theta is not None and rope_theta is not None and theta != rope_theta:
        raise ValueError(f"theta is {theta} and scaling's rope_theta is {rope_theta}: give one")
    theta = rope_theta if theta is None else theta
    return DEFAULT_THETA if theta is None else theta


# ---------------------------------------------------------------- one function a type


class _Case(NamedTuple):
    """What a formula reads; `given` holds the checked parameters of its type."""

    dim: int
    theta: float
    given: Mapping[str, Any]
    length: int | None
    max_length: int | None

    @property
    def rotary_dim(self) -> int:
        """Size of the part of the head that is rotated."""
        size = int(self.dim * self.given.get("partial_rotary_factor", 1.0))
        if size + size % 2 > self.dim:
            raise ValueError(f"a head that is rotated as a whole must be even, got {self.dim}")
        return size

    def powers(self, theta: float | None = None) -> np.ndarray:
        """theta^(-2i/rotary_dim) [R]."""
        size = self.rotary_dim
        base = self.theta if theta is None else theta
        return base ** (-np.arange(0, size, 2) / max(size, 1))


def _default(case: _Case) -> tuple[np.ndarray, float]:
    return case.powers(), 1.0


def _linear(case: _Case) -> tuple[np.ndarray, float]:
    """Position interpolation: every position divided by the factor."""
    return case.powers() / case.given["factor"], 1.0


def _dynamic(case: _Case) -> tuple[np.ndarray, float]:
    """Dynamic NTK: beyond max_length the base grows, so that the slowest pair is interpolated."""
    if case.max_length is None:
        raise ValueError(
            "rope_type 'dynamic' needs max_length, the trained length (trained_length of an "
            "encoding), got None"
        )
    size = case.rotary_dim
    if size <= 2:
        raise ValueError(f"rope_type 'dynamic' needs more than 2 rotated dims, got {size}")
    factor, length = case.given["factor"], max(case.length or 0, case.max_length)
    growth = factor * length / case.max_length - (factor - 1)
    theta = float(np.float64(case.theta) * np.float64(growth) ** (size / (size - 2)))
    if not math.isfinite(theta):
        raise ValueError(f"rope_type 'dynamic': the base of {length} positions is not finite")
    return case.powers(theta), 1.0


def _yarn(case: _Case) -> tuple[np.ndarray, float]:
    """[Y]: fast pairs stay, slow ones are interpolated, with a ramp over the pairs in between."""
    given, size = case.given, case.rotary_dim
    factor, plain = given["factor"], case.powers()
    if case.theta == 1:
        raise ValueError("rope_type 'yarn' needs a base other than 1, got theta 1")

    def pair_that_turns(times: float) -> float:
        """Index of the pair that turns so often within the original length."""
        wavelength = given[ORIGINAL] / (times * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(case.theta))

    low = pair_that_turns(given.get("beta_fast", 32.0))
    high = pair_that_turns(given.get("beta_slow", 1.0))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(plain.size) - low) / (high - low), 0.0, 1.0)
    inv_freq = plain / factor * interpolated + plain * (1 - interpolated)
    return inv_freq, _yarn_attention(given)


def _yarn_attention(given: Mapping[str, Any]) -> float:
    """attention_factor, else from mscale and mscale_all_dim where both are there and not 0."""
    if "attention_factor" in given:
        return given["attention_factor"]

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(max(given["factor"], 1.0)) + 1.0

    over, under = given.get("mscale"), given.get("mscale_all_dim")
    if not (over and under):
        return grown(1.0)
    if grown(under) == 0:
        raise ValueError(f"mscale_all_dim {under} makes the attention factor infinite")
    return grown(over) / grown(under)


def _longrope(case: _Case) -> tuple[np.ndarray, float]:
    """LongRoPE (arXiv 2402.13753): a divisor for every pair, one list for short sequences and one
    for those beyond the original length."""
    given, plain = case.given, case.powers()
    longer = case.length is not None and case.length > given[ORIGINAL]
    name = "long_factor" if longer else "short_factor"
    divisors = np.array(given[name])
    if divisors.shape != plain.shape:
        raise ValueError(
            f"{name} must have one value a pair, {plain.size} of them (head size {case.dim}), got "
            f"{divisors.size}"
        )
    return plain / divisors, _longrope_attention(given)


def _longrope_attention(given: Mapping[str, Any]) -> float:
    """attention_factor, else from the factor by which the context is longer."""
    if "attention_factor" in given:
        return given["attention_factor"]
    if "factor" not in given:
        raise ValueError(
            "rope_type 'longrope' needs factor, attention_factor or max_length (trained_length of "
            "an encoding)"
        )
    if given["factor"] <= 1:
        return 1.0
    if given[ORIGINAL] <= 1:
        raise ValueError(f"{ORIGINAL} must be above 1, got {given[ORIGINAL]}")
    return math.sqrt(1 + math.log(given["factor"]) / math.log(given[ORIGINAL]))


def _llama3(case: _Case) -> tuple[np.ndarray, float]:
    """Llama 3.1: pairs slower than low_freq_factor turns within the original length are divided by
    the factor, those faster than high_freq_factor stay, with a smooth step in between."""
    given, plain = case.given, case.powers()
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    turns = given[ORIGINAL] * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * plain / given["factor"] + kept * plain, 1.0


def _proportional(case: _Case) -> tuple[np.ndarray, float]:
    """p-RoPE as a rope type: the fastest pairs, with the head size in the exponent; 0 elsewhere."""
    dim, given = case.dim, case.given
    if dim % 2:
        raise ValueError(f"rope_type 'proportional' needs an even head size, got {dim}")
    rotated = int(given.get("partial_rotary_factor", 1.0) * dim // 2)
    inv_freq = np.zeros(dim // 2)
    inv_freq[:rotated] = case.theta ** (-np.arange(0, 2 * rotated, 2) / dim)
    return inv_freq / given.get("factor", 1.0), 1.0


class RopeType(NamedTuple):
    """A scaling: its formula, its keys, and whether it depends on the current length."""

    formula: Callable[[_Case], tuple[np.ndarray, float]]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    follows_length: bool = False


ROPE_TYPES: dict[str, RopeType] = {
    "default": RopeType(_default),
    "linear": RopeType(_linear, ("factor",)),
    "dynamic": RopeType(_dynamic, ("factor",), follows_length=True),
    "yarn": RopeType(
        _yarn,
        ("factor", ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": RopeType(
        _longrope,
        ("short_factor", "long_factor", ORIGINAL),
        ("factor", "attention_factor"),
        follows_length=True,
    ),
    "llama3": RopeType(_llama3, ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)),
    "proportional": RopeType(_proportional, (), ("factor",)),
}


# ---------------------------------------------------------------- values of the parameters


def divisors(name: str, value: Any) -> tuple[float, ...]:
    """`value` as a tuple of finite floats above 0, one a pair."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and _checks.is_short(value):
        value = value.tolist()
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not (listed and _checks.is_short(value)):
        raise TypeError(f"{name} must be a list of numbers, one a pair, got {value!r}")
    return tuple(_checks.positive(f"{name}[{i}]", item) for i, item in enumerate(value))


# Every key that a type may have, and the check of its value.
PARAMETERS: dict[str, Callable[[str, Any], Any]] = {
    "rope_theta": _checks.positive,
    "partial_rotary_factor": _checks.share,
    "factor": _checks.positive,
    ORIGINAL: _checks.positive,
    "attention_factor": _checks.positive,
    "beta_fast": _checks.positive,
    "beta_slow": _checks.positive,
    "mscale": _checks.finite,
    "mscale_all_dim": _checks.finite,
    "truncate": _checks.flag,
    "short_factor": divisors,
    "long_factor": divisors,
    "low_freq_factor": _checks.positive,
    "high_freq_factor": _checks.positive,
}
