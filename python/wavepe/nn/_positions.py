"""Encodings inside an attention module: one class for each entry point."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import ops
from ..encodings import Encoding, RoPE
from ._angles import Frequencies, angles, sequence_length
from ._cache import CachedTokens
from ._precision import NARROW, AtLeastFloat32
from ._tables import ConstantTables, capacity_for

# Any two lengths beyond every threshold that a scaling type may have.
_SHORT, _LONG = 1, 1 << 40


class PositionEncoding(nn.Module):
    """What an encoding does in attention; this one, of the encoding "none", nothing.

    Attributes
    ----------
    encoding : Encoding
    contiguous : bool
        Distances are counted in tokens, so positions must be contiguous (of the class).
    """

    contiguous = False

    def __init__(self, encoding: Encoding) -> None:
        super().__init__()
        self.encoding = encoding

    def rotated(
        self, q: Tensor, k: Tensor, positions: Tensor | None, layer: CachedTokens | None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys of the new tokens, rotated by their positions.

        Parameters
        ----------
        q, k : Tensor (B, H, m, d), (B, Hk, L, d)
            The queries are those of the last m tokens.
        positions : int64 Tensor (B|1, L), optional
            None: the indices that follow those of `layer`.
        layer : CachedTokens, optional
            The cache's, before they are added.
        """
        return q, k

    def cached(self, length: int) -> CachedTokens:
        """What a cache of `length` tokens, kept by others, is to `rotated`."""
        layer = CachedTokens()
        layer.length = length
        return layer

    def arguments(self, q: Tensor, keys: int, layer: CachedTokens | None) -> dict[str, Any]:
        """Queries, and what else `ops.attention` is given for this encoding.

        Parameters
        ----------
        q : Tensor (B, H, m, d)
            What `rotated` returned.
        keys : int
            Number of keys n.
        """
        return {"q": q}

    def reset_parameters(self) -> None:
        """Initial values for what is learned."""

    def extra_repr(self) -> str:
        return str(self.encoding)


def _of_head_size(head_dim: int, made: Callable[[], Any]) -> Any:
    """What it makes; where it does not fit, what is called dim there is the head size here."""
    try:
        return made()
    except ValueError as error:
        misfit = re.fullmatch(r"dim \d+ is not divisible by the number of scales (\d+)", str(error))
        if misfit is None:
            raise
        count = next(n for n in range(min(int(misfit[1]), head_dim), 0, -1) if head_dim % n == 0)
        raise ValueError(
            f"head size {head_dim} is not divisible by {misfit[1]} scales: choose scales, e.g. "
            f"wavelet:scales={count}"
        ) from None


class Slopes(PositionEncoding):
    """-slope_h * abs(delta) in the score [A]."""

    contiguous = True

    def __init__(self, encoding: Encoding, heads: int) -> None:
        super().__init__(encoding)
        # No buffer: casts of the module do not reach it.
        self._slopes = torch.from_numpy(encoding.slopes(heads))

    def arguments(self, q: Tensor, keys: int, layer: CachedTokens | None) -> dict[str, Any]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return {"q": q, "slopes": self._slopes.to(q.device, wide)}


class Relative(PositionEncoding):
    """q.p_delta in the score, of a constant table ([W]; [X] without biases)."""

    contiguous = True

    def __init__(self, encoding: Encoding, head_dim: int, causal: bool) -> None:
        super().__init__(encoding)
        # Raises where it does not fit the head size.
        _of_head_size(head_dim, lambda: encoding.table(1, head_dim, causal=causal))
        self._tables = ConstantTables(encoding, head_dim, causal)

    def arguments(self, q: Tensor, keys: int, layer: CachedTokens | None) -> dict[str, Any]:
        return {"q": q, "p": self._tables.reaching(keys)}


class Learned(AtLeastFloat32, PositionEncoding):
    """q_rel.p_delta in the score, of a table that is learned ([S], [X], [W])."""

    contiguous = True

    def __init__(
        self, encoding: Encoding, head_dim: int, heads: int, causal: bool, **factory: Any
    ) -> None:
        super().__init__(encoding)
        self._head_dim, self._heads, self._causal = head_dim, heads, causal
        dtype = factory.get("dtype") or torch.get_default_dtype()
        factory["dtype"] = torch.float32 if dtype in NARROW else dtype
        initial = _of_head_size(head_dim, lambda: encoding.parameters(head_dim, heads))
        for name, value in initial.items():
            self.register_parameter(name, nn.Parameter(torch.empty(value.shape, **factory)))
        self._names = tuple(initial)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initial = self.encoding.parameters(self._head_dim, self._heads)
        with torch.no_grad():
            for name, value in initial.items():
                getattr(self, name).copy_(torch.from_numpy(value))

    def arguments(self, q: Tensor, keys: int, layer: CachedTokens | None) -> dict[str, Any]:
        parameters = {name: getattr(self, name) for name in self._names}
        p, first, beyond = self._table(parameters, keys, layer)
        given = {"p": p.to(q.dtype), "first": first, "beyond": beyond}
        biases = self.encoding.query_biases(parameters)
        if biases is None:
            return {"q": q, **given}
        u, v = (bias[:, None].to(q.dtype) for bias in biases)
        return {"q": q + u, "q_rel": q + v, **given}

    def _table(
        self, parameters: dict[str, Tensor], keys: int, layer: CachedTokens | None
    ) -> tuple[Tensor, int, str]:
        """The table of these parameters, made once for many steps of a generation."""
        learned = functools.partial(
            self.encoding.learned_table, parameters=parameters, causal=self._causal
        )
        fixed = layer is not None and not torch.is_grad_enabled()
        if not fixed or any(x.is_inference() for x in parameters.values()):
            return learned(keys)
        assert layer is not None
        capacity = capacity_for(keys)
        state = (capacity, *((x.data_ptr(), x._version) for x in parameters.values()))
        if layer.table is None or layer.table[0] != state:
            try:
                layer.table = state, learned(capacity)
            except ValueError:  # an encoding of one's own may end between
                return learned(keys)
        return layer.table[1]


