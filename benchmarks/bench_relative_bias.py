"""Cases of causal relative_bias [W][S], against a matrix product whose rows are then shifted.

Counted are the floating point operations that the result needs: 2 d for each (query, key) with
delta >= 0, and three times as many with the gradients of q and p. The rivals compute the whole
product, which takes twice as many.

Rivals
    numpy    q @ p.T, then a fancy index
    eager    q @ p.T, then gather and masked_fill; the index is built beforehand
    skew     q @ p.flip(0).T, then the pad-and-reshape of Music Transformer, and tril
    compile  torch.compile of eager
    compile-skew  torch.compile of skew
    matmul   q @ p.T alone, with its own two gradients, as a reference: another result
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import wavepe
import wavepe.ops as ops
from torch import Tensor

from .case import Call, Case, Compiler, judge, plain

FLOOR = ("matmul",)
BOUND = (
    "min(n + 1, 8 sqrt(n)) x 2^-24 of the sum of abs(products), n the number of terms: "
    "any order of adding, errors of random sign beyond 64 terms; and 2^-149 per term, subnormal"
)


@dataclass
class Inputs:
    """q (H, n, d), p (n, d) and the gradient of the output; index and mask for the rivals."""

    q: Tensor
    p: Tensor
    grad: Tensor
    index: Tensor
    hidden: Tensor

    @classmethod
    def make(cls, heads: int, length: int, d: int) -> Inputs:
        random = torch.Generator().manual_seed(0)
        q = torch.randn(heads, length, d, generator=random)
        scale, shift = wavepe.wavelet_grid(d, scales=8)
        p = torch.from_numpy(wavepe.wavelet_table(length, scale, shift))
        grad = torch.randn(heads, length, length, generator=random)
        delta = torch.arange(length)[:, None] - torch.arange(length)
        index = delta.clamp(min=0).expand(heads, -1, -1)
        return cls(q, p, grad, index, delta < 0)

    @property
    def size(self) -> str:
        heads, length, d = self.q.shape
        return f"{heads} heads x {length} x {length}, d {d}"

    @property
    def flops(self) -> int:
        heads, length, d = self.q.shape
        return heads * length * (length + 1) * d  # 2 d for each of n (n + 1) / 2 pairs

    def with_grad(self) -> tuple[Tensor, Tensor]:
        return self.q.clone().requires_grad_(), self.p.clone().requires_grad_()


# ------------------------------------------------------------------ rivals


def gathered(q: Tensor, p: Tensor, index: Tensor, hidden: Tensor) -> Tensor:
    return (q @ p.T).gather(-1, index).masked_fill(hidden, 0)


def skewed(q: Tensor, p: Tensor) -> Tensor:
    t = torch.nn.functional.pad(q @ p.flip(0).T, (1, 0))
    heads, length, wide = t.shape
    return t.reshape(heads, wide, length)[:, 1:].tril()


def with_numpy(q: np.ndarray, p: np.ndarray, delta: np.ndarray) -> np.ndarray:
    rows = np.arange(len(delta))[:, None]
    return np.where(delta >= 0, (q @ p.T)[:, rows, np.maximum(delta, 0)], np.float32(0))


# ------------------------------------------------------------------ judges


def _allowed(terms: int, size: np.ndarray) -> np.ndarray:
    return min(terms + 1, 8 * terms**0.5) * 2.0**-24 * size + terms * 2.0**-149


def _bias(q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Return out[:, i, j] = q[:, i] . p[i - j], computed row by row."""
    out = np.zeros((*q.shape[:2], len(p)))
    for i in range(q.shape[1]):
        out[:, i, : i + 1] = q[:, i] @ p[i::-1].T
    return out


