"""What an encoding adds to the scores of a layer: tables that queries read, slopes and biases."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..encodings import Bias, Encoding, Query, Table
from ..encodings.base import combine
from ..encodings.methods import checked_return
from ..ops._common import full_precision, wide
from ..ops._compiler import is_compiling, wants_standard
from ..ops._device_constant import DeviceConstant
from ..ops._relative_table import RelativeTable
from ..ops._scores import default_scale, rows_at
from .decay import as_columns, from_columns, with_sums
from .graph import attention_of_encoding
from .learned import LearnedTerms, Terms
from .self_extend import SelfExtend
from .tables import constant_bias, constant_table, graph_rows, name_of

NOTHING = LearnedTerms()


class Rotated(NamedTuple):
    """How queries were rotated, for the terms that read them without the rotation.

    Attributes
    ----------
    cos, sin : Tensor (m, h) or (1|B, m, h)
        For the queries.
    interleaved : bool
    plain : Tensor (B, H, m, d), optional
        The queries before the rotation; None: they are rotated back.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    plain: Tensor | None = None

    def turned(self, x: Tensor) -> Tensor:
        """Return x (1, H, 1, d), rotated as the queries were: (1|B, H, m, d)."""
        batch = self.cos.shape[0] if self.cos.dim() == 3 else 1
        x = x.expand(batch, -1, self.cos.shape[-2], -1)
        return ops.rope(x, self.cos, self.sin, interleaved=self.interleaved)

    def undone(self, q: Tensor) -> Tensor:
        """Return the queries before the rotation."""
        if self.plain is not None:
            return self.plain.to(q.dtype)
        cos, sin = (x.to(wide(q)) for x in (self.cos, self.sin))
        size = cos * cos + sin * sin  # not 1 with an attention factor, and after rounding
        return ops.rope(q, cos / size, sin / size, interleaved=self.interleaved, inverse=True)


