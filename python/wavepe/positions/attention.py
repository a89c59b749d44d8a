"""Encodings inside attention: one class for each entry point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..encodings import Encoding
from ..ops._common import full_precision, wide
from ..ops._device_constant import DeviceConstant
from ..ops._torch_private import version
from . import compiled
from .rotation import Frequencies, Rotation, angles
from .tables import capacity_for, constant_bias, constant_table, name_of


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

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | None, layer: Cached | None
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys of the new tokens by their positions.

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
        """Return what `rotate` needs to know of a cache of `length` tokens that others keep."""
        return Cached(length)

    def arguments(self, q: Tensor, keys: int, layer: Cached | None = None) -> dict[str, Any]:
        """Return the queries, and what else `ops.attention` takes for this encoding.

        Parameters
        ----------
        q : Tensor (B, H, m, d)
            What `rotate` returned.
        keys : int
            Number of keys n.
        """
        return {"q": q}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Cached | None = None, **options: Any
    ) -> Tensor:
        """Call `ops.attention` with this encoding: q (B, H, m, d), k and v (B, Hk, n, d)."""
        out: Any = ops.attention(**self.arguments(q, k.shape[2], layer), k=k, v=v, **options)
        return out

    def reset_parameters(self) -> None:
        """Set initial values for what is learned."""

    def extra_repr(self) -> str:
        return str(self.encoding)


class RotaryEncoding(PositionEncoding):
    """Queries and keys that are rotated by their positions [R]."""

    def __init__(self, encoding: Encoding, head_dim: int, trained_length: int | None) -> None:
        super().__init__(encoding)
        try:
            self._rotation = Rotation(encoding, head_dim, trained_length)
        except ValueError as error:
            if trained_length is not None or "trained_length" not in str(error):
                raise
            raise ValueError(f"{error} (max_length of SelfAttention is trained_length)") from None
        pairs = self._rotation.pairs
        if 2 * pairs > head_dim:
            raise ValueError(f"{encoding} rotates {2 * pairs} dims, more than head_dim={head_dim}")

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | None, layer: Cached | None
    ) -> tuple[Tensor, Tensor]:
        start = 0 if layer is None else layer.length
        found = self._rotation.needed(start + k.shape[-2], positions, self.training)
        if layer is not None:
            then = layer.frequencies
            if layer.length and then is not None and then != found:
                raise RuntimeError(
                    f"wavepe: the {layer.length} cached keys were rotated for {then.label}, this "
                    f"call rotates for {found.label}: reset() the cache, and compute the whole "
                    "sequence anew"
                )
            layer.frequencies = found
        cos, sin = angles(found, k, positions, start=start)
        how = {"interleaved": self._rotation.rope.interleaved}
        if q.shape[-2] == k.shape[-2]:
            return ops.rope_qk(q, k, cos, sin, **how)
        last = k.shape[-2] - q.shape[-2]
        q = ops.rope(q, cos[..., last:, :], sin[..., last:, :], **how)
        return q, ops.rope(k, cos, sin, **how)

    def cached(self, length: int) -> Cached:
        layer = super().cached(length)
        layer.frequencies = self._rotation.needed(length, None, self.training)
        return layer


class Slopes(PositionEncoding):
    """-slope_h * abs(delta) in the score [A]."""

    contiguous = True

    def __init__(self, encoding: Encoding, heads: int) -> None:
        super().__init__(encoding)
        # No buffer: casts of the module do not reach it.
        self._slopes = DeviceConstant(encoding.slopes(heads))

    def arguments(self, q: Tensor, keys: int, layer: Cached | None = None) -> dict[str, Any]:
        return {"q": q, "slopes": self._slopes.on(q, wide(q))}


class Constant(PositionEncoding):
    """Constants of the distance in the score: q.p_delta of a table [W][X], or a bias [C]."""

    contiguous = True

    def __init__(self, encoding: Encoding, head_dim: int, heads: int, causal: bool) -> None:
        super().__init__(encoding)
        self._is_bias, self._causal = encoding.entry == "bias", causal
        self._size = heads if self._is_bias else head_dim
        build = encoding.bias if self._is_bias else encoding.table
        build(1, self._size, causal=causal)  # raises where the encoding does not fit
        # An attribute: by the name a compiler tells the graphs of two encodings apart.
        self._name = name_of(encoding)

    def arguments(self, q: Tensor, keys: int, layer: Cached | None = None) -> dict[str, Any]:
        place = (wide(q) if self._is_bias else q.dtype, q.device)
        if torch.compiler.is_compiling():
            first = 0 if self._causal else 1 - keys
            given = (self._name, self._causal, keys, self._size, *place)
            rows = torch.ops.wavepe_nn.constant_rows(*given)
            if self._is_bias:
                return {"q": q, "bias": rows.T, "bias_first": first}
            return {"q": q, "p": rows, "first": first}
        if not self._is_bias:
            return {"q": q, "p": constant_table(keys, self.encoding, self._size, self._causal)}
        bias, first, beyond = constant_bias(keys, self.encoding, self._size, self._causal, *place)
        return {"q": q, "bias": bias, "bias_first": first, "bias_beyond": beyond}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Cached | None = None, **options: Any
    ) -> Tensor:
        if torch.compiler.is_compiling() and q.device.type == "cpu" and not self._is_bias:
            return compiled.attention(q, k, v, self._name, self._causal, **options)
        return super().attend(q, k, v, layer, **options)


def _is_narrow(dtype: torch.dtype) -> bool:
    """Return whether a dtype has fewer bits than float32: bfloat16, float16, float8."""
    return dtype.is_floating_point and dtype.itemsize < 4


class Learned(PositionEncoding):
    """What is learned in the score: q_rel.p_delta of a table [S][X][W], or a bias [T][K].

    Its parameters are float32 in a model of bfloat16 or float16: a step of training is smaller than
    bfloat16's distance between a shift and its neighbour. In a float64 model they are float64.
    """

    contiguous = True

    def __init__(
        self, encoding: Encoding, head_dim: int, heads: int, causal: bool, **factory: Any
    ) -> None:
        super().__init__(encoding)
        self._head_dim, self._heads, self._causal = head_dim, heads, causal
        dtype = factory.get("dtype") or torch.get_default_dtype()
        factory["dtype"] = torch.float32 if _is_narrow(dtype) else dtype
        initial = self.initial()
        for name, value in initial.items():
            self.register_parameter(name, nn.Parameter(torch.empty(value.shape, **factory)))
        self._names = tuple(initial)
        self.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def kept(tensor: Tensor) -> Tensor:
            given = fn(tensor)
            return tensor.to(given.device) if _is_narrow(given.dtype) else given

        return super()._apply(kept, recurse)

    def initial(self) -> dict[str, Tensor]:
        """Return initial values of the parameters, float64."""
        found = self.encoding.parameters(self._head_dim, self._heads)
        return {name: torch.from_numpy(value) for name, value in found.items()}

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for name, value in self.initial().items():
                getattr(self, name).copy_(value)

    def forward(self, q: Tensor, keys: int, layer: Cached | None = None) -> dict[str, Any]:
        """Return `arguments`, by a call that wrappers of modules (of PEFT, say) see."""
        parameters = {name: getattr(self, name) for name in self._names}
        p, first, beyond = self._table(parameters, keys, layer)
        if self.encoding.entry == "bias":
            bias = p.to(q.device, wide(q))
            return {"q": q, "bias": bias, "bias_first": first, "bias_beyond": beyond}
        given = {"q": q, "p": p.to(q.device, q.dtype), "first": first, "beyond": beyond}
        biases = self.encoding.query_biases(parameters)
        if biases is not None:
            u, v = (bias[:, None].to(q.device, q.dtype) for bias in biases)
            given |= {"q": q + u, "q_rel": q + v}
        return given

    def arguments(self, q: Tensor, keys: int, layer: Cached | None = None) -> dict[str, Any]:
        return self(q, keys, layer)

    def _table(
        self, parameters: dict[str, Tensor], keys: int, layer: Cached | None
    ) -> tuple[Tensor, int, str]:
        """Return the table of these parameters, computed once for many steps of a generation."""
        # No compiler reads `is_inference`, so it comes last; such a tensor has no version.
        fixed = layer is not None and not torch.is_grad_enabled()
        if not fixed or any(x.is_inference() for x in parameters.values()):
            return self._learned(keys, parameters)
        assert layer is not None
        capacity = capacity_for(keys)
        state = (capacity, *((x.data_ptr(), version(x)) for x in parameters.values()))
        if layer.table is None or layer.table[0] != state:
            try:
                layer.table = state, self._learned(capacity, parameters)
            except ValueError:  # an encoding may end before the capacity
                return self._learned(keys, parameters)
        return layer.table[1]

    def _learned(self, keys: int, parameters: dict[str, Tensor]) -> tuple[Tensor, int, str]:
        encoding = self.encoding
        learned = encoding.learned_bias if encoding.entry == "bias" else encoding.learned_table
        # Autocast would round the products of an encoding's own layers to bfloat16.
        with full_precision(next(iter(parameters.values())).device.type):
            return learned(keys, parameters, causal=self._causal)


def check_learned(encoding: Encoding) -> None:
    """Raise ValueError where an encoding learns what no front end can hold."""
    if encoding.learned and encoding.entry not in ("relative", "bias"):
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
    """Return the module of an encoding.

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
        return RotaryEncoding(encoding, head_dim, max_length)
    if encoding.entry == "slope":
        return Slopes(encoding, heads)
    if encoding.entry == "none":
        return PositionEncoding(encoding)
    if encoding.learned:
        return Learned(encoding, head_dim, heads, causal, **factory)
    return Constant(encoding, head_dim, heads, causal)
