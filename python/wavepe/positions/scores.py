"""What an encoding adds to the scores of a layer: tables that queries read, slopes and biases."""

from __future__ import annotations

import math
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..encodings import Bias, Encoding, Query, Table
from ..encodings.base import combine
from ..encodings.methods import checked_return
from ..ops import _flops
from ..ops._attention_in_graph import attention_of_encoding
from ..ops._common import full_precision, wide
from ..ops._compiler import is_compiling, wants_standard
from ..ops._device_constant import DeviceConstant
from ..ops._relative_table import RelativeTable
from ..ops._tables import constant_bias, constant_table, graph_rows, name_of, rows_at
from .learned import LearnedTerms, Terms

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
            return self.plain
        cos, sin = (x.to(wide(q)) for x in (self.cos, self.sin))
        size = cos * cos + sin * sin  # not 1 with an attention factor, and after rounding
        return ops.rope(q, cos / size, sin / size, interleaved=self.interleaved, inverse=True)


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
    """

    def __init__(self, encoding: Encoding, head_dim: int, heads: int, causal: bool) -> None:
        self.encoding = encoding
        self._head_dim, self._heads, self._causal = head_dim, heads, causal
        _flops.register()
        parts = encoding.parts
        self._learning = [part.name for part in parts if part.learns]
        constant = {
            term: [part for part in parts if term in part.terms and term not in part.learns]
            for term in ("table", "slopes", "bias")
        }
        asked = [part for part in constant["table"] if "query" in part.learns]
        plain = [part for part in constant["table"] if "query" not in part.learns]
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
        keys: int,
        learned: Terms,
        rotated: Rotated | None = None,
        scale: float | None = None,
        named: bool = False,
    ) -> dict[str, Any]:
        """Return the arguments of `ops.attention` that the encoding sets, queries included.

        Parameters
        ----------
        q : Tensor (B, H, m, d)
            The queries, rotated if `rotated` is given.
        keys : int
            The number of keys n.
        learned : mapping of str to LearnedTerms
            What the parts learn.
        rotated : Rotated, optional
            How the queries were rotated.
        scale : float, optional
            The factor on the products; None is d^-1/2.
        named : bool
            Give a single constant table by the arguments "name" and "one_sided" of
            `attention_of_encoding`.
        """
        keys = max(keys, 1)  # tables of no token have no range
        given: dict[str, Any] = {"q": q}
        found = {name: learned.get(name, NOTHING) for name in self._learning} if learned else {}
        u = [x.query.u for x in found.values() if x.query and x.query.u is not None]
        if u:
            shift = reduce(add, u)[:, None].to(q.device, q.dtype)
            given["q"] = q + (shift if rotated is None else rotated.turned(shift[None]))
        if self._slopes is not None:
            given["slopes"] = self._slopes.on(q, wide(q))
        biases = self._biases(q, keys, found)
        tables: list[tuple[Any, Query | None]] = []
        for table in self._tables:
            tables.append((table, found[table.query].query if table.query else None))
        for terms in found.values():
            if terms.table is not None:
                tables.append((terms.table, terms.query))
        if len(tables) == 1:
            table, query = tables[0]
            if named and isinstance(table, _Constant):
                given |= {"name": table.name, "one_sided": self._causal}
            else:
                p, first, beyond = self._ready(table, q.dtype, q, keys)
                given |= {"p": p, "first": first, "beyond": beyond}
            if u or query is not None or rotated is not None:
                given["q_rel"] = _asked(q if rotated is None else rotated.undone(q), query)
        elif tables:
            with full_precision(q.device.type):  # autocast would round the products
                p, more = self._merged(tables, q, keys, scale)
            given |= {"p": p, "first": self._first(keys) - 1, "beyond": "edge"}
            biases += more
            if u or rotated is not None:
                given["q_rel"] = q if rotated is None else rotated.undone(q)
        if biases:
            b, first, beyond = self._summed(biases, keys)
            given |= {"bias": b, "bias_first": first, "bias_beyond": beyond}
        return given

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        learned: Terms,
        rotated: Rotated | None = None,
        **options: Any,
    ) -> Tensor:
        """Call `ops.attention` with this encoding: q (B, H, m, d), k and v (B, Hk, n, d)."""
        named = is_compiling() and q.device.type == "cpu" and not wants_standard()
        scale = options.get("scale")
        given = self.arguments(q, k.shape[2], learned, rotated, scale, named)
        if "name" in given:
            return attention_of_encoding(**given, k=k, v=v, **options)
        out: Any = ops.attention(**given, k=k, v=v, **options)
        return out

    # ---- tables and biases of a call ----

    def _first(self, keys: int) -> int:
        """Return the first distance among `keys` tokens."""
        return 0 if self._causal else 1 - keys

    def _ready(
        self, table: Table | _Constant, dtype: torch.dtype, like: Tensor, keys: int
    ) -> Table:
        """Return a table for queries of `dtype` on the device of `like`."""
        if isinstance(table, Table):
            return table._replace(p=table.p.to(like.device, dtype))
        if is_compiling():
            given = (table.name, "table", self._causal, keys, self._head_dim, dtype, like.device)
            return Table(graph_rows(*given), self._first(keys))
        return Table(constant_table(keys, table.encoding, self._head_dim, self._causal))

    def _biases(self, q: Tensor, keys: int, found: dict[str, LearnedTerms]) -> list[Bias]:
        biases = []
        if self._bias is not None:
            size = (self._heads, wide(q), q.device)
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

    def _merged(
        self, tables: list[tuple[Any, Query | None]], q: Tensor, keys: int, scale: float | None
    ) -> tuple[Tensor, list[Bias]]:
        """Return one table for q itself, and biases, that add what several tables add.

        (q + v) W p = q (W p) + v W p: the first term is a table for each head, and the second is a
        number for each head and distance.
        """
        total, biases = [], []
        for table, query in tables:
            p, first, beyond = self._ready(table, wide(q), q, keys)
            if isinstance(p, RelativeTable):
                beyond = p.beyond
                p, first, _ = p.tensors(wide(q), q.device)
            p = self._all(p, first, beyond, keys)
            if query is not None and query.projection is not None:
                p = p @ query.projection.to(q.device, p.dtype).mT
            if query is not None and query.v is not None:
                v = query.v.to(q.device, p.dtype)[..., None]
                factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
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