class Places(NamedTuple):
    """Where queries and keys stand.

    Attributes
    ----------
    offset : int or Tensor () or (B,), optional
        The index of the key at the place of the first query; None: the queries come last.
    positions : integer Tensor (m,) or (B|1, m), optional
        The positions of the queries; None: their places.
    key_mask : bool Tensor (B|1, n), optional
        False for tokens that no query sees.
    """

    offset: int | Tensor | None = None
    positions: Tensor | None = None
    key_mask: Tensor | None = None

    def queries(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the indices of the keys at the places of the queries, int64 (B|1, m)."""
        first: Any = k.shape[2] - q.shape[2] if self.offset is None else self.offset
        if isinstance(first, Tensor):
            first = first.to(q.device).reshape(-1, 1)
        return torch.arange(q.shape[2], device=q.device)[None] + first

    def both(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers of queries and keys whose differences are the distances."""
        return self.queries(q, k), torch.arange(k.shape[2], device=k.device)[None]

    def absolute(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys, (B|1, m) and (B|1, n).

        Keys before the queries are counted back from the queries that are no padding.
        """
        places, keys = self.both(q, k)
        if self.positions is None:
            return places, keys
        positions = self.positions.to(q.device)
        positions = positions if positions.dim() == 2 else positions[None]
        if q.shape[2] == k.shape[2]:
            return positions, positions
        shift = positions - places
        if self.key_mask is None:
            return positions, keys + shift[:, -1:]
        seen = self.key_mask.to(q.device)
        rows = max(len(seen), len(places))
        place = places.clamp(0, max(k.shape[2] - 1, 0)).expand(rows, -1)
        shift = torch.where(seen.expand(rows, -1).gather(1, place), shift, -(1 << 32))
        return positions, keys + shift.amax(1, keepdim=True)


AT_THE_END = Places()


class _Constant(NamedTuple):
    """The sum of constant tables or biases of some parts.

    Attributes
    ----------
    encoding : Encoding
    name : str
        Its name for a compiler: a guard of the graph, so that each encoding has its own graph.
    query : str
        The name of the part that learns the query of the table; "" if no part does.
    """

    encoding: Encoding
    name: str
    query: str = ""

    @classmethod
    def of(cls, parts: list[Encoding], query: str = "") -> _Constant:
        encoding = combine([(part, None) for part in parts])
        return cls(encoding, name_of(encoding), query)


class Scores:
    """The terms that an encoding adds to the scores.

    Constant tables that queries read as they are become one table, and constant biases one bias.

    Attributes
    ----------
    encoding : Encoding
        Of one layer.
    heads : int
    has_decay : bool
        Whether keys get columns, see `with_decay`.
    extended : SelfExtend, optional
        What makes two calls of one, outside training.
    reads_positions : bool
        Whether positions matter, and not their differences alone.
    """

    def __init__(
        self,
        encoding: Encoding,
        head_dim: int,
        heads: int,
        causal: bool,
        rotated_dims: int | None = None,
    ) -> None:
        self.encoding = encoding
        self._head_dim, self.heads, self._causal = head_dim, heads, causal
        parts = encoding.parts
        self._learning = [part.name for part in parts if part.learns]
        self._vectors = next((part for part in parts if part.has_vectors), None)
        decays = [part.name for part in parts if "input_decay" in part.learns]
        if len(decays) > 1:
            raise ValueError(f"'{encoding}': {' and '.join(decays)} both decay: keep one of them")
        if decays and not causal:
            raise ValueError(f"'{encoding}' needs causal attention: give causal=True")
        self.has_decay = bool(decays)
        extends = getattr(encoding.rotary, "self_extend", None) is not None
        self.extended = SelfExtend(encoding, rotated_dims or head_dim, causal) if extends else None
        self._has_temperature, self._own_window = encoding.has_temperature, encoding.window
        self.reads_positions = extends or self._has_temperature
        constant = {
            term: [part for part in parts if term in part.terms and term not in part.learns]
            for term in ("table", "slopes", "bias")
        }
        own = {"query", "input_query"}
        asked = [part for part in constant["table"] if own & set(part.learns)]
        plain = [part for part in constant["table"] if not own & set(part.learns)]
        self._tables = [_Constant.of(plain)] if plain else []
        self._tables += [_Constant.of([part], query=part.name) for part in asked]
        self._bias = _Constant.of(constant["bias"]) if constant["bias"] else None
        # Not a buffer of a module, so that casts do not reach it.
        slopes = [part.slopes(heads) for part in constant["slopes"]]
        self._slopes = DeviceConstant(reduce(add, slopes)) if slopes else None
        size = {"heads": heads, "head_dim": head_dim}
        for part in constant["table"]:  # raises where the encoding does not fit
            checked_return(part, "table", part.table(1, head_dim, causal=causal), **size)
        for part in constant["bias"]:
            checked_return(part, "bias", part.bias(1, heads, causal=causal), **size)

    def arguments(
        self,
        q: Tensor,
        k: Tensor,
        learned: Terms,
        rotated: Rotated | None = None,
        scale: float | None = None,
        places: Places = AT_THE_END,
        size: int | None = None,
        sinks: Tensor | None = None,
        named: bool = False,
    ) -> dict[str, Any]:
        """Return the arguments of `ops.attention` that the encoding sets, with queries and keys.

        Parameters
        ----------
        q : Tensor (B, H, m, d)
            The queries, rotated if `rotated` is given.
        k : Tensor (B, Hk, n, d)
            The keys, rotated likewise. With a decay from the input, `with_decay` has added columns.
        learned : mapping of str to LearnedTerms
            What the parts learn.
        rotated : Rotated, optional
            How the queries were rotated.
        scale : float, optional
            The factor on the products; None is d^-1/2.
        places : Places, optional
            Where queries and keys stand.
        size : int, optional
            The number of tokens among which tables have all distances; None is n.
        sinks : Tensor (H,), optional
            Sinks of the layer itself.
        named : bool
            Give a single constant table by the arguments "name" and "one_sided" of
            `attention_of_encoding`.
        """
        changes = self.has_decay or self._vectors is not None
        if changes and q.dtype == torch.float16:  # it does not reach far enough
            q, k = q.float(), k.float()
        keys = max(k.shape[2] if size is None else size, 1)  # tables of no token have no range
        given: dict[str, Any] = {"q": q, "k": k}
        found = {name: learned.get(name, NOTHING) for name in self._learning} if learned else {}
        u: list[Tensor] = []
        if found:
            u = [x.query.u for x in found.values() if x.query and x.query.u is not None]
        if u:
            shift = reduce(add, u)[:, None].to(q.device, q.dtype)
            given["q"] = q + (shift if rotated is None else rotated.turned(shift[None]))
        if self._slopes is not None:
            given["slopes"] = self._slopes.on(q, wide(q))
        biases = self._biases(q, keys, found) if self._bias is not None or found else []
        factor = default_scale(q) if scale is None else scale
        every: list[tuple[Any, LearnedTerms]] = []
        for table in self._tables:
            every.append((table, found[table.query] if table.query else NOTHING))
        for terms in found.values():
            if terms.table is not None:
                every.append((terms.table, terms))
        tables: list[tuple[Any, Query | None]] = []
        read = []  # tables that the input reads, with their queries
        for table, terms in every:
            if terms.input_query is None:
                tables.append((table, terms.query))
            else:
                r = terms.input_query[:, :, terms.input_query.shape[2] - q.shape[2] :]
                read.append((table, r.to(q.device, q.dtype) / factor))
        if self._has_temperature and len(tables) > 1:  # it scales what each of them adds
            plain = q if rotated is None else rotated.undone(q)
            read += [(table, _asked(plain, query)) for table, query in tables]
            tables = []
        if len(tables) == 1:
            table, query = tables[0]
            if named and not read and isinstance(table, _Constant):
                given |= {"name": table.name, "one_sided": self._causal}
            else:
                p, first, beyond = self._ready(table, q.dtype, q, keys)
                given |= {"p": p, "first": first, "beyond": beyond}
            if u or query is not None or rotated is not None:
                given["q_rel"] = _asked(q if rotated is None else rotated.undone(q), query)
        elif tables:
            with full_precision(q.device.type):  # autocast would round the products
                p, more = self._merged(tables, q, keys, factor)
            given |= {"p": p, "first": self._first(keys) - 1, "beyond": "edge"}
            biases += more
            if u or rotated is not None:
                given["q_rel"] = q if rotated is None else rotated.undone(q)
        if read:
            self._join(given, read, q, keys)
        if biases:
            b, first, beyond = self._summed(biases, keys)
            given |= {"bias": b, "bias_first": first, "bias_beyond": beyond}
        rows = [] if sinks is None else [sinks]
        for terms in found.values():
            if terms.sinks is not None:
                rows.append(terms.sinks)
        if rows:  # several are one of the same weight
            given["sinks"] = reduce(torch.logaddexp, (x.to(q.device, wide(q)) for x in rows))
        if changes or self._has_temperature:
            self._change_vectors(given, found, factor, places)
        return given

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        learned: Terms,
        rotated: Rotated | None = None,
        positions: Tensor | None = None,
        training: bool = False,
        **options: Any,
    ) -> Tensor:
        """Call `ops.attention` with this encoding: q (B, H, m, d), k and v (B, Hk, n, d).

        `positions` (m,) or (B|1, m) are those of the queries, if they are not their places.
        """
        named = bool(self._tables) and self._vectors is None and not self.has_decay
        named = named and q.is_cpu and is_compiling() and not wants_standard()
        scale, sinks = options.pop("scale", None), options.pop("sinks", None)
        places = Places(options.get("offset"), positions, options.get("key_mask"))
        given = self.arguments(q, k, learned, rotated, scale, places, sinks=sinks, named=named)
        options["window"] = self.window(options.get("window"))
        options = {"scale": scale, **options, **given}
        if self.extended is not None and not training:
            assert rotated is not None
            where = places.absolute(q, k)
            return self.extended.attend({**options, "v": v}, *where, rotated.interleaved)
        if "name" in given:
            return attention_of_encoding(v=v, **options)
        out: Any = ops.attention(v=v.to(given["q"].dtype), **options)
        return out.to(q.dtype)

    def window(self, window: int | None) -> int | None:
        """Return the smaller one of a layer's window and the encoding's."""
        own = self._own_window
        return own if window is None else window if own is None else min(window, own)

    # ---- queries and keys that are not what the model gave ----

    def with_decay(self, k: Tensor, learned: Terms) -> Tensor:
        """Return the keys with more columns, which hold each token's decay in a cache."""
        (decay,) = (x.input_decay for x in learned.values() if x.input_decay is not None)
        return torch.cat([k, as_columns(decay, k)], -1)

    def _change_vectors(
        self,
        given: dict[str, Any],
        found: dict[str, LearnedTerms],
        factor: float,
        places: Places,
    ) -> None:
        """Replace q and k by vectors whose products are the scores of the encoding."""
        q, k = given["q"], given["k"]
        k, columns = k[..., : q.shape[-1]], k[..., q.shape[-1] :]
        given["scale"] = factor
        if "p" in given:
            given.setdefault("q_rel", q)
        if self._vectors is not None:
            terms = found.get(self._vectors.name, NOTHING)
            where = places.both(q, k)
            q, k = self._vectors.score_vectors(q, k, *where, terms.parameters or {})
        if self._has_temperature:
            at = places.queries(q, k) if places.positions is None else places.positions
            t: Any = self.encoding.temperature(at.to(q.device))
            t = (t if t.dim() == 2 else t[None])[:, None, :, None].to(wide(q))
            q = (q * t).to(q.dtype)
            if "q_rel" in given:
                given["q_rel"] = (given["q_rel"] * t).to(q.dtype)
        if self.has_decay:
            decay = from_columns(columns, k, self.heads)
            if places.key_mask is not None:
                decay = decay.masked_fill(~places.key_mask.to(k.device)[:, None], 0)
            q, k = with_sums(q, k, decay, places.queries(q, k), factor)
        given |= {"q": q, "k": k}

    def _join(
        self,
        given: dict[str, Any],
        read: list[tuple[Any, Tensor]],
        q: Tensor,
        keys: int,
    ) -> None:
        """Add tables that the input reads: as more columns, if there is a table already."""
        queries = [r for _, r in read]
        tables = [self._ready(table, q.dtype, q, keys) for table, _ in read]
        if "p" in given:
            queries.insert(0, given.get("q_rel", q))
            p, first, beyond = (given[key] for key in ("p", "first", "beyond"))
            tables.insert(0, Table(p, first, beyond))
        if len(tables) > 1:
            rows = [self._every_row(table, q, keys) for table in tables]
            per_head = [x if x.dim() == 3 else x.expand(self.heads, -1, -1) for x in rows]
            shared = all(x.dim() == 2 for x in rows)
            p = torch.cat(rows if shared else per_head, -1).to(q.dtype)
            tables = [Table(p, self._first(keys) - 1, "edge")]
        p, first, beyond = tables[0]
        q_rel = torch.cat(queries, -1) if len(queries) > 1 else queries[0]
        given |= {"p": p, "first": first, "beyond": beyond, "q_rel": q_rel}

    # ---- tables and biases of a call ----

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
            given = (table.name, "table", self._causal, keys, self._head_dim, dtype, like.device)
            return Table(graph_rows(*given), self._first(keys))
        return Table(constant_table(keys, table.encoding, self._head_dim, self._causal))

    def _biases(self, q: Tensor, keys: int, found: dict[str, LearnedTerms]) -> list[Bias]:
        biases = []
        if self._bias is not None:
            size = (self.heads, wide(q), q.device)
            if is_compiling():
                given = (self._bias.name, "bias", self._causal, keys, *size)
                rows = graph_rows(*given)
                biases.append(Bias(rows.T, self._first(keys)))
            else:
                biases.append(constant_bias(keys, self._bias.encoding, self._causal, *size))
        for terms in found.values():
            if terms.bias is not None:
                b = terms.bias.b.to(q.device, wide(q))
                biases.append(terms.bias._replace(b=b))
        return biases

    def _summed(self, biases: list[Bias], keys: int) -> Bias:
        if len(biases) == 1:
            return biases[0]
        rows = [self._all(b[..., None], first, beyond, keys) for b, first, beyond in biases]
        return Bias(reduce(add, rows)[..., 0], self._first(keys) - 1, "edge")

    def _all(self, rows: Tensor, first: int, beyond: str, keys: int) -> Tensor:
        """Return the rows of all distances, and one for what lies before them.

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

    def _merged(
        self, tables: list[tuple[Any, Query | None]], q: Tensor, keys: int, factor: float
    ) -> tuple[Tensor, list[Bias]]:
        """Return one table for q itself, and biases, that add what several tables add.

        (q + v) W p = q (W p) + v W p: the first term is a table for each head, and the second is a
        number for each head and distance.
        """
        total, biases = [], []
        for table, query in tables:
            p = self._every_row(table, q, keys)
            if query is not None and query.projection is not None:
                p = p @ query.projection.to(q.device, p.dtype).mT
            if query is not None and query.v is not None:
                v = query.v.to(q.device, p.dtype)[..., None]
                biases.append(Bias((p @ v)[..., 0] * factor, self._first(keys) - 1, "edge"))
            total.append(p)
        return reduce(add, total).to(q.dtype), biases


def _asked(q: Tensor, query: Query | None) -> Tensor:
    """Return the queries of a table: (q + v) W."""
    if query is None:
        return q
    if query.v is not None:
        q = q + query.v[:, None].to(q.device, q.dtype)
    return q if query.projection is None else q @ query.projection.to(q.device, q.dtype)
