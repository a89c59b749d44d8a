"""Encodings inside attention: one class for each entry point."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..encodings import Encoding
from ..ops._common import wide
from ..ops._torch_private import version
from . import compiled
from .angles import Frequencies
from .precision import NARROW, AtLeastFloat32
from .tables import (
    biases_named,
    capacity_for,
    constant_bias,
    constant_table,
    name_of,
    rows_named,
)

_BIAS = ("bias", "bias_first", "bias_beyond")


class Cached:
    """What an encoding knows of the tokens in a cache.

    Attributes
    ----------
    length : int
        Number of tokens n.
    frequencies : Frequencies or None
        What the keys were rotated with.
    table : (state, table) or None
        A learned encoding's, of parameters in that state.
    """

    def __init__(self, length: int = 0) -> None:
        self.length = length
        self.frequencies: Frequencies | None = None
        self.table: tuple[tuple, tuple[Tensor, int, str]] | None = None


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
        self, q: Tensor, k: Tensor, positions: Tensor | None, layer: Cached | None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys of the new tokens, rotated by their positions.

        Parameters
        ----------
        q, k : Tensor (B, H, m, d), (B, Hk, L, d)
            The queries are those of the last m tokens.
        positions : int64 Tensor (B|1, L), optional
            None: the indices that follow those of `layer`.
        layer : Cached, optional
            The tokens before them.
        """
        return q, k

    def cached(self, length: int) -> Cached:
        """What a cache of `length` tokens, kept by others, is to `rotated`."""
        return Cached(length)

    def arguments(self, q: Tensor, keys: int, layer: Cached | None = None) -> dict[str, Any]:
        """Queries, and what else `ops.attention` is given for this encoding.

        Parameters
        ----------
        q : Tensor (B, H, m, d)
            What `rotated` returned.
        keys : int
            Number of keys n.
        """
        return {"q": q}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Cached | None = None, **options: Any
    ) -> Tensor:
        """`ops.attention` with this encoding: q (B, H, m, d), k and v (B, Hk, n, d)."""
        out: Any = ops.attention(**self.arguments(q, k.shape[2], layer), k=k, v=v, **options)
        return out

    def reset_parameters(self) -> None:
        """Initial values for what is learned."""

    def extra_repr(self) -> str:
        return str(self.encoding)


class Slopes(PositionEncoding):
    """-slope_h * abs(delta) in the score [A]."""

    contiguous = True

    def __init__(self, encoding: Encoding, heads: int) -> None:
        super().__init__(encoding)
        # No buffer: casts of the module do not reach it.
        self._slopes = torch.from_numpy(encoding.slopes(heads))
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def arguments(self, q: Tensor, keys: int, layer: Cached | None = None) -> dict[str, Any]:
        dtype = wide(q)
        if torch.compiler.is_compiling() or type(q) is not Tensor:
            return {"q": q, "slopes": self._slopes.to(q.device, dtype)}
        slopes = self._copies.get((q.device, dtype))
        if slopes is None:
            with torch.inference_mode(False):
                slopes = self._copies[q.device, dtype] = self._slopes.to(q.device, dtype)
        return {"q": q, "slopes": slopes}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copies": {}}


class _Constant(PositionEncoding):
    """What has a constant for each distance.

    Its name among operators is an attribute: by that a compiler tells the graphs of two encodings
    apart.
    """

    contiguous = True

    def __init__(self, encoding: Encoding, causal: bool) -> None:
        super().__init__(encoding)
        self._causal = causal
        self._name = name_of(encoding, causal)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._name = name_of(self.encoding, self._causal)  # in this process


class Relative(_Constant):
    """q.p_delta in the score, of a constant table ([W]; [X] without biases)."""

    def __init__(self, encoding: Encoding, head_dim: int, causal: bool) -> None:
        super().__init__(encoding, causal)
        # Raises where it does not fit the head size.
        _of_head_size(head_dim, lambda: encoding.table(1, head_dim, causal=causal))

    def arguments(self, q: Tensor, keys: int, layer: Cached | None = None) -> dict[str, Any]:
        if torch.compiler.is_compiling():
            p, first = rows_named(self._name, keys, q)
            return {"q": q, "p": p, "first": first}
        return {"q": q, "p": constant_table(self.encoding, q.shape[-1], keys, self._causal)}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Cached | None = None, **options: Any
    ) -> Tensor:
        if torch.compiler.is_compiling() and q.device.type == "cpu":
            return compiled.attention(q, k, v, self._name, **options)
        return super().attend(q, k, v, layer, **options)


