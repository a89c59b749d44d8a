"""The terms that an encoding adds to the scores: tables that queries read, slopes and biases."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..arrays.wavelet_registered import registrations
from ..encodings import Bias, Encoding, Query, Table
from ..encodings.base import combine
from ..encodings.methods import Methods, checked_return
from ..ops._attention_gpu import missing_kernel
from ..ops._attention_in_graph import attention_of_encoding
from ..ops._common import wide
from ..ops._compiler import is_compiling, wants_standard
from ..ops._device_constant import DeviceConstant
from ..ops._relative_table import RelativeTable
from ..ops._scores import default_scale, rows_at
from ..ops._torch_private import under_transforms
from .decay import as_columns, from_columns, with_sums
from .learned import LearnedTerms, Terms
from .requests import Requests
from .rotation import Rotated
from .self_extend import SelfExtend
from .tables import capacity_range, constant_bias, constant_table, graph_rows, name_of, table_on
from .tokens import LAST_QUERIES, TokenIndices

NOTHING = LearnedTerms()


class _Constant(NamedTuple):
    """The sum of constant tables or biases of some parts."""

    encoding: Encoding
    name: str  # a compiler guards it, so that each encoding has its own graph
    query: str = ""  # the part that learns the query of the table

    @classmethod
    def of(cls, parts: list[Encoding], query: str = "") -> _Constant:
        encoding = combine([(part, None) for part in parts])
        return cls(encoding, name_of(encoding), query)


class _Terms(NamedTuple):
    """The terms of one device and dtype, as far as they do not depend on the queries."""

    arguments: dict[str, Any]  # of `ops.attention`
    shift: Tensor | None  # the vector (H, 1, d) that is added to the queries for the keys
    query: Query | None  # how the queries read the only table: v (H, 1, d) and the projection
    joined: list[tuple[Any, Query | None]]  # tables that become columns of one table
    from_input: list[tuple[Any, Tensor]]  # tables that the input reads, with their queries
    sinks: list[Tensor]  # each (H,)
    # The terms serve low < keys <= high, until another registration.
    low: int = 0
    high: int = 0
    definitions: int = 0


class Scores:
    """The terms that an encoding adds to the scores.

    Constant tables that queries read as they are become one table, and constant biases one bias.
    """

    def __init__(
        self,
        encoding: Encoding,
        head_dim: int,
        heads: int,
        causal: bool,
        rotated_dims: int | None = None,
    ) -> None:
        self.encoding = encoding  # of one layer
        self._head_dim, self.heads, self._causal = head_dim, heads, causal
        self._rotated_dims = rotated_dims or head_dim  # the first of each head
        parts = encoding.parts
        self._learning = [part.name for part in parts if part.learns]
        self._vectors = next((part for part in parts if part.has_vectors), None)
        decays = [part.name for part in parts if "input_decay" in part.learns]
        if len(decays) > 1:
            raise ValueError(f"'{encoding}': {' and '.join(decays)} both decay: keep one of them")
        if decays and not causal:
            raise ValueError(f"'{encoding}' needs causal attention: give causal=True")
        self.has_decay = bool(decays)  # whether `with_decay` adds columns
        extends = getattr(encoding.rotary, "self_extend", None) is not None
        # the two calls of attention that replace one, outside training
        self.extended = SelfExtend(encoding, self._rotated_dims, causal) if extends else None
        self._has_token_sinks = "input_sinks" in encoding.learns
        self._has_temperature, self._window = encoding.has_temperature, encoding.window
        self._input_temperatures = {x.name: t for x in parts if (t := x.input_temperature)}
        # whether positions matter, and not their differences alone
        self.reads_positions = extends or self._has_temperature or bool(self._input_temperatures)
        constant = {
            term: [part for part in parts if term in part.terms and term not in part.learns]
            for term in ("table", "slopes", "bias")
        }
        queries = {"query", "input_query"}
        reading = [part for part in constant["table"] if queries & set(part.learns)]
        plain = [part for part in constant["table"] if part not in reading]
        self._tables = [_Constant.of(plain)] if plain else []
        self._tables += [_Constant.of([part], query=part.name) for part in reading]
        self._bias = _Constant.of(constant["bias"]) if constant["bias"] else None
        # Not a buffer of a module, so that casts do not reach it.
        slopes = [_slopes(part, heads) for part in constant["slopes"]]
        self._slopes = DeviceConstant(reduce(add, slopes)) if slopes else None
        # Terms are kept where none is computed for the keys of one step.
        tables = len(self._tables) + sum("table" in part.learns for part in parts)
        biases = bool(constant["bias"]) + sum("bias" in part.learns for part in parts)
        self._lasts = tables <= 1 and biases <= 1 and not encoding.reads_input
        self._changes_vectors = self.has_decay or self._vectors is not None
        self._kept: dict[Any, _Terms] = {}
        for term, size in (("table", head_dim), ("bias", heads)):
            for part in constant[term]:  # raises where the encoding does not fit
                returned = getattr(part, term)(1, size, causal=causal)
                checked_return(part, term, returned, heads=heads, head_dim=head_dim)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def arguments(
        self,
        q: Tensor,
        k: Tensor,
        learned: Terms,
        rotated: Rotated | None = None,
        scale: float | None = None,
        indices: TokenIndices = LAST_QUERIES,
        sinks: Tensor | None = None,
        named: bool = False,
    ) -> dict[str, Any]:
        """Return the arguments of `ops.attention` that the encoding sets, with queries and keys.

        q (B, H, m, d) and k (B, Hk, n, d) are rotated if `rotated` is given. With a decay from the
        input, `with_decay` has added columns to the keys. `sinks` (H,) are those of the layer
        itself. `named` gives a single constant table by the arguments "name" and "one_sided" of
        `attention_of_encoding`.
        """
        if self._changes_vectors and q.dtype == torch.float16:  # it does not reach far enough
            q, k = q.float(), k.float()
        requests = indices.requests
        keys = k.shape[2] if requests is None else requests.longest
        keys = max(keys, 1)  # tables of no token have no range
        for name, temperature in self._input_temperatures.items():
            r: Any = learned[name].input_query
            r = r[:, :, r.shape[2] - q.shape[2] :]
            r = (r * _factors(temperature, q, k, indices).to(r.device)).to(r.dtype)
            learned = {**learned, name: learned[name]._replace(input_query=r)}
        terms = self._terms(q, keys, learned, scale, named)
        kernel_args = {**terms.arguments, "q": q, "k": k}
        if terms.shift is not None:
            shift = terms.shift if rotated is None else rotated.rotate(terms.shift[None])
            kernel_args["q"] = q + shift
        has_table = "p" in kernel_args or "name" in kernel_args
        changed = terms.shift is not None or terms.query is not None or rotated is not None
        if terms.joined or (has_table and changed):
            unrotated_q = q if rotated is None else rotated.unrotate(q)
            if has_table:
                kernel_args["q_rel"] = table_queries(unrotated_q, terms.query)
        joined = terms.from_input
        if terms.joined:
            joined = joined + [(p, table_queries(unrotated_q, query)) for p, query in terms.joined]
        if joined:
            self._join(kernel_args, joined, q, keys)
        if terms.sinks or sinks is not None:  # several weigh as much as their sum
            all_sinks = terms.sinks if sinks is None else [sinks, *terms.sinks]
            converted = (x.to(q.device, wide(q)) for x in all_sinks)
            kernel_args["sinks"] = reduce(torch.logaddexp, converted)
        if self._changes_vectors or self._has_temperature:
            factor = default_scale(q) if scale is None else scale
            self._change_vectors(kernel_args, learned, factor, indices)
        return kernel_args

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        learned: Terms,
        rotated: Rotated | None = None,
        positions: Tensor | None = None,
        training: bool = False,
        requests: Requests | None = None,
        *,
        scale: float | None = None,
        sinks: Tensor | None = None,
        token_sinks: Tensor | None = None,
        window: int | None = None,
        **options: Any,
    ) -> Any:
        """Call `ops.attention` with this encoding; `positions` (B|1, m) are of queries."""
        if self._has_token_sinks:
            token_sinks = self.token_sinks(learned, token_sinks)
        indices, named = LAST_QUERIES, False
        if self._changes_vectors or self.reads_positions or requests is not None:
            mask = options.get("key_mask")
            indices = TokenIndices(options.get("offset"), positions, mask, requests)
        if torch.compiler.is_compiling() and is_compiling() and self._tables and requests is None:
            columns = self._tables[0].encoding.table_columns(self._head_dim)
            named = q.is_cpu or not missing_kernel(q, v, None, columns)
            named = named and not self._changes_vectors and token_sinks is None
            named = named and not (wants_standard() or under_transforms())
        if self._window is not None:
            window = self.window(window)
        kernel_args = self.arguments(q, k, learned, rotated, scale, indices, sinks, named)
        options = {"scale": scale, "window": window, **options, **kernel_args}
        out: Any = None
        if self.extended is not None and not training:
            assert rotated is not None
            queries, keys = indices.absolute(q, k)
            extend, interleaved = self.extended.attend, rotated.interleaved
            options["v"] = v
            if requests is None:
                out, lse = extend(options, queries, keys, interleaved)
            else:
                each = zip(requests.split(options), requests.slices, strict=True)
                outs = [extend(x, queries[:, a], keys[:, b], interleaved) for x, (a, b) in each]
                out, lse = (torch.cat(x, 2) for x in zip(*outs, strict=True))
        else:
            if requests is not None:
                options |= requests.ends
            if "name" in kernel_args:
                return attention_of_encoding(v=v, **options)
            v = v.to(kernel_args["q"].dtype)
            out = ops.attention(v=v, return_lse=token_sinks is not None, **options)
            if token_sinks is None:
                return out.to(q.dtype)
            out, lse = out
        if token_sinks is not None:
            out = out * left_by(token_sinks, lse)
        return out.to(q.dtype)

    def token_sinks(self, learned: Terms, of_model: Tensor | None = None) -> Tensor | None:
        """Return the sinks (B, H, m) of the tokens: the model's own and those of the encoding."""
        of_parts = (x.input_sinks for x in learned.values())
        all_sinks = [x for x in (of_model, *of_parts) if x is not None]
        return reduce(torch.logaddexp, all_sinks) if all_sinks else None

    def window(self, window: int | None) -> int | None:
        """Return the smaller of a layer's window and the encoding's."""
        if window is None or self._window is None:
            return self._window if window is None else window
        return torch.sym_min(window, self._window)

    def _terms(
        self, q: Tensor, keys: int, learned: Terms, scale: float | None, named: bool
    ) -> _Terms:
        """Return the terms for queries like q, kept if they serve many calls."""
        kept = getattr(learned, "arguments", None) if learned else self._kept
        real = type(q) is Tensor and not torch.compiler.is_compiling()  # and no tracer's
        if kept is None or not (self._lasts and real):
            return self._computed(q, keys, learned, scale, named)
        key = (self, q.dtype, q.device)
        terms = kept.get(key)
        fits = terms is not None and terms.low < keys <= terms.high
        definitions = registrations()  # before: another thread may register meanwhile
        if terms is not None and fits and terms.definitions == definitions:
            return terms
        low, high = capacity_range(keys)
        try:
            terms = self._computed(q, high, learned, scale, named)
        except ValueError:  # an encoding may have fewer positions than the capacity
            return self._computed(q, keys, learned, scale, named)
        terms = terms._replace(low=low, high=high, definitions=definitions)
        kept[key] = terms
        return terms

    def _computed(
        self, q: Tensor, keys: int, learned: Terms, scale: float | None, named: bool
    ) -> _Terms:
        u, sinks = None, []
        tables: list[tuple[Any, LearnedTerms]] = []
        biases: list[Bias] = []
        for constant in self._tables:
            tables.append((constant, learned.get(constant.query, NOTHING)))
        if self._bias is not None:
            biases.append(self._constant_bias(self._bias, q, keys))
        for name in self._learning:
            terms = learned.get(name, NOTHING)
            if terms.query is not None and terms.query.u is not None:
                u = terms.query.u if u is None else u + terms.query.u
            if terms.table is not None:
                tables.append((terms.table, terms))
            if terms.bias is not None:
                b = terms.bias.b.to(q.device, wide(q))
                biases.append(terms.bias._replace(b=b))
            if terms.sinks is not None:
                sinks.append(terms.sinks)
        dtype = wide(q) if self._has_temperature else q.dtype  # a factor would repeat the rounding
        shift = None if u is None else u[:, None].to(q.device, dtype)
        factor = default_scale(q) if scale is None else scale
        from_input = []
        for table, terms in tables:
            if terms.input_query is not None:
                r = terms.input_query[:, :, terms.input_query.shape[2] - q.shape[2] :]
                from_input.append((table, r.to(q.device, dtype) / factor))
        if from_input:
            tables = [(table, terms) for table, terms in tables if terms.input_query is None]
        arguments: dict[str, Any] = {}
        query, joined = None, []
        if len(tables) == 1:
            table, terms = tables[0]
            query = _converted(terms.query, q.device, dtype)
            if named and not from_input and isinstance(table, _Constant):
                arguments |= {"name": table.name, "one_sided": self._causal}
            else:
                arguments |= self._ready(table, q.dtype, q, keys)._asdict()
        elif tables:
            joined = [(table, _converted(terms.query, q.device, dtype)) for table, terms in tables]
        if self._slopes is not None:
            arguments["slopes"] = self._slopes.on(q, wide(q))
        if biases:
            b, first, beyond = biases[0] if len(biases) == 1 else self._summed(biases, keys)
            arguments |= {"bias": b, "bias_first": first, "bias_beyond": beyond}
        return _Terms(arguments, shift, query, joined, from_input, sinks)

    def with_decay(self, k: Tensor, learned: Terms) -> Tensor:
        """Return the keys as a cache holds them: with columns for each token's decay, if any."""
        if not self.has_decay:
            return k
        (decay,) = (x.input_decay for x in learned.values() if x.input_decay is not None)
        return torch.cat([k, as_columns(decay, k)], -1)

    def _change_vectors(
        self, kernel_args: dict[str, Any], learned: Terms, factor: float, indices: TokenIndices
    ) -> None:
        """Replace q and k by vectors whose products are the scores of the encoding."""
        q, k = kernel_args["q"], kernel_args["k"]
        k, columns = k[..., : q.shape[-1]], k[..., q.shape[-1] :]
        if "p" in kernel_args:
            kernel_args.setdefault("q_rel", q)
        if self._vectors is not None:
            terms = learned.get(self._vectors.name, NOTHING)
            pairs = indices.index_pairs(q, k)
            dims = self._rotated_dims if self._vectors.rotates else self._head_dim
            others, first = (q[..., dims:], k[..., dims:]), (q[..., :dims], k[..., :dims])
            q, k = self._vectors.score_vectors(*first, *pairs, terms.parameters or {})
            if dims < self._head_dim:
                q, k = (torch.cat(x, -1) for x in zip((q, k), others, strict=True))
        if self._has_temperature:
            t = _factors(self.encoding, q, k, indices)
            q = (q * t).to(k.dtype)
            if "q_rel" in kernel_args:
                kernel_args["q_rel"] = (kernel_args["q_rel"] * t).to(k.dtype)
        if self.has_decay:
            decay = from_columns(columns, k, self.heads)
            if indices.key_mask is not None:
                decay = decay.masked_fill(~indices.key_mask.to(k.device)[:, None], 0)
            if q.dtype == wide(q):  # a kernel would round sums times the factor
                if "q_rel" in kernel_args:
                    kernel_args["q_rel"] = kernel_args["q_rel"] * factor
                q, factor = q * factor, 1.0
            q, k = with_sums(q, k, decay, indices.queries(q, k), factor)
        kernel_args |= {"q": q, "k": k, "scale": factor}

    def _join(
        self, kernel_args: dict[str, Any], joined: list[tuple[Any, Tensor]], q: Tensor, keys: int
    ) -> None:
        """Add tables that have queries of their own, as more columns if there is a table."""
        queries = [r for _, r in joined]
        tables = [self._ready(table, q.dtype, q, keys) for table, _ in joined]
        if "p" in kernel_args:
            queries.insert(0, kernel_args.get("q_rel", q))
            tables.insert(0, Table(*(kernel_args[key] for key in Table._fields)))
        if len(tables) > 1:
            rows = [self._every_row(table, q, keys) for table in tables]
            per_head = [x if x.dim() == 3 else x.expand(self.heads, -1, -1) for x in rows]
            are_shared = all(x.dim() == 2 for x in rows)
            p = torch.cat(rows if are_shared else per_head, -1).to(q.dtype)
            tables = [Table(p, self._first(keys) - 1, "edge")]
        q_rel = torch.cat(queries, -1) if len(queries) > 1 else queries[0]
        kernel_args |= {**tables[0]._asdict(), "q_rel": q_rel}

    def _first(self, keys: int) -> int:
        """Return the first distance among `keys` tokens."""
        return 0 if self._causal else 1 - keys

    def _ready(
        self, table: Table | _Constant, dtype: torch.dtype, like: Tensor, keys: int
    ) -> Table:
        """Return a table for queries of `dtype` on the device of `like`."""
        if isinstance(table, Table):
            if isinstance(table.p, RelativeTable):
                return table
            return table._replace(p=table.p.to(like.device, dtype))
        if is_compiling():
            size = (self._head_dim, dtype, like.device)
            rows = graph_rows(table.name, "table", self._causal, keys, *size)
            return Table(rows, self._first(keys))
        wanted = (keys, table.encoding, self._head_dim, self._causal)
        return Table(constant_table(*wanted) if like.is_cpu else table_on(like.device, *wanted))

    def _constant_bias(self, bias: _Constant, q: Tensor, keys: int) -> Bias:
        size = (self.heads, wide(q), q.device)
        if is_compiling():
            rows = graph_rows(bias.name, "bias", self._causal, keys, *size)
            return Bias(rows.T, self._first(keys))
        return constant_bias(keys, bias.encoding, self._causal, *size)

    def _summed(self, biases: list[Bias], keys: int) -> Bias:
        rows = [self._all(b[..., None], first, beyond, keys) for b, first, beyond in biases]
        return Bias(reduce(add, rows)[..., 0], self._first(keys) - 1, "edge")

    def _all(self, rows: Tensor, first: int, beyond: str, keys: int) -> Tensor:
        """Return the rows of all distances, and a row for the distances before them.

        A user's own mask may show later keys to a causal model. Then each part has its own row or
        zeros there, and so has the sum.
        """
        return rows_at(rows, first, beyond, torch.arange(self._first(keys) - 1, keys))

    def _every_row(self, table: Any, q: Tensor, keys: int) -> Tensor:
        """Return a row of q's compute type for each distance, as `_all`."""
        p, first, beyond = self._ready(table, wide(q), q, keys)
        if isinstance(p, RelativeTable):
            beyond = p.beyond
            p, first, _ = p.tensors(wide(q), q.device)
        return self._all(p, first, beyond, keys)


