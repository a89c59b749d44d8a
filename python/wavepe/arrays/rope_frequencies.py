"""Frequencies of rotary pairs: plain [R], and all length scalings of Hugging Face models.

Each rope type is one function below. The names and defaults of its parameters, and which one wins,
are those of transformers >= 5. All numbers are float64. [Y] is Peng et al., YaRN, arXiv 2309.00071.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..common import checks

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
    """Return the frequencies of rotary pairs, in radians per position.

    Pair i has the frequency ``theta**(-2i/dim)``, unless `scaling` adapts it to longer sequences.

    Parameters
    ----------
    dim : int
        Head size.
    theta : float, optional
        The base. None takes the base of `scaling`, or 10000 if `scaling` has none.
    scaling : dict, optional
        The ``rope_parameters`` of a Hugging Face model. Its rope_type (or type) is default,
        linear, dynamic, yarn, longrope, llama3 or proportional. The other keys are rope_theta,
        partial_rotary_factor and those of the type. A key with the value None counts as missing,
        with one exception: for yarn, a factor of None means
        max_length / original_max_position_embeddings.
    length : int, optional
        The current sequence length. Only dynamic and longrope read it; None is a short sequence.
    max_length : int, optional
        The model's max_position_embeddings. The type dynamic needs it. The types yarn, longrope
        and llama3 take it where original_max_position_embeddings is missing. longrope also
        computes a missing factor from it.

    Returns
    -------
    inv_freq : array (pairs,), float64
        Radians per position of each pair. There are rotary_dim / 2 pairs, rounded up, where
        rotary_dim = int(dim * partial_rotary_factor). The type proportional has dim / 2 pairs,
        with 0 for pairs that do not rotate.
    attention_factor : float
        A factor on cosines and sines. It differs from 1 only for yarn and longrope.

    Raises
    ------
    TypeError, ValueError
        If a value has a wrong type or is out of its range, if a key is missing (the message names
        it), or if `theta` and `scaling` give different bases.

    Warns
    -----
    UserWarning
        If the type does not know a key, if factor is below 1, or if beta_fast is below beta_slow.

    References
    ----------
    Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021,
    arXiv 2104.09864. yarn: Peng et al., "YaRN", 2023, arXiv 2309.00071. longrope: Ding et al.,
    "LongRoPE", 2024, arXiv 2402.13753.

    Examples
    --------
    >>> import wavepe
    >>> wavepe.rope_frequencies(4, 100.0)
    (array([1. , 0.1]), 1.0)
    >>> wavepe.rope_frequencies(4, 100.0, scaling={"rope_type": "linear", "factor": 4})
    (array([0.25 , 0.025]), 1.0)
    """
    dim = checks.integer("dim", dim, 1)
    length = None if length is None else checks.integer("length", length, 1)
    max_length = None if max_length is None else checks.integer("max_length", max_length, 1)
    parameters, cautions = standard_parameters(scaling, max_length)
    for caution in cautions:
        warnings.warn(caution, stacklevel=2)
    kind = parameters["rope_type"]
    check_parameters(kind, parameters)
    case = _Case(dim, base_of(theta, parameters.get("rope_theta")), parameters, length, max_length)
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
    """Return `scaling` in standard form, and texts of warnings that the caller shows.

    The form holds "rope_type", and the checked values of the keys that this type knows. Values that
    follow from `max_length` are filled in. No value is None.
    """
    scaling = {} if scaling is None else scaling
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling must be a dict of rope parameters, got {scaling!r}")
    nested = any(isinstance(value, Mapping) for value in scaling.values())
    if nested and not {"rope_type", "type"} & set(scaling):
        layers = ", ".join(map(str, scaling))
        raise ValueError(
            f"scaling must be the dict of one layer type, got a dict for each of {layers}"
        )
    parameters = {key: value for key, value in scaling.items() if value is not None}
    old_name = parameters.pop("type", "default")
    kind = checks.choice("rope_type", parameters.pop("rope_type", old_name), ROPE_TYPES)
    known, cautions = known_keys(kind), []
    if unknown := sorted(str(key) for key in parameters if key not in known):
        cautions.append(f"unknown keys in scaling for rope_type {kind!r}: {', '.join(unknown)}")
    parameters = {k: PARAMETERS[k](k, value) for k, value in parameters.items() if k in known}
    if parameters.get("factor", 1) < 1:
        cautions.append(f"factor is {parameters['factor']}; below 1 it shortens the context")
    fast, slow = parameters.get("beta_fast", 32), parameters.get("beta_slow", 1)
    if fast < slow:
        cautions.append(f"beta_fast should be above beta_slow, got {fast} and {slow}")
    if max_length is not None and ORIGINAL in ROPE_TYPES[kind].required:
        original = parameters.setdefault(ORIGINAL, float(max_length))
        # DeepSeek-V3 gives factor as None. Without the key, yarn has no factor and is refused.
        if kind == "longrope" or (kind == "yarn" and "factor" in scaling):
            parameters.setdefault("factor", max_length / original)
    return {"rope_type": kind, **parameters}, cautions


def rotated_part(inv_freq: np.ndarray, fraction: float) -> np.ndarray:
    """Return the frequencies with 0 for all but the fraction of the pairs that turn fastest [B]."""
    if fraction == 1:
        return inv_freq
    return np.where(np.arange(inv_freq.size) < int(fraction * inv_freq.size), inv_freq, 0.0)


def check_parameters(
    kind: str, parameters: Mapping[str, Any], *, later: Sequence[str] = ()
) -> None:
    """Raise ValueError if a key that is not in `later` is missing, or if values contradict."""
    missing = [
        key for key in ROPE_TYPES[kind].required if key not in parameters and key not in later
    ]
    if missing:
        instead = " or max_length (trained_length of an encoding)" * (missing == [ORIGINAL])
        raise ValueError(f"rope_type {kind!r} needs {', '.join(missing)}{instead}")
    high, low = (parameters.get(f"{name}_freq_factor", 0.0) for name in ("high", "low"))
    if kind == "llama3" and high <= low:
        raise ValueError(f"high_freq_factor must be above low_freq_factor, got {high} and {low}")
    short, long = (len(parameters.get(f"{name}_factor", ())) for name in ("short", "long"))
    if short != long:
        raise ValueError(
            "short_factor and long_factor must each have one value per pair, got "
            f"{short} and {long} values"
        )


def known_keys(kind: str) -> tuple[str, ...]:
    """Return the keys that a rope type reads, without rope_type itself."""
    row = ROPE_TYPES[kind]
    return ("rope_theta", "partial_rotary_factor", *row.required, *row.optional)


def base_of(theta: float | None, rope_theta: float | None) -> float:
    """Return the base: `theta`, `rope_theta`, or 10000 if both are None. They may not differ."""
    theta = None if theta is None else checks.positive("theta", theta)
    if theta is not None and rope_theta is not None and theta != rope_theta:
        raise ValueError(
            f"give the base once, got theta={theta} and rope_theta={rope_theta} in scaling"
        )
    return next((base for base in (theta, rope_theta) if base is not None), DEFAULT_THETA)


# ---------------------------------------------------------------- one function for each type


class _Case(NamedTuple):
    """The arguments of a formula, with the checked parameters of its type."""

    dim: int
    theta: float
    parameters: Mapping[str, Any]
    length: int | None
    max_length: int | None

    @property
    def rotary_dim(self) -> int:
        """The size of the rotated part of the head."""
        size = int(self.dim * self.parameters.get("partial_rotary_factor", 1.0))
        if size + size % 2 > self.dim:
            raise ValueError(f"head size must be even where a whole head rotates, got {self.dim}")
        return size

    def powers(self) -> np.ndarray:
        """Return theta^(-2i/rotary_dim) [R]."""
        size = self.rotary_dim
        return self.theta ** (-np.arange(0, size, 2) / max(size, 1))


def _dynamic(case: _Case) -> tuple[np.ndarray, float]:
    """Return dynamic NTK: beyond max_length the base grows until the slowest pair interpolates."""
    if case.max_length is None:
        raise ValueError(
            "rope_type 'dynamic' needs max_length, the trained length (trained_length of an "
            "encoding); got None"
        )
    size = case.rotary_dim
    if size <= 2:
        raise ValueError(f"rope_type 'dynamic' needs more than 2 rotated dims, got {size}")
    factor, length = case.parameters["factor"], max(case.length or 0, case.max_length)
    growth = factor * length / case.max_length - (factor - 1)
    theta = float(np.float64(case.theta) * np.float64(growth) ** (size / (size - 2)))
    if not math.isfinite(theta):
        raise ValueError(f"rope_type 'dynamic': the base for length {length} is not finite")
    return case._replace(theta=theta).powers(), 1.0


def _yarn(case: _Case) -> tuple[np.ndarray, float]:
    """Return YaRN [Y]: fast pairs stay, slow pairs are interpolated, with a ramp between them."""
    parameters, size = case.parameters, case.rotary_dim
    factor, plain = parameters["factor"], case.powers()
    if case.theta == 1:
        raise ValueError("rope_type 'yarn' needs a base other than 1, got theta 1")

    def pair_with_turns(turns: float) -> float:
        """Return the index of the pair that makes `turns` turns within the original length."""
        wavelength = parameters[ORIGINAL] / (turns * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(case.theta))

    low = pair_with_turns(parameters.get("beta_fast", 32.0))
    high = pair_with_turns(parameters.get("beta_slow", 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(plain.size) - low) / (high - low), 0.0, 1.0)
    inv_freq = plain / factor * interpolated + plain * (1 - interpolated)
    if "attention_factor" in parameters:
        return inv_freq, parameters["attention_factor"]

    def scaled(mscale: float) -> float:
        return 0.1 * mscale * math.log(max(parameters["factor"], 1.0)) + 1.0

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if not (mscale and mscale_all_dim):  # one alone, or a 0, is ignored
        return inv_freq, scaled(1.0)
    if scaled(mscale_all_dim) == 0:
        raise ValueError(f"mscale_all_dim {mscale_all_dim} makes the attention factor infinite")
    return inv_freq, scaled(mscale) / scaled(mscale_all_dim)


def _longrope(case: _Case) -> tuple[np.ndarray, float]:
    """Return LongRoPE (arXiv 2402.13753): divisors of each pair, for short and long sequences."""
    parameters, plain = case.parameters, case.powers()
    longer = case.length is not None and case.length > parameters[ORIGINAL]
    name = "long_factor" if longer else "short_factor"
    divisors = np.array(parameters[name])
    if divisors.shape != plain.shape:
        raise ValueError(
            f"{name} must have one value per pair, {plain.size} for head size {case.dim}; got "
            f"{divisors.size}"
        )
    inv_freq, original = plain / divisors, parameters[ORIGINAL]
    if "attention_factor" in parameters:
        return inv_freq, parameters["attention_factor"]
    if "factor" not in parameters:
        raise ValueError(
            "rope_type 'longrope' needs factor, attention_factor or max_length (trained_length of "
            "an encoding)"
        )
    if parameters["factor"] <= 1:
        return inv_freq, 1.0
    if original <= 1:
        raise ValueError(f"{ORIGINAL} must be above 1, got {original}")
    return inv_freq, math.sqrt(1 + math.log(parameters["factor"]) / math.log(original))


def _llama3(case: _Case) -> tuple[np.ndarray, float]:
    """Return Llama 3.1's scaling: pairs of few turns are divided by the factor, fast ones stay."""
    parameters, plain = case.parameters, case.powers()
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters[ORIGINAL] * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * plain / parameters["factor"] + kept * plain, 1.0