def _gradients(q: np.ndarray, p: np.ndarray, grad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return dq[:, i] = sum of grad[:, i, j] p[i - j], dp[i - j] = sum of grad[:, i, j] q[:, i]."""
    dq, dp = np.zeros_like(q), np.zeros_like(p)
    for i in range(q.shape[1]):
        by_delta = grad[:, i, i::-1]
        dq[:, i] = by_delta @ p[: i + 1]
        dp[: i + 1] += by_delta.T @ q[:, i]
    return dq, dp


def forward_judge(x: Inputs):
    q, p = plain(x.q), plain(x.p)
    return judge((_bias(q, p),), (_allowed(q.shape[-1], _bias(abs(q), abs(p))),))


def training_judge(x: Inputs):
    q, p, grad = plain(x.q), plain(x.p), plain(x.grad)
    exact = (_bias(q, p), *_gradients(q, p, grad))
    sizes = (_bias(abs(q), abs(p)), *_gradients(abs(q), abs(p), abs(grad)))
    terms = (q.shape[-1], q.shape[1], q.shape[0] * q.shape[1])
    bounds = tuple(map(_allowed, terms, sizes))
    return judge(exact, bounds)


# ------------------------------------------------------------------ cases


def forward_case(x: Inputs, compiler: Compiler) -> Case:
    length, d = x.p.shape
    q, p = x.q.numpy(), x.p.numpy()
    delta = np.arange(length)[:, None] - np.arange(length)
    return Case(
        op="ops.relative_bias",
        size=x.size,
        dtype="float32",
        ours=lambda: ops.relative_bias(x.q, x.p, length),
        rivals={
            "numpy": lambda: with_numpy(q, p, delta),
            "eager": lambda: gathered(x.q, x.p, x.index, x.hidden),
            "skew": lambda: skewed(x.q, x.p),
            "compile": compiler(gathered, x.q, x.p, x.index, x.hidden),
            "compile-skew": compiler(skewed, x.q, x.p),
            "matmul": lambda: x.q @ x.p.T,
        },
        work=x.flops,
        unit="GFLOP/s",
        judge=forward_judge(x),
        bound=BOUND,
        headline=("warm",) if d > 64 or length < 1024 else (),
        floor=FLOOR,
    )


def training_case(x: Inputs, compiler: Compiler) -> Case:
    q, p = x.with_grad()
    length, d = p.shape

    def trained(forward: Callable[..., Tensor] | None, *more) -> Call | None:
        if forward is None:
            return None

        def call():
            out = forward(q, p, *more)
            return out, *torch.autograd.grad(out, (q, p), x.grad)

        return call

    return Case(
        op="ops.relative_bias + gradients",
        size=x.size,
        dtype="float32",
        ours=trained(lambda q, p: ops.relative_bias(q, p, length)),
        rivals={
            "eager": trained(gathered, x.index, x.hidden),
            "skew": trained(skewed),
            "compile": trained(compiler.function(gathered), x.index, x.hidden),
            "compile-skew": trained(compiler.function(skewed)),
            "matmul": trained(lambda q, p: q @ p.T),
        },
        work=3 * x.flops,
        unit="GFLOP/s",
        judge=training_judge(x),
        bound=BOUND,
        memory=("warm",),
        headline=("warm",) if d > 64 or length < 1024 else (),
        floor=FLOOR,
    )


def numpy_case(x: Inputs) -> Case:
    q, p = x.q.numpy(), x.p.numpy()
    length = len(p)
    delta = np.arange(length)[:, None] - np.arange(length)
    return Case(
        op="wavepe.relative_bias",
        size=x.size,
        dtype="float32",
        ours=lambda: wavepe.relative_bias(q, p, length),
        rivals={"numpy": lambda: with_numpy(q, p, delta), "matmul": lambda: q @ p.T},
        work=x.flops,
        unit="GFLOP/s",
        judge=forward_judge(x),
        bound=BOUND,
        memory=("warm",),
        floor=FLOOR,
    )


def cases(quick: bool, compiler: Compiler) -> Iterator[Case]:
    """Yield all cases; each is made when it is asked for."""
    heads, length = (2, 32) if quick else (8, 1024)
    for d in (16,) if quick else (64, 128):
        x = Inputs.make(heads, length, d)
        yield forward_case(x, compiler)
        yield training_case(x, compiler)
    yield numpy_case(x)
