"""Inputs of the attention benchmarks, attention without wavepe, and the float64 judge."""

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
    """q, k, v and the output's gradient, (1, heads, length, d), and the table p (rows, d).

    Row delta of p is the position vector of the distance delta.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    p: Tensor

    @classmethod
    def make(cls, heads: int, length: int, d: int, dtype=torch.float32, queries=None) -> Inputs:
        """Return random tensors, and a table of wavelets with a row for each distance."""
        random = torch.Generator().manual_seed(0)
        rows = (length if queries is None else queries, length, length, length)
        tensors = [torch.randn(1, heads, n, d, generator=random).to(dtype) for n in rows]
        p = torch.from_numpy(table(length, d)).to(dtype)
        return cls(*tensors, p)

    def with_learned(self, rows: int) -> Inputs:
        """Return the same inputs with a table of random numbers, which no kernel can compress."""
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
        """Operations of the two products, for the pairs with delta >= 0: 2 L^2 d a head."""
        _, heads, length, d = self.k.shape
        return 2 * heads * length**2 * d

    @property
    def delta(self) -> Tensor:
        return torch.arange(self.length)[:, None] - torch.arange(self.length)

    @cached_property
    def index(self) -> Tensor:
        """The row of p for each (query, key), expanded over the heads.

        Distances without a row have the last one; `near` masks them.
        """
        clamped = self.delta.clamp(0, len(self.p) - 1)
        return clamped.expand(*self.q.shape[:2], -1, -1)

    @cached_property
    def hidden(self) -> Tensor:
        return self.delta < 0

    @cached_property
    def near(self) -> Tensor | None:
        """True where the table has a row for the distance; None if it always has one."""
        return None if len(self.p) >= self.length else self.delta < len(self.p)

    @cached_property
    def relative_table(self):
        """The table of wavelets as an ops.relative_table, which finds its own zones."""
        return ops.relative_table(torch.from_numpy(table(self.length, self.k.shape[-1])))


def table(rows: int, d: int):
    """Return wavelets at the distances 0 to rows - 1, of 8 scales (4 if the head is small)."""
    scale, shift = wavepe.wavelet_grid(d, scales=8 if d % 8 == 0 and d > 16 else 4)
    return wavepe.wavelet_table(rows, scale, shift)


def module_of(spec: str, d: int, heads: int):
    """Return a `wavepe.nn.Attention`; the layer's input, if it is read, has the size d, too.

    Self-Extend is in evaluation mode, because in training it is plain RoPE.
    """
    import wavepe.nn

    return wavepe.nn.Attention(spec, d, heads, dim=d).train("self_extend" not in spec)


# ------------------------------------------------------------------ attention without wavepe


def gathered(q, k, v, p, index: Tensor, hidden: Tensor, near: Tensor | None = None) -> Tensor:
    """Gather q @ p.T by distance, add it to q @ k.T, apply the softmax, and multiply by v."""
    bias = (q @ p.T).gather(-1, index)
    if near is not None:
        bias = bias * near
    scores = (q @ k.mT + bias) * q.shape[-1] ** -0.5
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def skewed(q, k, v, p, hidden: Tensor) -> Tensor:
    """Compute the same by the pad and reshape of Music Transformer.

    p must have a row for each distance.
    """
    t = pad(q @ p.flip(0).T, (1, 0))
    *outer, rows, wide = t.shape
    bias = t.reshape(*outer, wide, rows)[..., 1:, :]
    scores = (q @ k.mT + bias) * q.shape[-1] ** -0.5
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def dense(q, k, v, p, index: Tensor, hidden: Tensor, near: Tensor | None = None) -> Tensor:
    """Call PyTorch's attention with the position term as its mask."""
    bias = (q @ p.T).gather(-1, index) * q.shape[-1] ** -0.5
    if near is not None:
        bias = bias * near
    return scaled_dot_product_attention(q, k, v, bias.masked_fill(hidden, -torch.inf))


def flexed(x: Inputs, compiler: Compiler) -> Call | None:
    """Return a call of FlexAttention, which reads the position term from q @ p.T.

    On CPUs it has no backward pass. None if torch.compile is off.
    """

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
    """Call PyTorch's attention without positions."""
    return scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)


# ------------------------------------------------------------------ the judge


def exact_results(
    x: Inputs,
    p: Tensor | None,
    slopes: Tensor | None = None,
    leaves: tuple[str, ...] = (),
    bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return out and the gradients of `leaves` (names among q, k, v, p, bias), in float64.

    The bias is (heads, keys); its columns are the distances 0, 1, ... The queries are computed in
    blocks, so that memory stays bounded; autograd sums the gradients over the blocks.
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
    """Return a judge of out and the gradients of `leaves`.

    The bound of each result is TOLERANCE times its largest element.
    """
    exact = tuple(map(plain, exact_results(x, p, slopes, leaves, bias)))
    return judge(exact, tuple(TOLERANCE[x.q.dtype] * abs(right).max() for right in exact))
