"""Encodings in attention: one class for each entry point."""

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


class CacheState:
    """The facts about the tokens in a cache that an encoding needs.

    Attributes
    ----------
    length : int
        The number of tokens.
    frequencies : Frequencies or None
        The frequencies that rotated the cached keys.
    table : (version, table) or None
        The table of a learned encoding, and the version of the parameters that it belongs to.
    """

    def __init__(self, length: int = 0) -> None:
        self.length = length
        self.frequencies: Frequencies | None = None
        self.table: tuple[tuple, tuple[Tensor, int, str]] | None = None


class PositionEncoding(nn.Module):
    """An encoding as a module that acts in attention.

    This base class does nothing to q, k and scores. It serves the encoding "none".

    Attributes
    ----------
    encoding : Encoding
    contiguous : bool
        Whether positions must be contiguous, because distances are counted in tokens (a class
        attribute).
    """

    contiguous = False

    def __init__(self, encoding: Encoding) -> None:
        super().__init__()
        self.encoding = encoding

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | None, state: CacheState | None
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys of the new tokens by their positions.

        Parameters
        ----------
        q, k : Tensor (B, H, m, d), (B, Hk, L, d)
            The queries belong to the last m of the L tokens.
        positions : int64 Tensor (B|1, L), optional
            None counts on from the tokens in the cache.
        state : CacheState, optional
            The state of the cache, which holds the tokens before these.
        """
        return q, k

    def cache_state(self, length: int) -> CacheState:
        """Return the state of a cache of `length` tokens that another module keeps."""
        return CacheState(length)

    def arguments(self, q: Tensor, keys: int, state: CacheState | None = None) -> dict[str, Any]:
        """Return the arguments of `ops.attention` that this encoding sets, queries included.

        Parameters
        ----------
        q : Tensor (B, H, m, d)
            The queries that `rotate` returned.
        keys : int
            The number of keys n.
        state : CacheState, optional
            The state of the cache.
        """
        return {"q": q}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: CacheState | None = None, **options: Any
    ) -> Tensor:
        """Call `ops.attention` with this encoding: q (B, H, m, d), k and v (B, Hk, n, d)."""
        out: Any = ops.attention(**self.arguments(q, k.shape[2], state), k=k, v=v, **options)
        return out

    def reset_parameters(self) -> None:
        """Set the parameters, if any, to their initial values."""

    def extra_repr(self) -> str:
        return str(self.encoding)


class RotaryEncoding(PositionEncoding):
    """Rotate queries and keys by their positions [R]."""

    def __init__(self, encoding: Encoding, head_dim: int, trained_length: int | None) -> None:
        super().__init__(encoding)
        try:
            self._rotation = Rotation(encoding, head_dim, trained_length)
        except ValueError as error:
            if trained_length is not None or "trained_length" not in str(error):
                raise
            raise ValueError(f"{error} (SelfAttention calls it max_length)") from None
        pairs = self._rotation.pairs
        if 2 * pairs > head_dim:
            raise ValueError(f"{encoding} rotates {2 * pairs} dims, more than head_dim={head_dim}")

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | None, state: CacheState | None
    ) -> tuple[Tensor, Tensor]:
        start = 0 if state is None else state.length
        current = self._rotation.needed(start + k.shape[-2], positions, self.training)
        if state is not None:
            before = state.frequencies
            if state.length and before is not None and before != current:
                raise RuntimeError(
                    f"wavepe: the {state.length} cached keys were rotated for {before.label}, but "
                    f"this call rotates for {current.label}: reset() the cache, and compute the "
                    "whole sequence again"
                )
            state.frequencies = current
        cos, sin = angles(current, k, positions, start=start)
        interleaved = self._rotation.rope.interleaved
        if q.shape[-2] == k.shape[-2]:
            return ops.rope_qk(q, k, cos, sin, interleaved=interleaved)
        last = k.shape[-2] - q.shape[-2]
        q = ops.rope(q, cos[..., last:, :], sin[..., last:, :], interleaved=interleaved)
        return q, ops.rope(k, cos, sin, interleaved=interleaved)

    def cache_state(self, length: int) -> CacheState:
        state = super().cache_state(length)
        state.frequencies = self._rotation.needed(length, None, self.training)
        return state


class Slopes(PositionEncoding):
    """Subtract slope_h * abs(delta) from the score [A]."""

    contiguous = True

    def __init__(self, encoding: Encoding, heads: int) -> None:
        super().__init__(encoding)
        # Not a buffer, so that casts of the module do not reach it.
        self._slopes = DeviceConstant(encoding.slopes(heads))

    def arguments(self, q: Tensor, keys: int, state: CacheState | None = None) -> dict[str, Any]:
        return {"q": q, "slopes": self._slopes.on(q, wide(q))}


class Constant(PositionEncoding):
    """Add constants of the distance to the score: q.p_delta of a table [W][X], or a bias [C]."""

    contiguous = True

    def __init__(self, encoding: Encoding, head_dim: int, heads: int, causal: bool) -> None:
        super().__init__(encoding)
        self._is_bias, self._causal = encoding.entry == "bias", causal
        self._size = heads if self._is_bias else head_dim
        build = encoding.bias if self._is_bias else encoding.table
        build(1, self._size, causal=causal)  # raises where the encoding does not fit
        # The attribute is a guard of a compiler's graph, so that each encoding gets its own graph.
        self._name = name_of(encoding)

    def arguments(self, q: Tensor, keys: int, state: CacheState | None = None) -> dict[str, Any]:
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
        self, q: Tensor, k: Tensor, v: Tensor, state: CacheState | None = None, **options: Any
    ) -> Tensor:
        if torch.compiler.is_compiling() and q.device.type == "cpu" and not self._is_bias:
            return compiled.attention(q, k, v, self._name, self._causal, **options)
        return super().attend(q, k, v, state, **options)


def _is_narrow(dtype: torch.dtype) -> bool:
    """Tell whether a dtype has fewer bits than float32: bfloat16, float16, float8."""
    return dtype.is_floating_point and dtype.itemsize < 4


class Learned(PositionEncoding):
    """Add a learned term to the score: q_rel.p_delta of a table [S][X][W], or a bias [T][K].

    The parameters are float32 in a model of bfloat16 or float16, because bfloat16 would round away
    a training step of a shift. In a float64 model they are float64.
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
        def without_narrow_casts(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return tensor.to(result.device) if _is_narrow(result.dtype) else result

        return super()._apply(without_narrow_casts, recurse)

    def initial(self) -> dict[str, Tensor]:
        """Return the initial values of the parameters, float64."""
        found = self.encoding.parameters(self._head_dim, self._heads)
        return {name: torch.from_numpy(value) for name, value in found.items()}

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for name, value in self.initial().items():
                getattr(self, name).copy_(value)

    def forward(self, keys: int, state: CacheState | None = None) -> dict[str, Any]:
        """Return what the parameters give to `learned_arguments`.

        It is the module's forward so that wrappers such as PEFT's and FSDP2's see it. It takes no
        queries, because several layers may share this module. FSDP2 sums the gradients of a module
        as soon as backward has left its inputs. With queries it would leave after one layer, and
        drop the gradients of the others.
        """
        parameters = {name: getattr(self, name) for name in self._names}
        p, first, beyond = self._table(parameters, keys, state)
        if self.encoding.entry == "bias":
            return {"bias": p, "bias_first": first, "bias_beyond": beyond}
        given = {"p": p, "first": first, "beyond": beyond}
        biases = self.encoding.query_biases(parameters)
        if biases is None:
            return given
        u, v = biases
        return given | {"query_biases": (u.clone(), v.clone())}  # see _learned

    def arguments(self, q: Tensor, keys: int, state: CacheState | None = None) -> dict[str, Any]:
        return learned_arguments(self, q, keys, state)

    def _table(
        self, parameters: dict[str, Tensor], keys: int, state: CacheState | None
    ) -> tuple[Tensor, int, str]:
        """Return the table of these parameters, computed once for many steps of a generation."""
        # A compiler cannot trace `is_inference`, so it comes last. Inference tensors have no
        # version.
        generating = state is not None and not torch.is_grad_enabled()
        if not generating or any(x.is_inference() for x in parameters.values()):
            return self._learned(keys, parameters)
        assert state is not None
        capacity = capacity_for(keys)
        current = (capacity, *((x.data_ptr(), version(x)) for x in parameters.values()))
        if state.table is None or state.table[0] != current:
            try:
                state.table = current, self._learned(capacity, parameters)
            except ValueError:  # an encoding may have fewer positions than the capacity
                return self._learned(keys, parameters)
        return state.table[1]

    def _learned(self, keys: int, parameters: dict[str, Tensor]) -> tuple[Tensor, int, str]:
        encoding = self.encoding
        learned = encoding.learned_bias if encoding.entry == "bias" else encoding.learned_table
        # Without autocast, which would round products inside the encoding to bfloat16.
        with full_precision(next(iter(parameters.values())).device.type):
            p, first, beyond = learned(keys, parameters, causal=self._causal)
        # An encoding may return a parameter, whose memory FSDP2 frees after `forward`.
        return p.clone(), first, beyond


def learned_arguments(
    module: nn.Module, q: Tensor, keys: int, state: CacheState | None = None
) -> dict[str, Any]:
    """Return `PositionEncoding.arguments` of a `Learned`, or of a wrapper of one."""
    given = dict(module(keys, state))
    if "bias" in given:
        return given | {"q": q, "bias": given["bias"].to(q.device, wide(q))}
    given |= {"q": q, "p": given["p"].to(q.device, q.dtype)}
    biases = given.pop("query_biases", None)
    if biases is None:
        return given
    u, v = (bias[:, None].to(q.device, q.dtype) for bias in biases)
    return given | {"q": q + u, "q_rel": q + v}


def check_learned(encoding: Encoding) -> None:
    """Raise ValueError if a learned encoding has an entry point that cannot be learned."""
    if encoding.learned and encoding.entry not in ("relative", "bias"):
        raise ValueError(
            f"a learned encoding must have the entry point 'relative' or 'bias', got {encoding} "
            f"with {encoding.entry!r}"
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
    """Return the module that applies an encoding in attention.

    Raises
    ------
    ValueError
        If the encoding is absolute, does not fit the head size, or needs `max_length`.
    """
    if encoding.entry == "absolute":
        raise ValueError(
            f"the encoding '{encoding}' is absolute: add its vectors to the token embeddings with "
            "wavepe.nn.AbsoluteEncoding, and give attention layers encoding='none'"
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
