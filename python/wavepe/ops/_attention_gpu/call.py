"""Fused attention on a GPU: what is launched with which arguments; see `kernels`.

The products of the queries with the table are made for a few heads at a time, so that they stay
small and in the GPU's cache. Nothing here reads a value from the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .._common import check
from . import kernels, products
from .tiles import BLOCK, LEAST, Dropout, Hidden, Options, Rows, Terms

PRODUCTS_BYTES = 1 << 28  # of one chunk of heads, unless one head needs more
_FARTHEST = 1 << 29  # as in the kernels


class Arguments(NamedTuple):
    """Those of ``torch.ops.wavepe.attention_forward``."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor | None = None
    first: int = 0
    beyond: str = "zero"
    q_rel: Tensor | None = None
    slopes: Tensor | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    offset: Tensor | None = None
    key_mask: Tensor | None = None
    segments: Tensor | None = None
    mask: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    zones: list[Tensor] | None = None
    bias: Tensor | None = None
    bias_first: int = 0
    bias_beyond: str = "zero"


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """``torch.ops.wavepe.attention_forward`` of checked arguments."""
    call = Arguments(*arguments)
    q = call.q
    out = q.new_empty((*q.shape[:3], call.v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    for chunk in _chunks(call, gradients=False):
        chunk.attend(chunk.queries(out), chunk.queries(lse))
    return out, lse


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """``torch.ops.wavepe.attention_backward`` of checked arguments."""
    count = len(Arguments._fields)
    call = Arguments(*arguments[:count])
    p_grad, bias_grad = (*arguments[count:], False, False)[:2]
    empty = call.q.new_empty((0,))
    dq, dk, dv = (torch.empty_like(x) for x in (call.q, call.k, call.v))
    dq_rel = empty if call.q_rel is None else torch.empty_like(call.q_rel)
    # Sums over batches, and over the heads that share a table, are float32 until the end.
    dp = torch.zeros_like(call.p, dtype=torch.float32) if call.p is not None and p_grad else None
    dbias = torch.zeros_like(call.bias) if call.bias is not None and bias_grad else None
    for chunk in _chunks(call, gradients=True):
        saved = (chunk.queries(x) for x in (grad_out, grad_lse, out, lse))
        gradients = _Gradients(chunk, *saved)
        gradients.of_queries(chunk.queries(dq), chunk.queries(None if dq_rel is empty else dq_rel))
        gradients.of_keys(chunk.keys(dk), chunk.keys(dv))
        if dp is not None:
            gradients.of_table(chunk.of_heads(dp, 3))
        if dbias is not None:
            gradients.of_bias(chunk.of_heads(dbias, 2))
    return (
        dq,
        dk,
        dv,
        empty if dp is None else dp.to(call.q.dtype),
        dq_rel,
        empty if dbias is None else dbias,
    )


# ---- zones --------------------------------------------------------------------------------------


class _Zones(NamedTuple):
    """Which zones of a table hold rows: `near` ones from `first` on, and low-rank ones beside."""

    first: int
    near: int
    left: int
    right: int
    rank: int

    @property
    def columns(self) -> int:
        """Products a query."""
        return self.near * BLOCK + (self.left + self.right) * self.rank

    @classmethod
    def of(cls, call: Arguments) -> _Zones:
        rank = LEAST
        if call.p is None or not call.p.shape[-2]:
            return cls(0, 0, 0, 0, rank)
        first, last = _deltas(call.first, call.p.shape[-2])
        lowest, highest = first // BLOCK, -(-last // BLOCK)
        if call.zones:
            marker, far, _ = call.zones
            left, count, rank = marker.shape[0], far.shape[1], far.shape[2]
            near = highest - lowest + 1 - count
            return cls(lowest + left, near, left, count - left, rank)
        if call.causal:
            lowest = max(lowest, 0)
        if call.window is not None:
            highest = min(highest, call.window // BLOCK + 1)
        return cls(lowest, max(highest - lowest + 1, 0), 0, 0, rank)


def _deltas(first: int, count: int) -> tuple[int, int]:
    """Those of the first and the last row, which the kernels hold in 32 bits."""
    near = -_FARTHEST <= first <= _FARTHEST - count
    check(near, f"on a GPU the rows of a table must lie within +-2^29, got {count} from {first} on")
    return first, first + count - 1


# ---- chunks of heads ----------------------------------------------------------------------------


def _chunks(call: Arguments, gradients: bool) -> Iterator[_Chunk]:
    """Whole batches, or some key heads of one batch: what is contiguous stays so."""
    batch, heads, m, _ = call.q.shape
    key_heads = call.k.shape[1]
    if not batch * heads:
        return
    numbers = 2 if gradients else 1
    each = m * _Zones.of(call).columns * (heads // key_heads) * call.q.itemsize * numbers
    most = PRODUCTS_BYTES // max(each, 1)  # key heads
    batches, some_heads = max(most // key_heads, 1), max(min(most, key_heads), 1)
    for b in range(0, batch, batches):
        for h in range(0, key_heads, some_heads):
            yield _Chunk(
                call,
                slice(b, min(b + batches, batch)),
                slice(h, min(h + some_heads, key_heads)),
            )


class _Chunk:
    """Some batches and key heads of a call, and what the kernels are given of them."""

    def __init__(self, call: Arguments, batch: slice, key_heads: slice) -> None:
        self.group = call.q.shape[1] // call.k.shape[1]
        self.some_batches, self.some_key_heads = batch, key_heads
        self.some_heads = slice(key_heads.start * self.group, key_heads.stop * self.group)
        self.q, self.k, self.v = self.queries(call.q), self.keys(call.k), self.keys(call.v)
        self.q_rel = self.queries(call.q_rel)
        self.batch, self.heads, self.m, self.d = self.q.shape
        self.n, self.dv = self.k.shape[2], self.v.shape[3]
        self.scale = 1 / math.sqrt(max(self.d, 1)) if call.scale is None else call.scale
        self.zones = _Zones.of(call)
        self.far = call.zones[1] if call.zones else None
        self.hidden = self._hidden(call)
        self.terms = self._terms(call)
        self.dropout = self._dropout(call)
        self.edge = self.terms.p is not None and call.beyond == "edge"
        self.size = {"SIZE": self.d, "WIDTH": _width(self.d)}
        self.bias_edge = call.bias_beyond == "edge"
        one_sided = not self.zones.columns or (call.causal and self.zones.first <= 0)
        options = (
            *self.size.values(), self.dv, _width(self.dv), call.causal, self.edge, self.bias_edge,
            self.zones.rank, 4 if one_sided else 7,
        )  # fmt: skip
        self.options = Options(*map(tl.constexpr, options))

    # Parts of the whole call's tensors.

    def queries(self, x: Any) -> Any:
        return None if x is None else x[self.some_batches, self.some_heads]

    def keys(self, x: Tensor) -> Tensor:
        return x[self.some_batches, self.some_key_heads]

    def of_heads(self, x: Any, dims: int) -> Any:
        """All of x where the heads share it."""
        return x if x is None or x.dim() < dims else x[self.some_heads]

    def of_batches(self, x: Any) -> Any:
        """All of x where the batches share it."""
        return x if x is None or x.dim() == 0 or x.shape[0] == 1 else x[self.some_batches]

    # What the kernels are given.

    def _hidden(self, call: Arguments) -> Hidden:
        key_mask, segments, offset, mask = (
            _unit_stride(self.of_batches(x))
            for x in (call.key_mask, call.segments, call.offset, call.mask)
        )
        if mask is not None:
            mask = mask if mask.shape[1] == 1 else mask[:, self.some_heads]
            mask = mask.expand(self.batch, self.heads, -1, -1)
        window = None if call.window is None else min(call.window, _FARTHEST)
        return Hidden(
            window, key_mask, _batch_stride(key_mask), segments, _batch_stride(segments),
            _rows(mask), offset, _batch_stride(offset),
        )  # fmt: skip

    def _terms(self, call: Arguments) -> Terms:
        p, bias = self.of_heads(call.p, 3), self.of_heads(call.bias, 2)
        slopes = self.of_heads(call.slopes, 1)
        p = None if p is None or not p.shape[-2] else p.contiguous()
        bias = None if bias is None or not bias.shape[-1] else bias.contiguous()
        p_range = _deltas(call.first, 0 if p is None else p.shape[-2])
        bias_range = _deltas(call.bias_first, 0 if bias is None else bias.shape[-1])
        zones = self.zones
        return Terms(
            None, zones.columns, call.zones[2] if call.zones else None,
            zones.first, zones.near, zones.left, zones.right,
            p, 0 if p is None or p.dim() == 2 else p.stride(0), *p_range,
            None if slopes is None else slopes.float().contiguous(),
            bias, 0 if bias is None or bias.dim() == 1 else bias.stride(0), *bias_range,
            call.softcap,
        )  # fmt: skip

    def _dropout(self, call: Arguments) -> Dropout:
        if not call.dropout_p:
            return Dropout(None, 0, 0.0, 0, 0)
        _, heads, m, _ = call.q.shape
        kept = 1 - call.dropout_p
        return Dropout(
            call.seed,
            min(math.floor(call.dropout_p * 2.0**32), 2**32 - 1),
            1 / kept if kept else 0.0,
            (self.some_batches.start * heads + self.some_heads.start) * m,
            heads * m,
        )

    # Launches.

    def over_tiles(self, kernel: Any, role: str, programs: int, *own: Any) -> None:
        """Launch a kernel of attention."""
        launch(
            kernel, (programs,), _rows(self.q), _rows(self.k), _rows(self.v), _rows(self.q_rel),
            *own, self.hidden, self.terms, self.dropout, self.options, self.heads, self.group,
            self.m, self.n, self.scale, **self.tuning(role),
        )  # fmt: skip

    def over_queries(self, kernel: Any, role: str, *own: Any) -> None:
        rows = self.tuning(role)["ROWS"]
        programs = self.batch * self.heads * -(-self.m // rows)
        self.over_tiles(kernel, role, programs, *own)

    def over_remainders(self, kernel: Any, columns: int, *own: Any) -> None:
        """Launch a kernel of products: a table that heads share takes the rows of all at once."""
        shared = self.terms.p.dim() == 2
        how = self.tuning("products")
        each = -(-self.m // BLOCK) * (self.heads if shared else 1)
        parts = -(-each // how["ROWS"]) * self.batch * (1 if shared else self.heads)
        launch(
            kernel, (BLOCK * parts, columns), *own, self.hidden, self.terms,
            self.heads, self.m, self.n, **self.size, SHARED=shared, **how,
        )  # fmt: skip

    def tuning(self, role: str) -> dict[str, int]:
        return tuning(role, self.q, max(_width(self.d), _width(self.dv)))

    def make_products(self) -> None:
        """The products of the queries with the table, which the tiles read."""
        if not self.zones.columns:
            return
        # float16 is more exact than bfloat16, and a score beyond its range takes all the weight.
        dtype = torch.float32 if self.q.dtype == torch.float32 else torch.float16
        shape = (self.batch, self.heads, self.m, self.zones.columns)
        made = self.q.new_empty(shape, dtype=dtype)
        r = self.q if self.q_rel is None else self.q_rel
        slots = -(-self.zones.columns // BLOCK)
        self.over_remainders(products.table_products, slots, _rows(r), self.far, made)
        self.terms = self.terms._replace(products=made)

    def attend(self, out: Tensor, lse: Tensor) -> None:
        self.make_products()
        self.over_queries(kernels.attention_forward, "forward", _rows(out), lse)


class _Gradients:
    """The kernels of the backward of one chunk; `of_queries` comes first."""

    def __init__(
        self, chunk: _Chunk, grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
    ) -> None:
        self.chunk, self.grad, self.out, self.lse = chunk, grad, out, lse.contiguous()
        self.grad_lse = None if grad_lse is None else grad_lse.contiguous()
        self.sums = torch.empty_like(self.lse)  # dO . out - d lse
        chunk.make_products()
        made, table = chunk.terms.products, chunk.terms.p
        self.dproducts = self.dedges = None
        if made is not None:  # zeros where no tile is
            self.dproducts = chunk.q.new_zeros(made.shape)
        if chunk.edge:
            self.dedges = lse.new_empty((*lse.shape, 2))
        self.has_table = table is not None

    def of_queries(self, dq: Tensor, dq_rel: Tensor | None) -> None:
        chunk = self.chunk
        both = self.has_table and dq_rel is None
        part = dq.new_empty(dq.shape, dtype=torch.float32) if both else _writable(dq)
        chunk.over_queries(
            kernels.attention_backward_queries, "queries",
            _rows(self.out), self.lse, _rows(self.grad), self.grad_lse, self.sums, _rows(part),
            self.dproducts, self.dedges,
        )  # fmt: skip
        if self.has_table:
            dr = dq if dq_rel is None else dq_rel
            written = _writable(dr)
            chunk.over_remainders(
                products.table_backward_queries, 1, self.dproducts, self.dedges, chunk.far,
                _rows(part if both else None), _rows(written), chunk.scale,
            )  # fmt: skip
            _keep(dr, written)
        if not both:
            _keep(dq, part)

    def of_keys(self, dk: Tensor, dv: Tensor) -> None:
        chunk = self.chunk
        programs = chunk.batch * (chunk.heads // chunk.group) * -(-chunk.n // BLOCK)
        to_k, to_v = _writable(dk), _writable(dv)
        chunk.over_tiles(
            kernels.attention_backward_keys, "keys", programs,
            self.lse, _rows(self.grad), self.sums, _rows(to_k), _rows(to_v),
        )  # fmt: skip
        _keep(dk, to_k)
        _keep(dv, to_v)

    def of_table(self, dp: Tensor) -> None:
        """Add to dp (rows, d) or (heads, rows, d)."""
        chunk = self.chunk
        if not self.has_table:
            return
        rows, d = chunk.terms.p.shape[-2:]
        own = dp.new_empty((chunk.batch, chunk.heads, rows, d))
        r = chunk.q if chunk.q_rel is None else chunk.q_rel
        programs = chunk.batch * chunk.heads * -(-rows // BLOCK)
        launch(
            products.table_backward, (programs,), _rows(r), self.dproducts, self.dedges, _rows(own),
            chunk.scale, chunk.hidden, chunk.terms, chunk.heads, chunk.m, chunk.n,
            **chunk.size, **chunk.tuning("table"),
        )  # fmt: skip
        dp += own.sum((0, 1) if dp.dim() == 2 else 0)

    def of_bias(self, dbias: Tensor) -> None:
        """Add to dbias (w,) or (heads, w)."""
        chunk, terms = self.chunk, self.chunk.terms
        if terms.bias is None:
            return
        diagonals = -(-chunk.m // BLOCK) + -(-chunk.n // BLOCK) - 1
        pairs = chunk.batch * chunk.heads
        tiles = self.lse.new_empty((max(diagonals, 0) * pairs, BLOCK, BLOCK))
        chunk.over_tiles(
            kernels.attention_backward_bias, "bias", tiles.shape[0],
            self.lse, _rows(self.grad), self.sums, tiles,
        )  # fmt: skip
        by_place = tiles.new_empty((pairs, diagonals, 2, BLOCK))
        launch(kernels.diagonal_sums, (tiles.shape[0],), tiles, by_place)
        # On diagonal D = i // 64 - j // 64 and place u = i % 64 - j % 64: i - j = 64 * D + u.
        # (D, u) and (D + 1, u - 64) are one distance.
        before, behind = by_place.unbind(2)
        before, behind = F.pad(before, (0, 0, 0, 1)), F.pad(behind, (0, 0, 1, 0))
        by_distance = (before + behind).reshape(chunk.batch, chunk.heads, -1)
        offset = chunk.n - chunk.m if chunk.hidden.offset is None else chunk.hidden.offset.long()
        start = (-chunk.n // BLOCK) * BLOCK + torch.as_tensor(offset, device=dbias.device)
        own = _by_delta(by_distance, start.reshape(-1, 1), terms, chunk.bias_edge)
        dbias += own.sum((0, 1) if dbias.dim() == 1 else 0)


def _by_delta(x: Tensor, start: Tensor, terms: Terms, edge: bool) -> Tensor:
    """The gradient (B, H, w) of the bias from x (B, H, deltas from `start` (B|1, 1) on)."""
    first, last = terms.bias_first, terms.bias_last
    place = torch.arange(first, last + 1, device=x.device) - start
    inside = (place >= 0) & (place < x.shape[-1])
    place = place.clamp(0, x.shape[-1] - 1)[:, None].expand(*x.shape[:2], -1)
    rows = x.gather(-1, place) * inside[:, None]
    if edge:
        delta = (torch.arange(x.shape[-1], device=x.device) + start)[:, None]
        rows[..., 0] += (x * (delta < first)).sum(-1)
        rows[..., -1] += (x * (delta > last)).sum(-1)
    return rows


# ---- launches -----------------------------------------------------------------------------------


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    if all(grid):
        kernel[grid](*arguments, **options)


def tuning(role: str, q: Tensor, width: int) -> dict[str, int]:
    """Rows, warps and stages of a kernel: those without spills, see docs/gpu.md."""
    rows = {"forward": 64, "queries": 64, "keys": 64, "products": 64, "table": 64}
    how = {"num_warps": 4 if width <= 64 else 8, "num_stages": 2}
    return how if role == "bias" else {"ROWS": rows[role], **how}


def _width(size: int) -> int:
    """What a tile has room for: a power of two."""
    return max(triton.next_power_of_2(size), LEAST)


def _unit_stride(x: Any) -> Any:
    if x is None or x.dim() == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1:
        return x
    return x.contiguous()


def _rows(x: Any) -> Rows:
    """A tensor (B, H, rows, size), or none."""
    if x is None:
        return Rows(None, 0, 0, 0)
    x = _unit_stride(x)
    return Rows(x, *x.stride()[:3])


def _batch_stride(x: Any) -> int:
    return 0 if x is None or x.dim() == 0 or x.shape[0] == 1 else x.stride(0)


def _writable(x: Tensor) -> Tensor:
    """x, or where the kernels cannot write to it a tensor for `_keep`."""
    return x if _unit_stride(x) is x else x.new_empty(x.shape)


def _keep(x: Tensor, written: Tensor) -> None:
    if written is not x:
        x.copy_(written)