def _slopes(part: Encoding, heads: int) -> np.ndarray:
    """Return the slopes of an encoding; ValueError if they are not (heads,) or beyond float32."""
    slopes = np.asarray(part.slopes(heads), np.float64)
    if slopes.shape != (heads,) or not (np.abs(slopes) <= np.finfo(np.float32).max).all():
        raise ValueError(f"'{part}': slopes() must be {heads} finite float32 numbers, got {slopes}")
    return slopes


def left_by(sinks: Tensor, lse: Tensor) -> Tensor:
    """Return how much of the weights (B, H, m, 1) the sinks (B, H, >= m) of the tokens leave."""
    sinks = sinks[:, :, sinks.shape[2] - lse.shape[2] :].to(lse.device, lse.dtype)
    return torch.sigmoid(lse - sinks)[..., None]


def _factors(temperature: Methods, q: Tensor, k: Tensor, indices: TokenIndices) -> Tensor:
    """Return the factors (B|1, 1, m, 1) of a temperature on the queries."""
    at = indices.queries(q, k) if indices.positions is None else indices.positions
    t: Any = temperature.temperature(at.to(q.device))
    return (t if t.dim() == 2 else t[None])[:, None, :, None].to(wide(q))


def _converted(query: Query | None, device: torch.device, dtype: torch.dtype) -> Query | None:
    """Return how queries of a dtype read a table: v is (H, 1, d)."""
    if query is None:
        return None
    v, projection = query.v, query.projection
    return Query(
        v=None if v is None else v[:, None].to(device, dtype),
        projection=None if projection is None else projection.to(device, dtype),
    )


def table_queries(q: Tensor, query: Query | None) -> Tensor:
    """Return the queries of a table, (q + v) W, for a query of `_converted`."""
    if query is None:
        return q
    if query.v is not None:
        q = q + query.v
    return q if query.projection is None else q.to(query.projection.dtype) @ query.projection