class Rotated(PositionEncoding):
    """Queries and keys rotated by their positions [R]."""

    def __init__(self, encoding: Encoding, head_dim: int, max_length: int | None) -> None:
        super().__init__(encoding)
        self._rope = cast(RoPE, encoding)  # as `register_encoding` asks of a user's own
        self._head_dim, self._max_length = head_dim, max_length
        # By training mode; None where the frequencies follow the length.
        self._fixed = {training: self._fixed_frequencies(training) for training in (True, False)}

    def rotated(
        self, q: Tensor, k: Tensor, positions: Tensor | None, layer: CachedTokens | None
    ) -> tuple[Tensor, Tensor]:
        start = 0 if layer is None else layer.length
        found = self._fixed[self.training]
        keep = found is not None
        if found is None:
            found = self._at_length(start + k.shape[-2], positions)
        if layer is not None:
            self._check_cache(layer, found)
            layer.frequencies = found
        cos, sin = angles(found, k, positions, start=start, keep=keep)
        how = {"interleaved": self._rope.interleaved}
        if q.shape[-2] == k.shape[-2]:
            return ops.rope_qk(q, k, cos, sin, **how)
        last = k.shape[-2] - q.shape[-2]
        return ops.rope(q, cos[..., last:, :], sin[..., last:, :], **how), ops.rope(
            k, cos, sin, **how
        )

    def cached(self, length: int) -> CachedTokens:
        layer = super().cached(length)
        layer.frequencies = self._fixed[self.training] or self._at_length(length, None)
        return layer

    def _fixed_frequencies(self, training: bool) -> Frequencies | None:
        short, long = (self._frequencies(length, training) for length in (_SHORT, _LONG))
        return short if short == long else None

    def _frequencies(self, length: int, training: bool) -> Frequencies:
        try:
            inv_freq, factor = self._rope.frequencies(
                self._head_dim, length=length, trained_length=self._max_length, training=training
            )
        except ValueError as error:
            if self._max_length is not None or "trained_length" not in str(error):
                raise
            raise ValueError(f"{error} (max_length of SelfAttention is trained_length)") from None
        if 2 * len(inv_freq) > self._head_dim:
            raise ValueError(
                f"{self.encoding} rotates {2 * len(inv_freq)} dims, more than head_dim="
                f"{self._head_dim}"
            )
        mode = "training" if training else "evaluation"
        return Frequencies(inv_freq, factor, f"{self.encoding} at length {length} in {mode}")

    @torch.compiler.disable(reason="this RoPE follows the length: its frequencies are made eagerly")
    def _at_length(self, length: int, positions: Tensor | None) -> Frequencies:
        if positions is not None:
            length = sequence_length(positions)
        return self._frequencies(max(length, 1), self.training)

    def _check_cache(self, layer: CachedTokens, now: Frequencies) -> None:
        then = layer.frequencies
        if layer.length and then is not None and then != now:
            raise RuntimeError(
                f"wavepe: the {layer.length} cached keys were rotated for {then.label}, this call "
                f"rotates for {now.label}: reset() the cache, and compute the whole sequence anew"
            )


def check_learned(encoding: Encoding) -> None:
    """ValueError where an encoding learns what no front end can hold."""
    if getattr(encoding, "learned", False) and encoding.entry != "relative":
        raise ValueError(
            f"{encoding} is learned and {encoding.entry}: only relative encodings can be learned"
        )


def position_encoding(
    encoding: Encoding,
    head_dim: int,
    heads: int,
    *,
    causal: bool,
    max_length: int | None,
    **factory: Any,
) -> PositionEncoding:
    """The module of an encoding.

    Raises
    ------
    ValueError
        The encoding does not fit the head size, lacks `max_length`, or is added to embeddings.
    """
    if encoding.entry == "absolute":
        raise ValueError(
            f"the encoding '{encoding}' is absolute: its vectors are added to the token embeddings "
            "(wavepe.nn.AbsoluteEncoding), before the first layer; give attention layers "
            "encoding='none' there"
        )
    check_learned(encoding)
    if encoding.entry == "rotary":
        return Rotated(encoding, head_dim, max_length)
    if encoding.entry == "slope":
        return Slopes(encoding, heads)
    if encoding.entry == "none":
        return PositionEncoding(encoding)
    if getattr(encoding, "learned", False):
        return Learned(encoding, head_dim, heads, causal, **factory)
    return Relative(encoding, head_dim, causal)
