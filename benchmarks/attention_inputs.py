"""Inputs of the attention benchmarks, what a user writes today, and the float64 judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import wavepe
import wavepe.ops as ops
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from .case import Call, Compiler, Verdict, judge, plain

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
BOUND = "5e-6 of the largest element of each result (bfloat16: 2e-2)"
_JUDGED_AT_ONCE = 1 << 23  # scores: 64 MiB in float64


@dataclass
class Inputs:
    """q, k, v and the gradient of the output, (1, heads, length, d); p (rows, d), row delta."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    p: Tensor

    @classmethod
    def make(cls, heads: int, length: int, d: int, dtype=torch.float32, queries=None) -> Inputs:
        """Random tensors, and the table of wavelets at all distances."""
        random = torch.Generator().manual_seed(0)
        rows = (length if queries is None else queries, length, length, length)
        tensors = [torch.randn(1, heads, n, d, generator=random).to(dtype) for n in rows]
        p = torch.from_numpy(table(length, d)).to(dtype)
        return cls(*tensors, p)

    def with_learned(self, rows: int) -> Inputs:
        """The same with a table of random numbers, which has no structure to make use of."""
        random = torch.Generator().manual_seed(1)
        p = torch.randn(rows, self.q.shape[-1], generator=random).mul_(0.5).to(self.q.dtype)
        return Inputs(self.q, self.k, self.v, self.grad, p)

    @property
    def length(self) -> int:
        return self.k.shape[2]

    @property
    def size(self) -> str:
        _, heads, length, d = self.k.shape
        return f"{heads} heads x {length} x {d}"

    @property
    def dtype(self) -> str:
        return str(self.q.dtype).removeprefix("torch.")

    @property
    def flops(self) -> int:
        """Of the two products over the pairs that a causal query sees: 2 L^2 d a head."""
        _, heads, length, d = self.k.shape
        return 2 * heads * length**2 * d

    @property
    def delta(self) -> Tensor:
        return torch.arange(self.length)[:, None] - torch.arange(self.length)

    @cached_property
    def index(self) -> Tensor:
        """Rows of p by (query, key), expanded over the heads; the last one for what is beyond."""
        clamped = self.delta.clamp(0, len(self.p) - 1)
        return clamped.expand(*self.q.shape[:2], -1, -1)

    @cached_property
    def hidden(self) -> Tensor:
        return self.delta < 0

    @cached_property
    def near(self) -> Tensor | None:
        """Where the table has a row; None if it has one for every distance."""
        return None if len(self.p) >= self.length else self.delta < len(self.p)

    @cached_property
    def relative_table(self):
        """p as the operator takes a constant table; it looks for zones itself."""
        return ops.relative_table(torch.from_numpy(table(self.length, self.k.shape[-1])))


def table(rows: int, d: int):
    """Wavelets of 8 scales (4 where the head is small) at distances 0 to rows - 1."""
    scale, shift = wavepe.wavelet_grid(d, scales=8 if d % 8 == 0 and d > 16 else 4)
    return wavepe.wavelet_table(rows, scale, shift)


# ------------------------------------------------------------------ what a user writes today


def gathered(q, k, v, p, index: Tensor, hidden: Tensor, near: Tensor | None = None) -> Tensor:
    """q @ p.T gathered by distance, added to q @ k.T; softmax; times v."""
    bias = (q @ p.T).gather(-1, index)
    if near is not None:
        bias = bias * near
    scores = (q @ k.mT + bias) * q.shape[-1] ** -0.5
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def skewed(q, k, v, p, hidden: Tensor) -> Tensor:
    """The same by Music Transformer's pad and reshape; p has a row for each distance."""
    t = pad(q @ p.flip(0).T, (1, 0))
    *outer, rows, wide = t.shape
    bias = t.reshape(*outer, wide, rows)[..., 1:, :]
    scores = (q @ k.mT + bias) * q.shape[-1] ** -0.5
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def dense(q, k, v, p, index: Tensor, hidden: Tensor, near: Tensor | None = None) -> Tensor:
    """PyTorch's attention with the term of position as its mask."""
    bias = (q @ p.T).gather(-1, index) * q.shape[-1] ** -0.5
    if near is not None:
        bias = bias * near
    return scaled_dot_product_attention(q, k, v, bias.masked_fill(hidden, -torch.inf))


def flexed(x: Inputs, compiler: Compiler) -> Call | None:
    """FlexAttention, which takes the term of position from q @ p.T; forward only on CPUs."""

    def attend(q, k, v, t, blocks):
        def score_mod(score, b, h, i, j):
            return score + t[b, h, i, (i - j).clamp(min=0)]

        return flex_attention(q, k, v, score_mod=score_mod, block_mask=blocks)

    compiled = compiler.function(attend)
    if compiled is None:
        return None
    blocks = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, x.length, x.length, device="cpu"
    )

    def call():
        with torch.no_grad():
            return compiled(x.q, x.k, x.v, (x.q @ x.p.T) * x.q.shape[-1] ** -0.5, blocks)

    return call


def sdpa(q, k, v) -> Tensor:
    """PyTorch's attention without positions."""
    return scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)


# ------------------------------------------------------------------ the judge


def exact_results(
    x: Inputs,
    p: Tensor | None,
    slopes: Tensor | None = None,
    leaves: tuple[str, ...] = (),
    bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """out, then the gradients of `leaves` (of q, k, v, p, bias), in float64 by the formula.

    The bias is (heads, keys), from the distance 0 on. Block by block of queries, so that memory
    stays bounded: autograd adds up what the blocks give to k, v, p and bias.
    """
    values = {"q": x.q, "k": x.k, "v": x.v, "p": p, "bias": bias}
    values = {name: None if t is None else t.detach().double() for name, t in values.items()}
    for name in leaves:
        values[name].requires_grad_()
    q, k, v, p, bias = values.values()
    first = k.shape[2] - q.shape[2]
    step = max(1, _JUDGED_AT_ONCE // (q.shape[1] * k.shape[2]))
    outs = []
    for start in range(0, q.shape[2], step):
        rows = slice(start, min(start + step, q.shape[2]))
        seen = first + rows.stop
        delta = torch.arange(first + start, seen)[:, None] - torch.arange(seen)
        scores = q[:, :, rows] @ k[:, :, :seen].mT
        if p is not None:
            index = delta.clamp(0, len(p) - 1).expand(*scores.shape)
            relative = (q[:, :, rows] @ p.T).gather(-1, index)
            scores = scores + relative * (delta < len(p))
        scores = scores * q.shape[-1] ** -0.5
        if slopes is not None:
            scores = scores - slopes[:, None, None] * delta
        if bias is not None:
            scores = scores + bias[:, delta.clamp(min=0)]
        out = scores.masked_fill(delta < 0, -torch.inf).softmax(-1) @ v[:, :, :seen]
        if leaves:
            out.backward(x.grad[:, :, rows].double())
        outs.append(out.detach())
    return torch.cat(outs, 2), *(values[name].grad for name in leaves)


def judged(
    x: Inputs,
    p: Tensor | None,
    slopes: Tensor | None = None,
    leaves: tuple[str, ...] = (),
    bias: Tensor | None = None,
) -> Callable[[object], Verdict]:
    """A judge of out and the gradients of `leaves`: no error above TOLERANCE of the largest."""
    exact = tuple(map(plain, exact_results(x, p, slopes, leaves, bias)))
    return judge(exact, tuple(TOLERANCE[x.q.dtype] * abs(right).max() for right in exact))
