"""Parameters of learned encodings, and what the parts of an encoding make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..encodings import Bias, Encoding, Query, Table
from ..encodings.base import Combination
from ..encodings.methods import checked_return, initial_parameters
from ..ops._common import full_precision
from ..ops._torch_private import version
from .tables import capacity_for


class LearnedTerms(NamedTuple):
    """What one part of an encoding makes of its parameters; None for what it does not learn.

    Where a layer has some of the parameters for itself, `shared` holds the others, and the layer
    makes the terms. The last two come from the input of the layer: the queries of the table, and
    the decay of each token. `parameters` are for `Encoding.score_vectors`.
    """

    table: Table | None = None
    bias: Bias | None = None
    query: Query | None = None
    shared: dict[str, Tensor] | None = None
    sinks: Tensor | None = None
    parameters: dict[str, Tensor] | None = None
    input_query: Tensor | None = None
    input_decay: Tensor | None = None


Terms = Mapping[str, LearnedTerms]  # the name of a part -> what it has learned


class LearnedCache:
    """Tables and biases of a generation: they are the same in many steps."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[tuple, Any]] = {}


class Learned(nn.Module):
    """The parameters of an encoding: of all its parts, or those that layers share, or one layer's.

    A part of a combination is a submodule with the name of the part. The parameters are
    float32 in a model of bfloat16 or float16, because bfloat16 would round away a training step of
    a shift. In a float64 model they are float64.

    Parameters
    ----------
    encoding : Encoding
    head_dim, heads : int
    causal : bool
        Whether tables have distances from 0 on only.
    layer : bool, optional
        True: the parameters that each layer has for itself. False: those that layers share. None:
        all of them.
    dim : int, optional
        Size of the layer's input, for encodings that read it.
    device, dtype : optional
        Of the parameters.
    """

    def __init__(
        self,
        encoding: Encoding,
        head_dim: int,
        heads: int,
        causal: bool,
        *,
        layer: bool | None = None,
        dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.encoding = encoding
        self._head_dim, self._heads, self._causal, self._layer = head_dim, heads, causal, layer
        self._dim = dim
        self._reads, self._has_table = encoding.learns, "table" in encoding.terms
        self._parts: list[str] = []  # of a combination: those that have parameters here
        if isinstance(encoding, Combination):
            for part in encoding.parts:
                place: dict[str, Any] = {"dim": dim, "device": device, "dtype": dtype}
                learned = Learned(part, head_dim, heads, causal, layer=layer, **place)
                if learned.has_parameters:
                    if hasattr(self, part.name):
                        raise ValueError(f"a learned part cannot be called {part.name!r}")
                    self._parts.append(part.name)
                    self.add_module(part.name, learned)
        dtype = dtype or torch.get_default_dtype()
        dtype = torch.float32 if _is_narrow(dtype) else dtype
        initial = self.initial()
        for name, value in initial.items():
            if hasattr(nn.Module, name) or hasattr(self, name):
                raise ValueError(f"'{encoding}': a parameter cannot be called {name!r}")
            empty = torch.empty(value.shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))
        self._names = tuple(initial)
        self._whole = bool(initial) and len(initial) == len(self._all_initial())
        self.reset_parameters()

    @property
    def has_parameters(self) -> bool:
        """Whether anything is learned here."""
        return bool(self._names or self._parts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def without_narrow_casts(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return tensor.to(result.device) if _is_narrow(result.dtype) else result

        return super()._apply(without_narrow_casts, recurse)

    def initial(self) -> dict[str, Tensor]:
        """Return the initial values of the parameters of this module itself, float64."""
        encoding = self.encoding
        if isinstance(encoding, Combination) or not encoding.learns:
            return {}
        found = self._all_initial()
        for name in encoding.per_layer:
            if name not in found:
                raise ValueError(
                    f"'{encoding}' names {name} in per_layer, but it has {', '.join(found)}"
                )
        return {
            name: torch.from_numpy(np.ascontiguousarray(value, np.float64))
            for name, value in found.items()
            if self._layer is None or self._layer == (name in encoding.per_layer)
        }

    def _all_initial(self) -> dict[str, np.ndarray]:
        return initial_parameters(self.encoding, self._head_dim, self._heads, self._dim)

    def reset_parameters(self) -> None:
        """Set the parameters, if any, to their initial values."""
        for name in self._parts:
            part: Any = getattr(self, name)
            part.reset_parameters()
        self.reset_own()

    @torch.no_grad()
    def reset_own(self) -> None:
        """Set the parameters of this module, but not those of its parts."""
        for name, value in self.initial().items():
            getattr(self, name).copy_(value)

    def forward(
        self,
        keys: int,
        cache: LearnedCache | None = None,
        shared: Terms | None = None,
        x: Tensor | None = None,
    ) -> dict[str, LearnedTerms]:
        """Return what the parts make of the parameters here, for `keys` tokens.

        It is the module's forward so that wrappers such as PEFT's and FSDP2's see it. It takes no
        queries, because several layers may share this module. FSDP2 sums the gradients of a module
        as soon as backward has left its inputs. With queries it would leave after one layer, and
        drop the gradients of the others.

        Parameters
        ----------
        keys : int
            The number of tokens.
        cache : LearnedCache, optional
            Of a generation.
        shared : mapping of str to LearnedTerms, optional
            For the parameters of a layer: what the module of those that layers share has returned.
        x : Tensor (B, m, dim), optional
            The input of the layer, for encodings that read it. Layers do not share their module.
        """
        found: dict[str, LearnedTerms] = {}
        for part in self._parts:
            found |= getattr(self, part)(keys, cache, shared, x)
        if not self._names:
            return found
        encoding, reads = self.encoding, self._reads
        parameters = {name: getattr(self, name) for name in self._names}
        if not self._whole and not self._layer:
            copies = {name: x.clone() for name, x in parameters.items()}  # as below
            return found | {encoding.name: LearnedTerms(shared=copies)}
        if not self._whole and shared is not None:
            parameters |= shared[encoding.name].shared or {}
        table = bias = query = None
        if "table" in reads:
            table = Table(*self._kept("learned_table", parameters, keys, cache))
        if "bias" in reads:
            bias = Bias(*self._kept("learned_bias", parameters, keys, cache))
        if "query" in reads:
            # Copies, because FSDP2 frees the memory of parameters after this function.
            asked = self._checked(encoding.learned_query(parameters))
            query = Query(*(y if y is None else y.clone() for y in asked))
        more: dict[str, Any] = {}
        if "sinks" in reads:
            sinks = encoding.learned_sinks(parameters)
            self._check_shape("learned_sinks must return", sinks, (self._heads,))
            more["sinks"] = sinks.clone()
        if "vectors" in reads:
            more["parameters"] = {name: y.clone() for name, y in parameters.items()}
        if encoding.reads_input:
            more |= self._from_input(x, parameters)
        found[encoding.name] = LearnedTerms(table, bias, query, **more)
        return found

    def _check_shape(self, says: str, found: Tensor, needed: tuple[int, ...]) -> None:
        """Raise ValueError, with what the encoding must do, if a tensor has another shape."""
        if tuple(found.shape) != needed:
            raise ValueError(f"'{self.encoding}': {says} {needed}, got {tuple(found.shape)}")

    def _from_input(self, x: Tensor | None, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what the parameters make of the layer's input."""
        good = x is not None and x.dim() == 3 and x.shape[-1] == self._dim
        if x is None or not (good and x.is_floating_point()):
            given = "none" if x is None else f"{tuple(x.shape)} of {x.dtype}"
            raise ValueError(
                f"'{self.encoding}' reads the input of the attention layer: give x of shape "
                f"(B, tokens, {self._dim}), floating point; got {given}"
            )
        found, encoding, heads = {}, self.encoding, self._heads
        batch, tokens, _ = x.shape
        columns = encoding.table_columns(self._head_dim)
        needed = {
            "input_query": (batch, heads, tokens, columns),
            "input_decay": (batch, heads, tokens),
        }
        for name in needed.keys() & self._reads:
            with full_precision(x.device.type):
                found[name] = getattr(encoding, name)(x, parameters)
            self._check_shape(f"{name} must return", found[name], needed[name])
        return found

    def _checked(self, query: Any) -> Query:
        """Return the query; TypeError or ValueError if it is none, or a shape is wrong."""
        heads, head_dim = self._heads, self._head_dim
        if not (isinstance(query, tuple) and len(query) == 3):
            raise TypeError(
                f"'{self.encoding}': learned_query() must return Query(u, v, projection), got "
                f"{type(query).__name__}"
            )
        for name, x in zip(Query._fields, query, strict=True):
            needed: tuple[int, ...] = (heads, head_dim)
            if name == "projection":
                needed += (self.encoding.table_columns(head_dim),)
            if x is not None:
                self._check_shape(f"learned_query must return {name} of shape", x, needed)
        query = Query(*query)
        asks_table = query.v is not None or query.projection is not None
        if asks_table and not self._has_table:
            raise ValueError(
                f"'{self.encoding}': learned_query() returns v or projection, the queries of a "
                "table, and the encoding has no table"
            )
        return query

    def _kept(
        self,
        method: str,
        parameters: dict[str, Tensor],
        keys: int,
        cache: LearnedCache | None,
    ) -> Any:
        """Return what a method makes of these parameters, computed once for many steps."""

        def compute(keys: int) -> Any:
            # Without autocast, which would round products inside the encoding to bfloat16.
            with full_precision(next(iter(parameters.values())).device.type):
                found = getattr(self.encoding, method)(keys, parameters, causal=self._causal)
                size = {"heads": self._heads, "head_dim": self._head_dim}
                rows, first, beyond = checked_return(self.encoding, method, found, **size)
            # An encoding may return a parameter, whose memory FSDP2 frees after `forward`.
            return rows.clone(), first, beyond

        # A compiler cannot trace `is_inference`, so it comes last. Inference tensors have no
        # version.
        generating = cache is not None and not torch.is_grad_enabled()
        if not generating or any(x.is_inference() for x in parameters.values()):
            return compute(keys)
        assert cache is not None
        capacity = capacity_for(keys)
        current = (capacity, *((x.data_ptr(), version(x)) for x in parameters.values()))
        key = f"{self.encoding.name} {method}"
        if key not in cache.found or cache.found[key][0] != current:
            try:
                cache.found[key] = current, compute(capacity)
            except ValueError:  # an encoding may have fewer positions than the capacity
                return compute(keys)
        return cache.found[key][1]


def named_as_in(whole: Encoding, one: Encoding) -> Encoding:
    """Return the encoding of a layer, with parameters that are named as those of the model are."""
    if not isinstance(whole, Combination):
        return one
    return Combination(tuple((part, None) for part in one.parts))


def _is_narrow(dtype: torch.dtype) -> bool:
    """Tell whether a dtype has fewer bits than float32: bfloat16, float16, float8."""
    return dtype.is_floating_point and dtype.itemsize < 4