class Bias(_Constant):
    """A constant for each head and distance in the score [C]."""

    def __init__(self, encoding: Encoding, heads: int, causal: bool) -> None:
        super().__init__(encoding, causal)
        encoding.bias(1, heads, causal=causal)  # raises where it does not fit
        self._heads = heads

    def arguments(self, q: Tensor, keys: int, layer: Cached | None = None) -> dict[str, Any]:
        if torch.compiler.is_compiling():
            bias, first = biases_named(self._name, self._heads, keys, q)
            return {"q": q, "bias": bias, "bias_first": first}
        found = constant_bias(self.encoding, self._heads, keys, self._causal, wide(q), q.device)
        return {"q": q, **dict(zip(_BIAS, found, strict=True))}


class Learned(AtLeastFloat32, PositionEncoding):
    """What is learned in the score: q_rel.p_delta of a table [S][X][W], or a bias [T][K]."""

    contiguous = True

    def __init__(
        self, encoding: Encoding, head_dim: int, heads: int, causal: bool, **factory: Any
    ) -> None:
        super().__init__(encoding)
        self._head_dim, self._heads, self._causal = head_dim, heads, causal
        dtype = factory.get("dtype") or torch.get_default_dtype()
        factory["dtype"] = torch.float32 if dtype in NARROW else dtype
        initial = _of_head_size(head_dim, self.initial)
        for name, value in initial.items():
            self.register_parameter(name, nn.Parameter(torch.empty(value.shape, **factory)))
        self._names = tuple(initial)
        self.reset_parameters()

    def initial(self) -> dict[str, Tensor]:
        """Initial values of the parameters, float64."""
        found = self.encoding.parameters(self._head_dim, self._heads)
        return {name: torch.from_numpy(value) for name, value in found.items()}

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for name, value in self.initial().items():
                getattr(self, name).copy_(value)

    def forward(self, q: Tensor, keys: int, layer: Cached | None = None) -> dict[str, Any]:
        """`arguments`, as a call that wrappers of modules (of PEFT, say) see."""
        parameters = {name: getattr(self, name) for name in self._names}
        p, first, beyond = self._table(parameters, keys, layer)
        if self.encoding.entry == "bias":
            return {
                "q": q,
                **dict(zip(_BIAS, (p.to(q.device, wide(q)), first, beyond), strict=True)),
            }
        given = {"p": p.to(q.device, q.dtype), "first": first, "beyond": beyond}
        biases = self.encoding.query_biases(parameters)
        if biases is None:
            return {"q": q, **given}
        u, v = (bias[:, None].to(q.device, q.dtype) for bias in biases)
        return {"q": q + u, "q_rel": q + v, **given}

    def arguments(self, q: Tensor, keys: int, layer: Cached | None = None) -> dict[str, Any]:
        return self(q, keys, layer)

    def _table(
        self, parameters: dict[str, Tensor], keys: int, layer: Cached | None
    ) -> tuple[Tensor, int, str]:
        """The table of these parameters, made once for many steps of a generation."""
        of_entry = self.encoding.learned_table
        if self.encoding.entry == "bias":
            of_entry = self.encoding.learned_bias
        learned = functools.partial(of_entry, parameters=parameters, causal=self._causal)
        fixed = layer is not None and not torch.is_grad_enabled()
        if not fixed or any(x.is_inference() for x in parameters.values()):
            return learned(keys)
        assert layer is not None
        capacity = capacity_for(keys)
        state = (capacity, *((x.data_ptr(), version(x)) for x in parameters.values()))
        if layer.table is None or layer.table[0] != state:
            try:
                layer.table = state, learned(capacity)
            except ValueError:  # an encoding of one's own may end between
                return learned(keys)
        return layer.table[1]


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


def check_learned(encoding: Encoding) -> None:
    """ValueError where an encoding learns what no front end can hold."""
    if getattr(encoding, "learned", False) and encoding.entry not in ("relative", "bias"):
        raise ValueError(
            f"{encoding} is learned and {encoding.entry}: only relative encodings and biases can be"
            " learned"
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
    from .rotation import Rotated  # which builds on this module

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
    if encoding.entry == "bias":
        return Bias(encoding, heads, causal)
    return Relative(encoding, head_dim, causal)