def _proportional(case: _Case) -> tuple[np.ndarray, float]:
    """Return p-RoPE as a rope type: the fastest pairs rotate, by powers of the whole head size."""
    dim, parameters = case.dim, case.parameters
    if dim % 2:
        raise ValueError(f"rope_type 'proportional' needs an even head size, got {dim}")
    rotated = int(parameters.get("partial_rotary_factor", 1.0) * dim // 2)
    inv_freq = np.zeros(dim // 2)
    inv_freq[:rotated] = case.theta ** (-np.arange(0, 2 * rotated, 2) / dim)
    return inv_freq / parameters.get("factor", 1.0), 1.0


class RopeType(NamedTuple):
    """A rope type: its formula, its keys, and whether it depends on the current length."""

    formula: Callable[[_Case], tuple[np.ndarray, float]]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    follows_length: bool = False


ROPE_TYPES: dict[str, RopeType] = {
    "default": RopeType(lambda case: (case.powers(), 1.0)),
    "linear": RopeType(lambda case: (case.powers() / case.parameters["factor"], 1.0), ("factor",)),
    "dynamic": RopeType(_dynamic, ("factor",), (), True),
    "yarn": RopeType(
        _yarn,
        ("factor", ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": RopeType(
        _longrope, ("short_factor", "long_factor", ORIGINAL), ("factor", "attention_factor"), True
    ),
    "llama3": RopeType(_llama3, ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)),
    "proportional": RopeType(_proportional, (), ("factor",)),
}


def divisors(name: str, value: Any) -> tuple[float, ...]:
    """Return `value` as a tuple of finite floats above 0, one per pair."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and checks.is_short(value):
        value = value.tolist()
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not (listed and checks.is_short(value)):
        raise TypeError(f"{name} must be a list of numbers, one per pair, got {value!r}")
    return tuple(checks.positive(f"{name}[{i}]", item) for i, item in enumerate(value))


# Every key of every type, with the check of its value.
PARAMETERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("rope_theta", "factor", ORIGINAL, "attention_factor"), checks.positive),
    **dict.fromkeys(("beta_fast", "beta_slow"), checks.positive),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), checks.positive),
    **dict.fromkeys(("mscale", "mscale_all_dim"), checks.finite),
    **dict.fromkeys(("short_factor", "long_factor"), divisors),
    "partial_rotary_factor": checks.zero_to_one,
    "truncate": checks.flag,
}
