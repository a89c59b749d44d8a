"""Rotary position encoding [R], its length scalings, p-RoPE [B], and a base for inference [F]."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..arrays.rope import rope_table
from ..arrays.rope_frequencies import (
    DEFAULT_THETA,
    ORIGINAL,
    PARAMETERS,
    ROPE_TYPES,
    check_parameters,
    known_keys,
    rope_frequencies,
    rotated_part,
)
from ..common import checks
from .base import Encoding, sequence_length
from .methods import once
from .options import flag, integer, one_of, option, positive
from .register import register_encoding

# Rope types for which a factor of 1 means no scaling.
_SCALED_FACTORS = ("linear", "yarn")


def _group(label: str, value: Any) -> Any:
    return "inf" if value == "inf" else integer(1)(label, value)


@register_encoding
class RoPE(Encoding):
    """Rotate pairs of elements of q and k by angles proportional to the position: RoPE.

    At position m, pair i of the head is rotated by m * theta^(-2i/d).

    Parameters
    ----------
    theta : float, optional
        The base. None is 10000; in a patched model, None is the base of that model.
    fraction : float
        The part of the pairs that rotate (p-RoPE), from 0 to 1. The int(fraction * d // 2) pairs
        of the highest frequencies rotate, and the exponent keeps the denominator d. 1 is RoPE,
        and 0 rotates nothing.
    interleaved : bool, optional
        True pairs elements (2i, 2i+1). False pairs elements (i, i + d/2). None is False; in a
        patched model, None is the pairs of that model.
    inference_theta : float or "scaled", optional
        The base outside training. "scaled" is theta * length / trained_length where the sequence
        is longer than the trained length, and theta elsewhere.
    type : str, optional
        A length scaling: a rope_type of `wavepe.rope_frequencies`. The options below are its
        parameters, with the names of Hugging Face's rope_parameters. None is "default". In a
        patched model, None is the model's own type if `theta` is None as well.
    factor : float or "scaled", optional
        The factor of the types that have one. "scaled", for linear and yarn only, is
        length / trained_length where the sequence is longer than the trained length. Shorter
        sequences are then not scaled at all.
    original_max_position_embeddings : float, optional
        The length before scaling. None is the trained length.
    attention_factor : float, optional
        yarn, longrope: the factor on cosines and sines. None computes it from `factor`.
    beta_fast : float, optional
        yarn: the number of turns over the original length above which a pair stays as it is.
    beta_slow : float, optional
        yarn: the number of turns over the original length below which a pair is scaled in full.
    mscale : float, optional
        yarn: a weight in the attention factor, as DeepSeek computes it.
    mscale_all_dim : float, optional
        yarn: the weight in the divisor of that attention factor.
    truncate : bool, optional
        yarn: whether the ends of the blend are rounded to whole pairs.
    short_factor : list of float, optional
        longrope: a divisor for each pair, up to the original length.
    long_factor : list of float, optional
        longrope: a divisor for each pair, beyond the original length.
    low_freq_factor : float, optional
        llama3: the number of turns over the original length below which a pair is scaled in full.
    high_freq_factor : float, optional
        llama3: the number of turns over the original length above which a pair stays as it is.
    partial_rotary_factor : float, optional
        The part of the head that rotates. The exponent has the size of this part as its
        denominator.
    self_extend : float, optional
        Self-Extend, outside training: keys at a distance of `neighbors` and more have positions in
        groups of this many tokens. "inf" gives them all the distance `neighbors`: ReRoPE.
    neighbors : int
        The distance from which on `self_extend` acts.

    Raises
    ------
    TypeError
        If an option has a wrong type.
    ValueError
        If a parameter of the type is missing, if the type does not know a parameter, if a value is
        wrong, or if `fraction` is given beside `type` or `partial_rotary_factor`.

    References
    ----------
    Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021,
    arXiv 2104.09864. fraction: Barbero et al., "Round and round we go", 2024, arXiv 2410.06205.
    inference_theta: Oka et al., "Frequency Bands in RoPE", ICLR 2026. self_extend: Jin et al.,
    "LLM maybe LongLM", ICML 2024, arXiv 2401.01325.
    """

    name = "rope"
    inference_only = ("inference_theta", "self_extend", "neighbors")

    theta: float | None = option(None, positive())
    fraction: float = option(1.0, checks.zero_to_one)
    interleaved: bool | None = option(None, flag)
    inference_theta: float | str | None = option(None, positive("scaled"))
    type: str | None = option(None, one_of(*ROPE_TYPES))
    factor: float | str | None = option(None, positive("scaled"))
    original_max_position_embeddings: float | None = option(None, PARAMETERS[ORIGINAL])
    attention_factor: float | None = option(None, PARAMETERS["attention_factor"])
    beta_fast: float | None = option(None, PARAMETERS["beta_fast"])
    beta_slow: float | None = option(None, PARAMETERS["beta_slow"])
    mscale: float | None = option(None, PARAMETERS["mscale"])
    mscale_all_dim: float | None = option(None, PARAMETERS["mscale_all_dim"])
    truncate: bool | None = option(None, flag)
    short_factor: tuple[float, ...] | None = option(None, PARAMETERS["short_factor"])
    long_factor: tuple[float, ...] | None = option(None, PARAMETERS["long_factor"])
    low_freq_factor: float | None = option(None, PARAMETERS["low_freq_factor"])
    high_freq_factor: float | None = option(None, PARAMETERS["high_freq_factor"])
    partial_rotary_factor: float | None = option(None, PARAMETERS["partial_rotary_factor"])
    self_extend: int | str | None = option(None, _group)
    neighbors: int = option(512, integer(1, 1 << 40))

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, scaling = self.type or "default", self._scaling()
        if self.fraction != 1 and (self.type is not None or scaling):
            other = "type" if self.type is not None else "partial_rotary_factor"
            raise ValueError(
                f"{self.name} fraction={self.fraction} cannot be combined with {other}: "
                "type=proportional with partial_rotary_factor is the same rotation"
            )
        for key in scaling:
            if key not in known_keys(kind):
                raise ValueError(
                    f"{self.name} {key} needs a type that has it: "
                    f"{', '.join(k for k in ROPE_TYPES if key in known_keys(k))}; got type "
                    f"{self.type!r}"
                )
        try:
            # The trained length, which is known later, replaces a missing original length.
            check_parameters(kind, scaling, later=(ORIGINAL,))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        if self.factor == "scaled" and kind not in _SCALED_FACTORS:
            raise ValueError(
                f"{self.name} factor=scaled needs type={' or '.join(_SCALED_FACTORS)}, got {kind}"
            )
        if self.inference_theta == "scaled" and (self.factor == "scaled" or kind == "dynamic"):
            other = "type=dynamic" if kind == "dynamic" else "factor=scaled"
            raise ValueError(
                f"{self.name}: give one of {other} and inference_theta=scaled, got both: each of "
                "them follows the length"
            )
        if self.self_extend is None and self.neighbors != 512:
            raise ValueError(f"{self.name} neighbors needs self_extend, the size of the groups")
        if self.self_extend is not None and self.follows_length:
            raise ValueError(
                f"{self.name} self_extend needs frequencies that do not follow the length: leave "
                "one of the two"
            )

    def __repr__(self) -> str:
        """Show only the options that differ from their defaults, as a spec does."""
        options = ", ".join(f"{key}={value!r}" for key, value in self.options().items())
        return f"{self.__class__.__name__}({options})"

    @once
    def in_scores(self) -> bool:
        return super().in_scores or self.self_extend is not None

    @once
    def follows_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        scaling = ROPE_TYPES[self.type or "default"]
        return scaling.follows_length or "scaled" in (self.inference_theta, self.factor)

    def trained_as(self) -> RoPE:
        """Return the encoding as training sees it, with its base as a number.

        Scalings that begin only beyond the trained length are left out. rope and rope:theta=10000
        train the same model, so the results for them are equal.
        """
        theta = DEFAULT_THETA if self.theta is None else self.theta
        kind = None if self.type == "default" else self.type
        options: dict[str, Any] = {"theta": theta, "interleaved": self.interleaved or None}
        if kind == "dynamic" or self.factor == "scaled":
            kind, kept = None, ("rope_theta", "partial_rotary_factor")
            options |= dict.fromkeys(PARAMETERS.keys() - kept)
        return dataclasses.replace(super().trained_as(), **options, type=kind)

    def frequencies(
        self,
        head_dim: int,
        *,
        length: int | None = None,
        trained_length: int | None = None,
        training: bool = False,
    ) -> tuple[np.ndarray, float]:
        """Return the frequencies of the pairs, and the factor on cosines and sines.

        Lengths are needed for options with the value "scaled" and for the types dynamic and
        longrope. With `training`, `theta` stands for `inference_theta`.

        Returns
        -------
        inv_freq : array (pairs,), float64
            Radians per position of each pair. There are head_dim/2 pairs, with 0 for those that
            `fraction` excludes. With partial_rotary_factor there may be fewer pairs, as in
            `wavepe.rope_frequencies`.
        attention_factor : float

        Raises
        ------
        ValueError
            If a needed length is missing, or the frequencies are not finite.
        """
        theta = DEFAULT_THETA if self.theta is None else self.theta
        if self.inference_theta == "scaled" and not training:
            current = self._needed("length", length)
            trained = self._needed("trained_length", trained_length)
            theta = theta * current / trained if current > trained else theta
        elif isinstance(self.inference_theta, float) and not training:
            theta = self.inference_theta
        scaling = self._scaling_at(length, trained_length)
        lengths = {"length": length, "max_length": trained_length} if self.type else {}
        inv_freq, factor = rope_frequencies(head_dim, theta, scaling=scaling, **lengths)
        return rotated_part(inv_freq, self.fraction), factor

    def rope_table(
        self, positions: ArrayLike, head_dim: int, *, length: int | None = None,
        trained_length: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        if self.follows_length:
            length = sequence_length(self, positions, length)
        inv_freq, factor = self.frequencies(head_dim, length=length, trained_length=trained_length)
        return rope_table(positions, inv_freq, attention_factor=factor)

    def _scaling(self) -> dict[str, Any]:
        """Return the options that are parameters of the rope type, without those that are None."""
        values = {key: getattr(self, key) for key in PARAMETERS if key != "rope_theta"}
        return {key: value for key, value in values.items() if value is not None}

    def _scaling_at(self, length: int | None, trained_length: int | None) -> dict[str, Any]:
        """Return the rope parameters for a sequence of `length`."""
        parameters = {"rope_type": self.type or "default", **self._scaling()}
        if self.factor != "scaled":
            return parameters
        trained = self.original_max_position_embeddings
        if trained is None:
            trained = self._needed("trained_length", trained_length)
        factor = self._needed("length", length) / trained
        if factor > 1:
            return {**parameters, "factor": factor}
        return {key: parameters[key] for key in parameters.keys() & {"partial_rotary_factor"}}

    def _needed(self, key: str, value: int | None) -> int:
        if value is None:
            raise ValueError(f"{self} needs {key}, a number of tokens; got None")
        return checks.integer(f"{self.name} {key}", value, 1)
