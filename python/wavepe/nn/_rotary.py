"""Rotary embedding as a module, with a base that can be set [R]."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from .. import _checks, ops, rope_frequencies  # ops first: it says how to get torch
from .._rope_frequencies import DEFAULT_THETA
from ..encodings import RoPE
from ..encodings.spec import write_value
from ..ops._common import INTEGERS
from ..ops._torch_private import assert_async
from ..positions.angles import Frequencies, angles, sequence_length
from ..positions.rotation import LONG, SHORT

import torch  # isort: skip
from torch import Tensor, nn  # isort: skip


class Rotary(nn.Module):
    """Rotary position embedding of queries and keys, exact at any position [R].

    Nothing in it is a parameter or a buffer: the angles stay float64 whatever `.to(bfloat16)` or
    `.half()` does to the model, and the state dict holds no frequencies that could go stale.

    Keys in a cache keep the rotation that they were given. The module remembers the frequencies
    of its last call; where they have changed since (`theta` or `scaling` was set, or a type that
    follows the length has moved them) and a call continues a sequence (the smallest position of a
    row is above 0), it raises RuntimeError. It cannot see the cache: rows that start at position 0
    are taken for new sequences.

    Parameters
    ----------
    head_dim : int
        Head size d, even.
    theta : float, optional
        The base; None is that of `scaling`, or 10000.
    scaling : dict, optional
        Hugging Face ``rope_parameters``, as `wavepe.rope_frequencies` reads them; they may rotate
        a part of the head (``partial_rotary_factor``).
    interleaved : bool
        Pairs are (2i, 2i+1) as in GPT-J; else (i, i+h) as in NeoX and Llama.
    fraction : float
        p-RoPE [B]: the int(fraction * d // 2) pairs of highest frequency are rotated. Not together
        with a scaling type or a partial_rotary_factor.
    max_length : int, optional
        The model's max_position_embeddings, for the types that need it.
    precision : "exact" or "hf"
        As `wavepe.rope_table`: "hf" reproduces the float32 products of transformers.

    Raises
    ------
    ValueError, TypeError
        Wrong arguments, as `wavepe.rope_frequencies` says.

    Examples
    --------
    >>> import torch
    >>> from wavepe.nn import Rotary
    >>> rotary = Rotary(64, theta=500000.0)
    >>> q, k = torch.randn(1, 8, 10, 64), torch.randn(1, 2, 10, 64)
    >>> q, k = rotary(q, k)  # positions 0..9
    >>> step = rotary(q[:, :, :1], k[:, :, :1], torch.tensor([10]))
    """

    def __init__(
        self,
        head_dim: int,
        theta: float | None = None,
        *,
        scaling: Mapping[str, Any] | None = None,
        interleaved: bool = False,
        fraction: float = 1.0,
        max_length: int | None = None,
        precision: str = "exact",
    ) -> None:
        super().__init__()
        self.head_dim = _checks.integer("head_dim", head_dim, 1)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {head_dim}")
        self.interleaved = _checks.flag("interleaved", interleaved)
        self.fraction = RoPE(fraction=fraction).fraction
        self.max_length = max_length
        self.precision = _checks.choice("precision", precision, ("exact", "hf"))
        self._memory = _Memory()
        self._set(theta, scaling)

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys rotated by their positions.

        Parameters
        ----------
        q : Tensor (B, H, L, d)
        k : Tensor (B, Hk, L, d)
            float32, float64, bfloat16 or float16, any strides.
        positions : integer Tensor (L,) or (B|1, L), optional
            None is 0..L-1, of sequences that start here. Several sequences may stand in one row,
            each from 0.

        Returns
        -------
        (q', k') : Tensors of q's and k's shapes and dtypes, differentiable

        Raises
        ------
        RuntimeError
            A wrong shape or dtype; or the call continues a sequence whose keys were rotated with
            other frequencies.
        """
        _check(self.head_dim, q, k, positions)
        frequencies = self._frequencies
        if self._follows_length:
            frequencies = self._at_length(q, positions)
        if self._memory.stale is not None and q.shape[-2] > 0:
            _refuse_to_continue(self._memory.stale, frequencies, positions)
            self._memory.stale = None
        if not torch.compiler.is_exporting():  # an exported graph has no theta to change
            self._memory.last = frequencies
        keep = not self._follows_length
        cos, sin = angles(frequencies, q, positions, precision=self.precision, keep=keep)
        return ops.rope_qk(q, k, cos, sin, interleaved=self.interleaved)

    def reset(self) -> None:
        """Forget the frequencies of the last call: caches made with them have been dropped."""
        self._memory.last = self._memory.stale = None

    @property
    def theta(self) -> float:
        """The base. Setting it keeps the scaling type."""
        return self._theta

    @theta.setter
    def theta(self, value: float) -> None:
        scaling = self.scaling
        if scaling is not None:
            scaling.pop("rope_theta", None)
        self._set(_checks.positive("theta", value), scaling)

    @property
    def scaling(self) -> dict[str, Any] | None:
        """A copy of the rope parameters. Setting others keeps theta where they name none."""
        return copy.deepcopy(self._scaling)

    @scaling.setter
    def scaling(self, value: Mapping[str, Any] | None) -> None:
        named = isinstance(value, Mapping) and value.get("rope_theta") is not None
        self._set(None if named else self._theta, value)

    def extra_repr(self) -> str:
        parts = [f"{self.head_dim}, theta={write_value(self._theta)}"]
        parts += [f"scaling={self._scaling}"] if self._scaling else []
        parts += ["interleaved=True"] if self.interleaved else []
        parts += [f"fraction={self.fraction:g}"] if self.fraction != 1 else []
        parts += [f"max_length={self.max_length}"] if self.max_length is not None else []
        parts += [f"precision={self.precision!r}"] if self.precision != "exact" else []
        return ", ".join(parts)

    def _set(self, theta: float | None, scaling: Mapping[str, Any] | None) -> None:
        """Take over a base and a scaling; nothing changes where they are refused."""
        named = isinstance(scaling, Mapping) and set(scaling) <= {"rope_theta"}
        if self.fraction != 1 and not (scaling is None or named):
            raise ValueError(
                f"fraction={self.fraction:g} and scaling={scaling!r} both say which pairs are "
                "rotated: give one"
            )
        first, base = self._compute(theta, scaling, SHORT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said once is enough
            self._follows_length = first != self._compute(theta, scaling, LONG)[0]
        self._frequencies, self._theta = first, base
        self._scaling = None if scaling is None else copy.deepcopy(dict(scaling))
        if not self._follows_length:
            self._memory.compare(first)

    def _compute(
        self, theta: float | None, scaling: Mapping[str, Any] | None, length: int
    ) -> tuple[Frequencies, float]:
        """Frequencies and base."""
        named = scaling.get("rope_theta") if isinstance(scaling, Mapping) else None
        base = named if theta is None else theta
        base = DEFAULT_THETA if base is None else base
        inv_freq, factor = rope_frequencies(
            self.head_dim, theta, scaling=scaling, length=length, max_length=self.max_length
        )
        if self.fraction != 1:
            inv_freq, factor = RoPE(theta=base, fraction=self.fraction).frequencies(self.head_dim)
        base = float(base)
        label = f"theta={write_value(base)}"
        if length > 1:
            label += f" (frequencies of length {length})"
        return Frequencies(inv_freq, factor, label), base

    @torch.compiler.disable(reason="this scaling type follows the length: its base is made eagerly")
    def _at_length(self, q: Tensor, positions: Tensor | None) -> Frequencies:
        """The frequencies of the length that this call reaches."""
        length = q.shape[-2] if positions is None else sequence_length(positions)
        found, _ = self._compute(self._theta, self._scaling, max(length, 1))
        self._memory.compare(found)
        return found


class _Memory:
    """What a module last rotated with; a plain object, so that forward may write it cheaply.

    `stale` holds those frequencies where they are not the ones to use now. Forward reads nothing
    else, so a compiled graph is made again only where theta changes.
    """

    def __init__(self) -> None:
        self.last: Frequencies | None = None
        self.stale: Frequencies | None = None

    def compare(self, now: Frequencies) -> None:
        self.stale = None if self.last is None or self.last == now else self.last


def _refuse_to_continue(then: Frequencies, now: Frequencies, positions: Tensor | None) -> None:
    """Raise where a row of `positions` continues a sequence."""
    if positions is None:
        return
    message = (
        "wavepe: the keys before %s were rotated with "
        + then.label
        + ", and this call rotates with "
        + now.label
        + ": drop the cache and start from position 0, or call reset() where no cached key is used"
        + " (a type that follows the length cannot go on from cached keys once the length moves it)"
    )
    starts = positions.to(torch.int64).amin(-1)
    if torch.compiler.is_compiling():
        assert_async((starts <= 0).all(), message % "this call")
    elif (starts > 0).any():
        raise RuntimeError(message % f"position {int(starts.max())}")


def _check(head_dim: int, q: Tensor, k: Tensor, positions: Tensor | None) -> None:
    """The shapes, in terms of q, k and positions; the operators check the rest.

    Messages are made where they are needed: a compiler would fix the sizes it prints.
    """
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor):
            raise RuntimeError(f"wavepe: {name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4 or x.shape[-1] != head_dim:
            raise RuntimeError(
                f"wavepe: {name} must be (B, H, L, {head_dim}), got {tuple(x.shape)}"
            )
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise RuntimeError(
            "wavepe: q (B, H, L, d) and k (B, Hk, L, d) must have one batch and one length, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    if positions is None:
        return
    if not isinstance(positions, Tensor):
        raise RuntimeError(
            f"wavepe: positions must be a torch.Tensor, got {type(positions).__name__}"
        )
    if positions.dtype not in INTEGERS:
        raise RuntimeError(f"wavepe: positions must hold integers, got {positions.dtype}")
    batch, length = q.shape[0], q.shape[2]
    good = positions.dim() in (1, 2) and positions.shape[-1] == length
    if not good or (positions.dim() == 2 and positions.shape[0] not in (1, batch)):
        raise RuntimeError(
            f"wavepe: positions must be (L,) or (1|B, L), here ({length},) or (1|{batch}, "
            f"{length}); got {tuple(positions.shape)}"
        )
