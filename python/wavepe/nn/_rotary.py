"""Rotary embedding as a module, with a base that can be changed [R]."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..arrays.rope_frequencies import base_of, standard_parameters
from ..common import checks
from ..common.spec import write_value
from ..encodings import RoPE
from ..ops._compiler import disable
from ..ops._torch_private import assert_async, holds
from ..positions.rotation import Frequencies, FrequencySchedule, angles
from ._sequences import check_shape, checked_rows


class Rotary(nn.Module):
    """Rotate queries and keys by their positions: RoPE with exact angles.

    The module has no parameters and no buffers. So the angles stay float64 if the model is cast to
    bfloat16 or float16, and the state dict holds no frequencies.

    The base and the scaling can be changed at any time. Cached keys keep their old rotation,
    though: if the frequencies have changed since the last call and a call continues a sequence, it
    raises RuntimeError. A row whose smallest position is above 0 continues a sequence.

    Parameters
    ----------
    head_dim : int
        Head size d, even.
    theta : float, optional
        The base; None is the base of `scaling`, or 10000.
    scaling : dict, optional
        Hugging Face ``rope_parameters``, as `wavepe.rope_frequencies` reads them; its errors and
        sources are those here, too. With ``partial_rotary_factor`` only a part of the head rotates.
    interleaved, precision : bool, "exact" or "hf"
        As in `wavepe.rope` and `wavepe.rope_table`.
    fraction : float
        The part of the pairs that rotate (p-RoPE), from 0 to 1: the int(fraction * d // 2) pairs of
        the highest frequencies. It cannot be combined with a scaling type or
        partial_rotary_factor.
    trained_length : int, optional
        The model's max_position_embeddings, for the rope types that need it.

    Examples
    --------
    >>> import torch
    >>> from wavepe.nn import Rotary
    >>> rotary = Rotary(64, theta=500000.0)
    >>> q, k = torch.randn(1, 8, 10, 64), torch.randn(1, 2, 10, 64)
    >>> q, k = rotary(q, k)  # positions 0..9
    >>> step = rotary(q[:, :, :1], k[:, :, :1], torch.tensor([10]))
    """

    _last: Frequencies | None  # of the last call
    # `_last` if the current ones differ, else None. Forward reads only this, so a compiled graph is
    # made again only if theta changes.
    _stale: Frequencies | None

    def __init__(
        self,
        head_dim: int,
        theta: float | None = None,
        *,
        scaling: Mapping[str, Any] | None = None,
        interleaved: bool = False,
        fraction: float = 1.0,
        trained_length: int | None = None,
        precision: str = "exact",
    ) -> None:
        super().__init__()
        self.head_dim = checks.even("head_dim", head_dim, 1)
        if trained_length is not None:
            trained_length = checks.integer("trained_length", trained_length, 1)
        self.interleaved = checks.flag("interleaved", interleaved)
        self.fraction = RoPE(fraction=fraction).fraction
        self.trained_length = trained_length
        self.precision = checks.choice("precision", precision, ("exact", "hf"))
        self.reset()
        self._set(theta, scaling)

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by their positions.

        RuntimeError if a shape or dtype is wrong, or if the call continues a sequence whose keys
        were rotated with other frequencies.

        Parameters
        ----------
        q : Tensor (B, H, L, d)
            Queries of float32, float64, bfloat16 or float16, with any strides.
        k : Tensor (B, Hk, L, d)
            Keys of the same dtype, with any strides.
        positions : integer Tensor (L,) or (B|1, L), optional
            Positions of the tokens. None is 0..L-1, for sequences that start here. A row may hold
            several sequences, each from 0.

        Returns
        -------
        q, k : Tensors of q's and k's shapes and dtypes
            The rotated queries and keys, differentiable.
        """
        check_shape("q", q, "B", "H", "L", self.head_dim)
        check_shape("k", k, "B", "H", "L", self.head_dim)
        if not (holds(q.shape[0] == k.shape[0]) and holds(q.shape[2] == k.shape[2])):
            raise RuntimeError(
                "wavepe: q (B, H, L, d) and k (B, Hk, L, d) must have the same batch and length, "
                f"got {tuple(q.shape)} and {tuple(k.shape)}"
            )
        if positions is not None:
            checked_rows("positions", positions, q.shape[0], q.shape[2])
        frequencies = self._frequencies or self._of_longest(q.shape[2], positions)
        if self._stale is not None and q.shape[2] > 0:
            if positions is not None:
                _check_starts(self._stale, frequencies, positions)
            self._stale = None
        if not torch.compiler.is_exporting():  # an exported graph has no theta to change
            self._last = frequencies
        cos, sin = angles(frequencies, q, positions, precision=self.precision)
        return ops.rope_qk(q, k, cos, sin, interleaved=self.interleaved)

    def reset(self) -> None:
        """Forget the frequencies of the last call. Call it after all caches have been dropped."""
        self._last = self._stale = None

    @property
    def theta(self) -> float:
        """The base. Setting it keeps the type of scaling."""
        return self._theta

    @theta.setter
    def theta(self, value: float) -> None:
        scaling = self.scaling
        if scaling is not None:
            scaling.pop("rope_theta", None)
        self._set(checks.positive("theta", value), scaling)

    @property
    def scaling(self) -> dict[str, Any] | None:
        """A copy of the rope parameters. Setting new ones keeps theta if they have none."""
        return copy.deepcopy(self._scaling)

    @scaling.setter
    def scaling(self, value: Mapping[str, Any] | None) -> None:
        named = isinstance(value, Mapping) and value.get("rope_theta") is not None
        self._set(None if named else self._theta, value)

    def extra_repr(self) -> str:
        names = ("scaling", "interleaved", "fraction", "trained_length", "precision")
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{self.head_dim}, theta={write_value(self._theta)}, {options}"

    def _set(self, theta: float | None, scaling: Mapping[str, Any] | None) -> None:
        """Set the base and the scaling; nothing changes if they are refused."""
        options, cautions = standard_parameters(scaling, self.trained_length)
        theta, kind = base_of(theta, options.pop("rope_theta", None)), options.pop("rope_type")
        if self.fraction != 1 and not set(scaling or ()) <= {"rope_theta"}:
            raise ValueError(
                f"give one of fraction and scaling, got fraction={self.fraction:g} and "
                f"scaling={scaling!r}, which both say which pairs rotate"
            )
        rope = RoPE(theta, self.fraction, type=None if kind == "default" else kind, **options)
        for caution in cautions:
            warnings.warn(caution, stacklevel=3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warnings have been shown above
            label = f"theta={write_value(theta)}"
            self._rotation = FrequencySchedule(rope, self.head_dim, self.trained_length, label)
        self._theta = theta
        self._scaling = None if scaling is None else copy.deepcopy(dict(scaling))
        self._frequencies = self._rotation.fixed[False]
        if self._frequencies is not None:
            self._compare(self._frequencies)

    @disable("this RoPE follows the length: NumPy computes its frequencies")
    def _of_longest(self, length: int, positions: Tensor | None) -> Frequencies:
        frequencies = self._rotation.of_longest(length, positions, training=False)
        self._compare(frequencies)
        return frequencies

    def _compare(self, now: Frequencies) -> None:
        self._stale = None if self._last is None or self._last == now else self._last


def _check_starts(then: Frequencies, now: Frequencies, positions: Tensor) -> None:
    """Raise RuntimeError if a row of `positions` continues a sequence."""
    message = (
        f"wavepe: the keys before %s were rotated with {then.label}, but this call rotates with "
        f"{now.label}: drop the cache and start from position 0, or call reset() if no cached key "
        "is used (frequencies that follow the length change as the sequence grows)"
    )
    starts = positions.to(torch.int64).amin(-1)
    if torch.compiler.is_compiling():
        assert_async((starts <= 0).all(), message % "this call")
    elif (starts > 0).any():
        raise RuntimeError(message % f"position {int(starts.max())}")
