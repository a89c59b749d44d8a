"""Cases of causal attention with relative positions, against PyTorch's without positions.

Counted are the floating point operations of the two products for the pairs with delta >= 0, which
are 2 L^2 d for each head. With gradients they are 3.5 times as many, for five more products. The
position term does not count. There are 8192 / L heads, at least one, so that the cost of a case is
proportional to its length. A size is heads, length and head size. All rows are in warm memory.

The kinds
    wavelets  a constant table, ops.relative_table of wavelets at all distances
    learned   p is a tensor with a gradient: L rows, or 512, and no term beyond them
    alibi     slopes
    bias      a number for each head and distance, with a gradient

Other calls of wavepe, timed in the same variant
    plain    the same kernel without positions, as a reference: it does less work
    slopes   (bias) the same kernel with slopes instead

Rivals
    sdpa     scaled_dot_product_attention, causal, without positions: another result
    gather   (q @ k.T + (q @ p.T).gather(...)), masked_fill, softmax, @ v
    skew     the same with the pad-and-reshape of Music Transformer
    dense    scaled_dot_product_attention with the position term (alibi: made once) as its mask
    compile  torch.compile of gather
    compile-flex  FlexAttention with the position term as its score_mod
    numpy    gather in NumPy
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import wavepe
import wavepe.ops as ops
from torch import Tensor

from .attention_inputs import BOUND, Inputs, dense, flexed, gathered, judged, sdpa, skewed
from .case import Call, Case, Compiler

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
HEAD_SIZES = (32, 64, 128)
CHOSEN = ((128, 64), (512, 64), (1024, 64), (4096, 64), (512, 128), (2048, 128))
COMPILED = (1024, 64)  # compiling takes half a minute
IN_EVERY_VARIANT = (512, 64)
ROWS_AT_ALL_LENGTHS = 8192
LEARNED_ROWS = 512
TINY = (32, 16)
HEADLINE = (COMPILED, TINY)
KEYS = (1024, 4096, 32768)
BY_DISTANCE = ("alibi", "bias")
FLOOR = ("sdpa", "plain", "slopes")


def inputs(length: int, d: int, dtype: torch.dtype = torch.float32) -> Inputs:
    return Inputs.make(max(1, ROWS_AT_ALL_LENGTHS // length), length, d, dtype)


# ------------------------------------------------------------------ calls


def with_gradients(
    forward: Callable[..., Tensor] | None, leaves: tuple[Tensor, ...], grad: Tensor, *more
) -> Call | None:
    """Return a call that computes forward(*leaves, *more) and the gradients of the leaves."""
    if forward is None:
        return None

    def call():
        out = forward(*leaves, *more)
        return out, *torch.autograd.grad(out, leaves, grad)

    return call


def trained(x: Inputs, *names: str) -> tuple[Tensor, ...]:
    return tuple(getattr(x, name).clone().requires_grad_() for name in names)


def case_of(x: Inputs, kind: str, *, gradients: bool = False, **more) -> Case:
    """Return a case of square attention."""
    _, _, length, d = x.k.shape
    plain_kind = kind not in BY_DISTANCE and x.q.dtype == torch.float32
    return Case(
        op="ops.attention" + " + gradients" * gradients,
        size=f"{x.size}, {kind}",
        dtype=x.dtype,
        work=(3.5 if gradients else 1) * x.flops,
        unit="GFLOP/s",
        bound=BOUND,
        memory=("warm",),
        headline=("warm",) if (length, d) in HEADLINE and plain_kind else (),
        floor=FLOOR,
        **more,
    )


# ------------------------------------------------------------------ cases


def without_slow(x: Inputs, rivals: dict[str, Call | None]) -> dict[str, Call | None]:
    """Drop the rivals whose bfloat16 products are a hundred times slower on many CPUs."""
    low = x.q.dtype != torch.float32
    return {name: call for name, call in rivals.items() if not low or name in ("sdpa", "dense")}


def wavelets(x: Inputs, compiler: Compiler, every_variant: bool) -> Case:
    known = x.relative_table
    table = (x.q, x.k, x.v, x.p, x.index, x.hidden)
    rivals = {
        "sdpa": lambda: sdpa(x.q, x.k, x.v),
        "gather": lambda: gathered(*table),
        "skew": lambda: skewed(x.q, x.k, x.v, x.p, x.hidden),
        "dense": lambda: dense(*table),
        "compile": compiler(gathered, *table),
        "compile-flex": flexed(x, compiler),
    }
    return case_of(
        x,
        "wavelets",
        ours=lambda: ops.attention(x.q, x.k, x.v, p=known),
        beside={"plain": lambda: ops.attention(x.q, x.k, x.v)},
        rivals=without_slow(x, rivals),
        judge=judged(x, x.p),
        every_variant=every_variant,
    )


def wavelets_with_gradients(x: Inputs, compiler: Compiler, every_variant: bool) -> Case:
    known, leaves = x.relative_table, trained(x, "q", "k", "v")
    table = (x.p, x.index, x.hidden)

    def call(forward, *more):
        return with_gradients(forward, leaves, x.grad, *more)

    rivals = {
        "sdpa": call(sdpa),
        "gather": call(gathered, *table),
        "skew": call(skewed, x.p, x.hidden),
        "dense": call(dense, *table),
        "compile": call(compiler.function(gathered), *table),
    }
    return case_of(
        x,
        "wavelets",
        gradients=True,
        ours=call(lambda q, k, v: ops.attention(q, k, v, p=known)),
        beside={"plain": call(ops.attention)},
        rivals=without_slow(x, rivals),
        judge=judged(x, x.p, leaves=("q", "k", "v")),
        every_variant=every_variant,
    )


def learned_with_gradients(x: Inputs, rows: int) -> Case:
    x = x.with_learned(rows)
    leaves = trained(x, "q", "k", "v", "p")
    return case_of(
        x,
        f"learned, {rows} rows",
        gradients=True,
        ours=with_gradients(lambda q, k, v, p: ops.attention(q, k, v, p=p), leaves, x.grad),
        beside={"plain": with_gradients(ops.attention, leaves[:3], x.grad)},
        rivals={
            "sdpa": with_gradients(sdpa, leaves[:3], x.grad),
            "gather": with_gradients(gathered, leaves, x.grad, x.index, x.hidden, x.near),
        },
        judge=judged(x, x.p, leaves=("q", "k", "v", "p")),
        every_variant=False,
    )


def alibi(x: Inputs, gradients: bool) -> Case:
    slopes = slopes_of(x)
    mask = (-slopes[:, None, None] * x.delta).masked_fill(x.hidden, -torch.inf).to(x.q.dtype)
    call = timed(x, gradients)
    return case_of(
        x,
        "alibi",
        gradients=gradients,
        ours=call(lambda q, k, v: ops.attention(q, k, v, slopes=slopes)),
        beside={"plain": call(ops.attention)},
        rivals={"sdpa": call(sdpa), "dense": call(lambda q, k, v: masked(q, k, v, mask))},
        judge=judged(x, None, slopes.double(), leaves=("q", "k", "v") if gradients else ()),
        every_variant=False,
    )


def bias(x: Inputs, gradients: bool) -> Case:
    slopes, random = slopes_of(x), torch.Generator().manual_seed(1)
    values = torch.randn(x.q.shape[1], x.length, generator=random)
    distance, hidden = x.delta.clamp(min=0), x.hidden

    def with_mask(q, k, v, b):
        return masked(q, k, v, b.to(q.dtype)[:, distance].masked_fill(hidden, -torch.inf))

    call, with_bias = timed(x, gradients), timed(x, gradients, values)
    return case_of(
        x,
        "bias",
        gradients=gradients,
        ours=with_bias(lambda q, k, v, b: ops.attention(q, k, v, bias=b)),
        beside={
            "slopes": call(lambda q, k, v: ops.attention(q, k, v, slopes=slopes)),
            "plain": call(ops.attention),
        },
        rivals=without_slow(x, {"sdpa": call(sdpa), "dense": with_bias(with_mask)}),
        judge=judged(x, None, leaves=("q", "k", "v", "bias") if gradients else (), bias=values),
        every_variant=False,
    )


def slopes_of(x: Inputs) -> Tensor:
    return torch.from_numpy(wavepe.alibi_slopes(x.q.shape[1])).float()


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)


def timed(x: Inputs, gradients: bool, *more: Tensor) -> Callable[[Callable[..., Tensor]], Call]:
    """Return what makes a call of a forward function with q, k, v and more.

    With `gradients` the call computes the gradients of all of them too.
    """
    leaves = tuple(t.clone().requires_grad_(gradients) for t in (x.q, x.k, x.v, *more))
    if gradients:
        return lambda forward: with_gradients(forward, leaves, x.grad)
    return lambda forward: lambda: forward(*leaves)


def one_query(heads: int, keys: int, d: int) -> Case:
    """Return the case of a decoding step. Its bytes are k and v, read once.

    The rival "dense" has its table flipped beforehand.
    """
    x = Inputs.make(heads, keys, d, queries=1)
    known, flipped = x.relative_table, x.p.flip(0).T.contiguous()

    def masked():
        bias = (x.q @ flipped) * d**-0.5
        return torch.nn.functional.scaled_dot_product_attention(x.q, x.k, x.v, bias)

    return Case(
        op="ops.attention, one query",
        size=f"{x.size}, wavelets",
        dtype=x.dtype,
        ours=lambda: ops.attention(x.q, x.k, x.v, p=known),
        beside={"plain": lambda: ops.attention(x.q, x.k, x.v)},
        rivals={"sdpa": lambda: sdpa(x.q, x.k, x.v), "dense": masked},
        work=x.k.nbytes + x.v.nbytes,
        unit="GB/s",
        judge=judged(x, x.p),
        bound=BOUND,
        memory=("warm",),
        inference=True,
        floor=FLOOR,
        every_variant=False,
    )


def with_numpy(q, k, v, p, delta: np.ndarray) -> np.ndarray:
    rows = np.arange(len(delta))[:, None]
    bias = (q @ p.T)[..., rows, np.maximum(delta, 0)]
    scores = np.where(delta >= 0, (q @ k.mT + bias) * q.dtype.type(q.shape[-1] ** -0.5), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def numpy_case(x: Inputs) -> Case:
    q, k, v, p = (t.numpy() for t in (x.q, x.k, x.v, x.p))
    delta = x.delta.numpy()
    return Case(
        op="wavepe.attention",
        size=f"{x.size}, wavelets",
        dtype=x.dtype,
        ours=lambda: wavepe.attention(q, k, v, p=p),
        beside={"plain": lambda: wavepe.attention(q, k, v)},
        rivals={"numpy": lambda: with_numpy(q, k, v, p, delta)},
        work=x.flops,
        unit="GFLOP/s",
        judge=judged(x, x.p),
        bound=BOUND,
        memory=("warm",),
        floor=FLOOR,
        every_variant=False,
    )


def one_size(x: Inputs, compiler: Compiler | None = None, every_variant: bool = False):
    """Yield the cases of wavelets without and with gradients."""
    compiler = compiler or Compiler(enabled=False)
    yield wavelets(x, compiler, every_variant)
    yield wavelets_with_gradients(x, compiler, every_variant)


def learned(x: Inputs, few: int = LEARNED_ROWS) -> Iterator[Case]:
    """Yield the cases of a learned table with `few` rows, and with a row for each distance."""
    for rows in sorted({min(x.length, few), x.length}):
        yield learned_with_gradients(x, rows)


def cases(quick: bool, compiler: Compiler) -> Iterator[Case]:
    """Yield the cases of the chosen sizes; each is made when it is asked for."""
    if quick:
        yield from tiny(compiler)
        return
    for size in CHOSEN:
        used = compiler if size == COMPILED else None
        yield from one_size(inputs(*size), used, every_variant=size == IN_EVERY_VARIANT)
    yield from learned(inputs(*COMPILED))
    yield from others()


def full_cases(compiler: Compiler) -> Iterator[Case]:
    """Yield the cases of all lengths and head sizes, which take half an hour."""
    for d in HEAD_SIZES:
        for length in LENGTHS:
            x, size = inputs(length, d), (length, d)
            used = compiler if size == COMPILED else None
            yield from one_size(x, used, every_variant=size == IN_EVERY_VARIANT)
            yield from learned(x)
    yield from others()
    for length in (512, 4096):
        yield from one_size(inputs(length, 64, torch.bfloat16))
    yield from (one_query(8, keys, 128) for keys in KEYS)


def others() -> Iterator[Case]:
    """Yield the cases beside the grid of lengths and head sizes."""
    for case in (alibi, bias):
        for gradients in (False, True):
            yield case(inputs(1024, 64), gradients)
    yield bias(inputs(1024, 64, torch.bfloat16), gradients=True)
    yield from one_size(inputs(1024, 64, torch.bfloat16))
    yield from (one_query(8, keys, 64) for keys in KEYS)
    if hasattr(wavepe, "attention"):
        yield numpy_case(inputs(1024, 64))


def tiny(compiler: Compiler) -> Iterator[Case]:
    """Yield a tiny case of each kind."""
    x = Inputs.make(2, *TINY)
    yield from one_size(x, compiler, every_variant=True)
    yield from learned(x, few=8)
    for case in (alibi, bias):
        for gradients in (False, True):
            yield case(x, gradients)
    yield from one_size(Inputs.make(2, *TINY, torch.bfloat16))
    yield one_query(2, 48, 16)
    if hasattr(wavepe, "attention"):
        yield numpy_case(x)
