"""Fused attention on a GPU: forward and backward of the operators, which launch the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._attention_checks import Arguments
from . import decode, kernels, launches, products
from .chunk import Chunk, bias_tiles, chunks, rows_of
from .tiles import Saved, ScoreTerms
from .zones import BLOCK


def forward(*arguments: Any, numbers: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Return ``torch.ops.wavepe.attention_forward`` of checked arguments; plans mark `numbers`."""
    needed, of_call, _ = decode.lengths(arguments)
    call = Arguments(*needed)
    q = call.q
    out = q.new_empty((*q.shape[:3], call.v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if of_call:
        decode.attend(call, numbers or of_call, out, lse)
        return out, lse
    for chunk in chunks(call, gradients=False):
        chunk.attend(chunk.queries(out), chunk.queries(lse))
    return out, lse


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor | None, ...]:
    """Return ``torch.ops.wavepe.attention_backward`` of checked arguments, with None for empty."""
    count = len(Arguments._fields)
    call = Arguments(*arguments[:count])
    p_grad, bias_grad = (*arguments[count:], False, False)[:2]
    inputs = [x for x in (call.q, call.k, call.v, call.q_rel) if x is not None]
    grads: list[Any] = [
        x.new_empty(x.shape) if x.stride(-1) != 1 else torch.empty_like(x) for x in inputs
    ]
    if not call.q.shape[1]:  # no kernel writes the gradients of keys
        grads = [x.zero_() for x in grads]
    dq, dk, dv, dq_rel = (*grads, None)[:4]
    # Sums over batches and heads are float32 until the end.
    dp = torch.zeros_like(call.p, dtype=torch.float32) if call.p is not None and p_grad else None
    dbias = torch.zeros_like(call.bias) if call.bias is not None and bias_grad else None
    for chunk in chunks(call, gradients=True, bias_grad=dbias is not None):
        saved = (chunk.queries(x) for x in (grad_out, grad_lse, out, lse))
        gradients = _Gradients(chunk, *saved)
        gradients.grad_queries(chunk.queries(dq), chunk.queries(dq_rel))
        gradients.grad_keys(chunk.keys(dk), chunk.keys(dv))
        if dp is not None:
            gradients.grad_table(chunk.slice_heads(dp, 3))
        if dbias is not None:
            gradients.grad_bias(chunk.slice_heads(dbias, 2))
    pairs = zip(inputs, grads, strict=True)  # in the memory order of the inputs
    grads = [grad if x.stride(-1) == 1 else torch.empty_like(x).copy_(grad) for x, grad in pairs]
    dq, dk, dv, dq_rel = (*grads, None)[:4]
    return dq, dk, dv, None if dp is None else dp.to(call.q.dtype), dq_rel, dbias


class _Gradients:
    """The backward of one chunk. `grad_queries` must be called first: it computes `saved`."""

    def __init__(
        self, chunk: Chunk, grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
    ) -> None:
        self.chunk, self.grad, self.out, self.lse = chunk, grad, out, lse.contiguous()
        self.grad_lse = None if grad_lse is None else grad_lse.contiguous()
        saved = lse.new_empty((4 if chunk.edge else 2, *lse.shape)).unbind()
        self.saved = Saved(*saved, *[None] * (4 - len(saved)))
        chunk.compute_products()
        forward_products = chunk.terms.products
        self.dproducts = self.dedges = None
        if forward_products is not None:
            self.dproducts = chunk.q.new_empty(forward_products.shape)
        if chunk.edge:
            self.dedges = lse.new_empty((*lse.shape, 2))
        self.has_table = chunk.terms.p is not None

    def grad_queries(self, dq: Tensor, dq_rel: Tensor | None) -> None:
        """Write dq and dq_rel."""
        chunk = self.chunk
        both = self.has_table and dq_rel is None
        part = dq.new_empty(dq.shape, dtype=torch.float32) if both else dq
        chunk.over_queries(
            kernels.attention_backward_queries, "queries",
            rows_of(self.out), self.lse, rows_of(self.grad), self.grad_lse, self.saved,
            rows_of(part), self.dproducts, self.dedges,
        )  # fmt: skip
        if self.has_table:
            chunk.over_remainders(
                products.table_backward_queries, 1, self.dproducts, self.dedges, chunk.far,
                rows_of(part if both else None), rows_of(dq if both else dq_rel), chunk.scale,
            )  # fmt: skip
        elif dq_rel is not None:
            dq_rel.zero_()

    def grad_keys(self, dk: Tensor, dv: Tensor) -> None:
        """Write dk and dv."""
        chunk = self.chunk
        keys = chunk.tuning("keys")["KEYS"]
        programs = chunk.batch * (chunk.heads // chunk.group) * -(-chunk.n // keys)
        chunk.over_tiles(
            kernels.attention_backward_keys, "keys", programs,
            rows_of(self.grad), self.saved, rows_of(dk), rows_of(dv),
        )  # fmt: skip

    def grad_table(self, dp: Tensor) -> None:
        """Add the gradient of the table to dp (rows, c) or (heads, rows, c)."""
        chunk = self.chunk
        if not self.has_table:
            return
        rows, c = chunk.terms.p.shape[-2:]
        per_head = dp.new_empty((chunk.batch, chunk.heads, rows, c))
        programs = chunk.batch * chunk.heads * -(-rows // BLOCK)
        launches.launch(
            products.table_backward, (programs,), rows_of(chunk.r), self.dproducts, self.dedges,
            rows_of(per_head), chunk.scale, chunk.hidden, chunk.terms, chunk.config, chunk.heads,
            chunk.m, chunk.n, **chunk.tuning("table"),
        )  # fmt: skip
        dp += per_head.sum((0, 1) if dp.dim() == 2 else 0)

    def grad_bias(self, dbias: Tensor) -> None:
        """Add the gradient of the bias to dbias (w,) or (heads, w)."""
        chunk, terms = self.chunk, self.chunk.terms
        if terms.bias is None or not chunk.m * chunk.n:
            return
        diagonals = bias_tiles(chunk.m, chunk.n)
        pairs = chunk.batch * chunk.heads
        tiles = self.lse.new_empty((diagonals * pairs, BLOCK, BLOCK))
        chunk.over_tiles(
            kernels.attention_backward_bias, "bias", tiles.shape[0],
            rows_of(self.grad), self.saved, tiles,
        )  # fmt: skip
        by_place = tiles.new_empty((pairs, diagonals, 2, BLOCK))
        launches.launch(kernels.diagonal_sums, (tiles.shape[0],), tiles, by_place)
        # With the diagonal D = i // 64 - j // 64 and the place u = i % 64 - j % 64, the distance is
        # i - j = 64 * D + u. So (D, u) and (D + 1, u - 64) are the same distance.
        before, behind = by_place.unbind(2)
        before, behind = F.pad(before, (0, 0, 0, 1)), F.pad(behind, (0, 0, 1, 0))
        by_distance = (before + behind).reshape(chunk.batch, chunk.heads, -1)
        offset = chunk.hidden.offset
        if offset is None:
            offset = torch.full((1,), chunk.n - chunk.m, device=dbias.device)
        start = offset.long().reshape(-1, 1) + (-chunk.n // BLOCK) * BLOCK
        per_head = _by_delta(by_distance, start, terms, chunk.bias_edge)
        dbias += per_head.sum((0, 1) if dbias.dim() == 1 else 0)


def _by_delta(x: Tensor, start: Tensor, terms: ScoreTerms, edge: bool) -> Tensor:
    """Return the gradient (B, H, w) of the bias; x has that of deltas from `start` (B|1, 1) on."""
    first, last = terms.bias_first // 2, terms.bias_last // 2
    place = torch.arange(first, last + 1, device=x.device) - start
    inside = (place >= 0) & (place < x.shape[-1])
    place = place.clamp(0, x.shape[-1] - 1)[:, None].expand(*x.shape[:2], -1)
    rows = x.gather(-1, place) * inside[:, None]
    if edge:
        delta = (torch.arange(x.shape[-1], device=x.device) + start)[:, None]
        rows[..., 0] += (x * (delta < first)).sum(-1)
        rows[..., -1] += (x * (delta > last)).sum(-1)
    return rows
