"""The parameters of learned encodings, and the terms that the parts compute from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from ..encodings import Bias, Encoding, Query, Table
from ..encodings.base import Combination
from ..encodings.methods import checked_return, initial_parameters
from ..ops._common import full_precision
from ..ops._torch_private import has_shape, holds, stamps
from .tables import capacity_range


class LearnedTerms(NamedTuple):
    """The terms that a part of an encoding computes from its parameters; None: not learned."""

    table: Table | None = None
    bias: Bias | None = None
    query: Query | None = None
    shared: dict[str, Tensor] | None = None  # parameters for the terms of layers, which have others
    sinks: Tensor | None = None
    parameters: dict[str, Tensor] | None = None  # for `Encoding.score_vectors`
    # from the input of the layer: the queries of the table, and decay and sink of each token
    input_query: Tensor | None = None
    input_decay: Tensor | None = None
    input_sinks: Tensor | None = None


Terms = Mapping[str, LearnedTerms]  # by the name of the part


class KeptTerms(dict[str, LearnedTerms]):
    """Terms that many steps of a generation use, with the arguments that `Scores` computes."""

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self.arguments: dict[Any, Any] = {}


class _Entry(NamedTuple):
    """Terms for `low` < keys <= `high` tokens, and the state of the parameters behind them."""

    low: int
    high: int
    shared: Terms | None
    modules: list[nn.Module]
    stamps: list[object]
    terms: KeptTerms


class LearnedCache:
    """Learned terms of a generation: they are the same in many steps.

    They live no longer than the generation, because a write to `parameter.data` leaves no trace.
    Copies and pickles are empty.
    """

    def __init__(self) -> None:
        self.entries: dict[nn.Module, _Entry] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return LearnedCache, ()

    @staticmethod
    def of(cache: object) -> LearnedCache:
        """Return the learned terms that belong to a cache of keys and values, while it exists."""
        learned = _by_cache.get(cache)
        if learned is None:
            learned = _by_cache[cache] = LearnedCache()
        return learned


_by_cache: WeakKeyDictionary[object, LearnedCache] = WeakKeyDictionary()


class Learned(nn.Module):
    """The parameters of an encoding: of all its parts, or those that layers share, or one layer's.

    A part of a combination is a submodule with the name of the part. The parameters are
    float32 in a model of bfloat16 or float16, because bfloat16 would round away a training step of
    a shift. In a float64 model they are float64.

    `layer` True: the parameters that each layer has for itself. False: those that layers share.
    None: all of them. `causal` tables have distances from 0 on only. `dim` is the size of the
    layer's input, for encodings that read it.
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
        self._learns, self._reads_input = encoding.learns, encoding.reads_input
        self._has_table = "table" in encoding.terms
        self._columns = encoding.table_columns(head_dim)
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
        self._is_complete = bool(initial) and len(initial) == len(self._all_initial())
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
        if encoding.reads_input and not encoding.per_layer:
            raise ValueError(f"'{encoding}' reads the input of each layer and needs per_layer")
        values = self._all_initial()
        for name in encoding.per_layer:
            if name not in values:
                raise ValueError(
                    f"'{encoding}' names {name} in per_layer, but it has {', '.join(values)}"
                )
        return {
            name: torch.from_numpy(np.ascontiguousarray(value, np.float64))
            for name, value in values.items()
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
    ) -> Terms:
        """Return the terms that the parameters here make for `keys` tokens, and those of `shared`.

        It is the module's forward so that wrappers such as PEFT's and FSDP2's see it. It takes no
        queries, because several layers may share this module. FSDP2 sums the gradients of a module
        as soon as backward has left its inputs. With queries it would leave after one layer, and
        drop the gradients of the others.

        For the parameters of a layer, `shared` are the terms of the module that layers share. x
        (B, m, dim) is the input of the layer, for encodings that read it: layers do not share the
        module of such an encoding.
        """
        shared = shared or None
        if self._parts and self._reads_input:
            terms = {} if shared is None else dict(shared)
            for part in self._parts:
                terms[part] = getattr(self, part)(keys, cache, shared, x)[part]
            return terms
        kept = None
        if cache is not None and not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            kept = self._kept(keys, cache, shared)
        terms = self._terms(keys, shared) if kept is None else kept
        if not (self._reads_input and self._names) or self._layer is False:
            return terms
        name = self.encoding.name
        fields: dict[str, Any] = self._from_input(x, self._known(shared))
        return {**terms, name: terms[name]._replace(**fields)}

    def _kept(self, keys: int, cache: LearnedCache, shared: Terms | None) -> KeptTerms | None:
        """Return the terms of a capacity, kept for these parameters; None if it cannot be."""
        entry = cache.entries.get(self)
        modules = list(self.modules()) if entry is None else entry.modules
        parameters: list[Any] = []
        for module in modules:
            parameters += module._parameters.values()
        current = stamps(parameters)
        if current is None:
            return None
        fits = entry is not None and entry.low < keys <= entry.high
        if entry is not None and fits and entry.shared is shared and entry.stamps == current:
            return entry.terms
        low, high = capacity_range(keys)
        try:
            terms = KeptTerms(self._terms(high, shared))
        except ValueError:  # an encoding may have fewer positions than the capacity
            return None
        cache.entries[self] = _Entry(low, high, shared, modules, current, terms)
        return terms

    def _known(self, shared: Terms | None) -> dict[str, Tensor]:
        """Return the parameters here, and those of the same part that layers share."""
        parameters = {}
        for name in self._names:
            parameters[name] = getattr(self, name)
        if not self._is_complete and shared is not None:
            parameters |= shared[self.encoding.name].shared or {}
        return parameters

    def _terms(self, keys: int, shared: Terms | None) -> dict[str, LearnedTerms]:
        """Return the terms of the parameters, without those of the input."""
        terms = {} if shared is None else dict(shared)
        for part in self._parts:
            terms[part] = getattr(self, part)(keys, None, shared)[part]
        if not self._names:
            return terms
        encoding, learns, parameters = self.encoding, self._learns, self._known(shared)
        if not self._is_complete and not self._layer:
            terms[encoding.name] = _lasting(LearnedTerms(shared=parameters))
            return terms
        fields: dict[str, Any] = {}
        if "table" in learns:
            fields["table"] = Table(*self._rows("learned_table", parameters, keys))
        if "bias" in learns:
            fields["bias"] = Bias(*self._rows("learned_bias", parameters, keys))
        if "query" in learns:
            fields["query"] = self._checked(encoding.learned_query(parameters))
        if "sinks" in learns:
            sinks = encoding.learned_sinks(parameters)
            self._check_shape("learned_sinks must return", sinks, (self._heads,))
            fields["sinks"] = sinks
        if "vectors" in learns:
            fields["parameters"] = parameters
        terms[encoding.name] = _lasting(LearnedTerms(**fields))
        return terms

    def _check_shape(self, rule: str, x: Tensor, needed: tuple[int, ...]) -> None:
        """Raise ValueError, with the rule of the encoding, if a tensor has another shape."""
        if x.dim() != len(needed) or not holds(has_shape(x, needed)):
            raise ValueError(f"'{self.encoding}': {rule} {needed}, got {tuple(x.shape)}")

    def _from_input(self, x: Tensor | None, parameters: dict[str, Tensor]) -> dict[str, Any]:
        """Return the terms that the parameters compute from the layer's input."""
        good = x is not None and x.dim() == 3 and x.shape[-1] == self._dim
        if x is None or not (good and x.is_floating_point()):
            got = "none" if x is None else f"{tuple(x.shape)} of {x.dtype}"
            raise ValueError(
                f"'{self.encoding}' reads the input of the attention layer: give x of shape "
                f"(B, tokens, {self._dim}), floating point; got {got}"
            )
        terms, encoding, heads = {}, self.encoding, self._heads
        batch, tokens, _ = x.shape
        needed = {
            "input_query": (batch, heads, tokens, self._columns),
            "input_decay": (batch, heads, tokens),
            "input_sinks": (batch, heads, tokens),
        }
        for name in needed.keys() & self._learns:
            with full_precision(x.device.type):
                terms[name] = getattr(encoding, name)(x, parameters)
            self._check_shape(f"{name} must return", terms[name], needed[name])
        return terms

    def _checked(self, query: Any) -> Query:
        """Return the query; TypeError or ValueError for another type or a wrong shape."""
        if not (isinstance(query, tuple) and len(query) == 3):
            raise TypeError(
                f"'{self.encoding}': learned_query() must return Query(u, v, projection), got "
                f"{type(query).__name__}"
            )
        u, v, projection = query
        vector = (self._heads, self._head_dim)
        for x, needed in ((u, vector), (v, vector), (projection, (*vector, self._columns))):
            if x is not None and tuple(x.shape) != needed:
                name = next(name for name, y in zip(Query._fields, query, strict=True) if y is x)
                self._check_shape(f"learned_query must return {name} of shape", x, needed)
        if not (self._has_table or v is projection is None):
            raise ValueError(
                f"'{self.encoding}': learned_query() returns v or projection, the queries of a "
                "table, and the encoding has no table"
            )
        return Query(u, v, projection)

    def _rows(self, method: str, parameters: dict[str, Tensor], keys: int) -> tuple[Any, int, str]:
        """Return rows, first and beyond of a learned table or bias."""
        # Without autocast, which would round products inside the encoding to bfloat16.
        with full_precision(next(iter(parameters.values())).device.type):
            returned = getattr(self.encoding, method)(keys, parameters, causal=self._causal)
        size = {"heads": self._heads, "head_dim": self._head_dim}
        return checked_return(self.encoding, method, returned, **size)


def _lasting(terms: Any) -> Any:
    """Return terms that outlive the memory of the parameters, which FSDP frees after `forward`."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return terms
    if isinstance(terms, Tensor):
        return terms.clone()
    if isinstance(terms, dict):
        return {name: _lasting(x) for name, x in terms.items()}
    return type(terms)(*map(_lasting, terms)) if isinstance(terms, tuple) else terms


def named_as_in(model_encoding: Encoding, encoding: Encoding) -> Encoding:
    """Return the encoding of a layer, with parameters that are named as those of the model are."""
    if not isinstance(model_encoding, Combination):
        return encoding
    return Combination(tuple((part, None) for part in encoding.parts))


def _is_narrow(dtype: torch.dtype) -> bool:
    """Tell whether a dtype has fewer bits than float32: bfloat16, float16, float8."""
    return dtype.is_floating_point and dtype.itemsize < 4
