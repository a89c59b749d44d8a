"""Rotary position encoding [R] and its length scalings, p-RoPE [B], and a base changed at inference
[F]."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .. import _checks
from .._rope import rope_table
from .._rope_frequencies import (
    DEFAULT_THETA,
    ORIGINAL,
    PARAMETERS,
    ROPE_TYPES,
    check_parameters,
    known_keys,
    rope_frequencies,
)
from .base import Encoding, register_encoding, sequence_length
from .options import flag, one_of, option, positive, zero_to_one

# Types of which factor 1 is no scaling.
_SCALED_FACTORS = ("linear", "yarn")


@register_encoding
@dataclasses.dataclass(frozen=True, repr=False)
class RoPE(Encoding):
    """Pair i of the head is rotated by m * theta^(-2i/d) [R].

    [R] is Su et al., arXiv 2104.09864; [B] Barbero et al., arXiv 2410.06205; [F] Oka et al.,
    "Frequency Bands in RoPE", ICLR 2026.

    Parameters
    ----------
    theta : float, optional
        The base. None is the base of the model that is patched, and 10000 elsewhere.
    fraction : float
        p-RoPE [B]: the int(fraction * d // 2) pairs of highest frequency are rotated, with the
        denominator d kept; the others stay. 1 is RoPE, 0 is no encoding.
    interleaved : bool
        Pairs (2i, 2i+1) instead of the halves' (i, i + d/2).
    inference_theta : float or "scaled", optional
        The base outside training [F]; "scaled" is theta * length / trained_length where the
        sequence is longer than the trained length.
    factor : float or "scaled", optional
        Of the types that have one; for linear and yarn, "scaled" is length / trained_length where
        the sequence is longer than the trained length, and no scaling at all where it is not.
    type : str, optional
        Length scaling, a rope_type of `wavepe.rope_frequencies`; the options below are its
        parameters, under the names of Hugging Face's rope_parameters. original_max_position_
        embeddings is the trained length where it is not given. None is "default", or in a model
        that is patched the model's own, if theta is None too.
    partial_rotary_factor : float, optional
        The part of the head that is rotated at all, with its size in the exponent.

    Raises
    ------
    ValueError
        A parameter that the type lacks or does not know, or `fraction` beside a type or
        partial_rotary_factor.
    """

    name = "rope"
    entry = "rotary"
    inference_only = ("inference_theta",)

    theta: float | None = option(None, positive())
    fraction: float = option(1.0, zero_to_one)
    interleaved: bool = False
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

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, given = self.type or "default", self._scaling()
        if self.fraction != 1 and (self.type is not None or given):
            other = "type" if self.type is not None else "partial_rotary_factor"
            raise ValueError(
                f"{self.name} fraction={self.fraction} goes without {other}: type=proportional "
                "with partial_rotary_factor is the same rotation"
            )
        for key in given:
            if key not in known_keys(kind):
                raise ValueError(
                    f"{self.name} {key} needs a type that has it: "
                    f"{', '.join(k for k in ROPE_TYPES if key in known_keys(k))}; got type "
                    f"{self.type!r}"
                )
        try:
            # Where it is missing, the trained length stands in for it later on.
            check_parameters(kind, given, later=(ORIGINAL,))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        if self.factor == "scaled" and kind not in _SCALED_FACTORS:
            raise ValueError(
                f"{self.name} factor=scaled needs type={' or '.join(_SCALED_FACTORS)}, got {kind}"
            )
        if self.factor == "scaled" and self.inference_theta == "scaled":
            raise ValueError(f"{self.name}: factor=scaled or inference_theta=scaled: give one")
        if kind == "dynamic" and self.inference_theta == "scaled":
            raise ValueError(
                f"{self.name}: type=dynamic and inference_theta=scaled both raise the base with "
                "the length; give one"
            )

    def __repr__(self) -> str:
        """Only what differs from the defaults, as in a spec."""
        options = ", ".join(f"{key}={value!r}" for key, value in self.options().items())
        return f"{self.__class__.__name__}({options})"

    @property
    def follows_length(self) -> bool:
        """Tell whether the frequencies depend on the length of the sequence."""
        scaling = ROPE_TYPES[self.type or "default"]
        return scaling.follows_length or "scaled" in (self.inference_theta, self.factor)

    def trained_as(self) -> RoPE:
        """Return it without what begins beyond the trained length, and with the base written out.

        rope and rope:theta=10000 are the same model to train, so they must compare equal here.
        """
        theta = DEFAULT_THETA if self.theta is None else self.theta
        kind = None if self.type == "default" else self.type
        if kind == "dynamic" or self.factor == "scaled":
            kept = {"theta", "interleaved", "partial_rotary_factor"}
            return RoPE(**{key: getattr(self, key) for key in kept} | {"theta": theta})
        return dataclasses.replace(super().trained_as(), theta=theta, type=kind)

    def frequencies(
        self,
        head_dim: int,
        *,
        length: int | None = None,
        trained_length: int | None = None,
        training: bool = False,
    ) -> tuple[np.ndarray, float]:
        """Return the angle per position of each pair, and the factor on cosines and sines.

        Parameters
        ----------
        head_dim : int
            The head size d, even.
        length, trained_length : int, optional
            Of the current sequence and of training; inference_theta="scaled" and the types
            dynamic and longrope need them.
        training : bool
            Take `theta`, whatever `inference_theta` says.

        Returns
        -------
        inv_freq : ndarray, float64 (pairs,)
            head_dim/2 pairs, zero for those that `fraction` leaves alone; fewer with
            partial_rotary_factor, as `wavepe.rope_frequencies` has them.
        attention_factor : float
        """
        theta = DEFAULT_THETA if self.theta is None else self.theta
        if not training:
            theta = self._inference_base(theta, length, trained_length)
        scaling = self._scaling_at(length, trained_length)
        lengths = {"length": length, "max_length": trained_length} if self.type else {}
        inv_freq, factor = rope_frequencies(head_dim, theta, scaling=scaling, **lengths)
        if self.fraction == 1:
            return inv_freq, factor
        rotated = int(self.fraction * head_dim // 2)
        return np.where(np.arange(inv_freq.size) < rotated, inv_freq, 0.0), factor

    def rope_table(
        self,
        positions: ArrayLike,
        head_dim: int,
        *,
        length: int | None = None,
        trained_length: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.follows_length:
            length = sequence_length(self, positions, length)
        inv_freq, factor = self.frequencies(head_dim, length=length, trained_length=trained_length)
        return rope_table(positions, inv_freq, attention_factor=factor)

    def _scaling(self) -> dict[str, Any]:
        """Return the parameters of the scaling that are given."""
        own = {key: getattr(self, key) for key in PARAMETERS if key != "rope_theta"}
        return {key: value for key, value in own.items() if value is not None}

    def _scaling_at(self, length: int | None, trained_length: int | None) -> dict[str, Any]:
        """Return the rope parameters for a sequence of `length`."""
        given = {"rope_type": self.type or "default", **self._scaling()}
        if self.factor != "scaled":
            return given
        trained = self.original_max_position_embeddings
        if trained is None:
            trained = self._needed("trained_length", trained_length)
        factor = self._needed("length", length) / trained
        if factor > 1:
            return {**given, "factor": factor}
        return {key: given[key] for key in given.keys() & {"partial_rotary_factor"}}

    def _inference_base(
        self, theta: float, length: int | None, trained_length: int | None
    ) -> float:
        if self.inference_theta is None:
            return theta
        if not isinstance(self.inference_theta, str):
            return self.inference_theta
        current = self._needed("length", length)
        trained = self._needed("trained_length", trained_length)
        return theta * current / trained if current > trained else theta

    def _needed(self, key: str, value: int | None) -> int:
        if value is None:
            raise ValueError(f"{self} needs {key}=, the number of tokens; got None")
        return _checks.integer(f"{self.name} {key}", value, 1)
