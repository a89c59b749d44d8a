"""Cases of rope, rope_ and rope_qk [R], against the code of Hugging Face, NumPy and PyTorch users.

Queries and keys are strided views, (B, L, H, d).transpose(1, 2), as attention layers pass them.
There are 32 + 8 heads of size 128, and 8 + 2 heads at 16384 tokens. Counted are the bytes of q and
k, read and written once, and of cos and sin, read once. The gradients count like q and k.

Rivals
    hf       apply_rotary_pos_emb of transformers: Llama's for half-split pairs, Cohere's for
             interleaved ones. Its tables are in x's dtype, as its models make them. In bfloat16
             Llama's function rounds after every operation, so it is less exact.
    eager    the expression in PyTorch: half-split by chunks, interleaved by complex numbers.
             bfloat16 is computed in float32 and rounded once, as in wavepe.
    compile  torch.compile of the expression.
    numpy    the expression in NumPy, float32.
    clone, copy_   no rotation: q and k are copied to new tensors, or to existing ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import wavepe
import wavepe.ops as ops
from torch import Tensor

from .case import Call, Case, Compiler, judge, plain

FLOOR = ("clone", "copy_")
BOUND = {
    torch.float32: "2 x 2^-24 (abs(a cos) + abs(b sin)): two products and a difference",
    torch.bfloat16: "half a bfloat16 ulp of the result, plus 4 x 2^-24 of float32 arithmetic",
}


@dataclass
class Inputs:
    """q and k (1, H, L, d), cos and sin (L, d/2) in float32, and the layout of the pairs."""

    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool

    @classmethod
    def make(cls, quick: bool, dtype: torch.dtype, interleaved: bool, length: int = 2048) -> Inputs:
        heads, kv_heads, d = (4, 1, 16) if quick else (32, 8, 128)
        if length > 2048:
            heads, kv_heads = heads // 4, max(1, kv_heads // 4)
        random = torch.Generator().manual_seed(0)
        q, k = (
            torch.randn(1, length, h, d, generator=random).to(dtype).transpose(1, 2)
            for h in (heads, kv_heads)
        )
        inv_freq, _ = wavepe.rope_frequencies(d)
        cos, sin = ops.rope_table(torch.arange(7, 7 + length), torch.from_numpy(inv_freq))
        return cls(q, k, cos, sin, interleaved)

    @property
    def size(self) -> str:
        _, heads, length, d = self.q.shape
        layout = "interleaved" if self.interleaved else "half-split"
        return f"{heads}+{self.k.shape[1]} heads x {length} x {d}, {layout}"

    @property
    def dtype(self) -> str:
        return str(self.q.dtype).removeprefix("torch.")

    def bytes(self, *tensors: Tensor) -> int:
        """Return the least traffic: each tensor is read and written, and the tables are read."""
        return sum(2 * x.nbytes for x in tensors) + self.cos.nbytes + self.sin.nbytes

    def judge(self, *tensors: Tensor):
        """Return a judge of the rotated tensors, against float64."""
        return judge(*self._exact(tensors, plain(self.sin)))

    def judge_gradients(self, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]):
        """Return a judge of the rotated tensors, and of the gradients, which are rotated back."""
        forward, back = self._exact(tensors, plain(self.sin)), self._exact(grads, -plain(self.sin))
        return judge(forward[0] + back[0], forward[1] + back[1])

    def _exact(self, tensors: tuple[Tensor, ...], sin: np.ndarray):
        cos = plain(self.cos)
        exact, bounds = [], []
        for x in map(plain, tensors):
            a, b = (x[..., i] for i in pairs(x.shape[-1], self.interleaved))
            y, size = np.empty_like(x), np.empty_like(x)
            first, second = pairs(x.shape[-1], self.interleaved)
            y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
            size[..., first] = abs(a * cos) + abs(b * sin)
            size[..., second] = abs(b * cos) + abs(a * sin)
            low = self.q.dtype == torch.bfloat16
            bounds.append(2.0**-8 * abs(y) + 2.0**-22 * size if low else 2.0**-23 * size)
            exact.append(y)
        return tuple(exact), tuple(bounds)


def pairs(d: int, interleaved: bool) -> tuple[slice, slice]:
    """Return the elements of a head that are first in their pair, and those that are second."""
    if interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, d // 2), slice(d // 2, None)


# ------------------------------------------------------------------ rivals


def half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)


def complex_product(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate interleaved pairs as in Meta's code of Llama."""
    z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(z * turn).flatten(-2).to(x.dtype)


def in_place(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    first, second = pairs(x.shape[-1], interleaved)
    a, b = x[..., first], x[..., second]
    turned = a * cos - b * sin, b * cos + a * sin
    a.copy_(turned[0])
    b.copy_(turned[1])
    return x


def with_numpy(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    first, second = pairs(x.shape[-1], interleaved)
    a, b = x[..., first], x[..., second]
    turned = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        return np.stack(turned, -1).reshape(x.shape)
    return np.concatenate(turned, -1)


def hugging_face(x: Inputs, notes: list[str]) -> Call | None:
    family = "cohere" if x.interleaved else "llama"
    try:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ImportError as error:
        notes.append(f"hf left out: {error}")
        return None
    if x.interleaved:
        tables = [t.repeat_interleave(2, -1) for t in (x.cos, x.sin)]
    else:
        tables = [torch.cat((t, t), -1) for t in (x.cos, x.sin)]
    cos, sin = (t[None].to(x.q.dtype) for t in tables)
    return partial(module.apply_rotary_pos_emb, x.q, x.k, cos, sin)


def torch_rivals(x: Inputs, tensors: tuple[Tensor, ...], compiler: Compiler) -> dict[str, Any]:
    expression = interleaved if x.interleaved else half_split
    turn = torch.complex(x.cos, x.sin)

    def eager():
        if x.interleaved:
            return tuple(complex_product(t, turn) for t in tensors)
        return tuple(half_split(t, x.cos, x.sin) for t in tensors)

    def all_of(cos, sin, *tensors):
        return tuple(expression(t, cos, sin) for t in tensors)

    kept = [t.clone() for t in tensors]
    return {
        "eager": eager,
        "compile": compiler(all_of, x.cos, x.sin, *tensors),
        "clone": lambda: [t.clone() for t in tensors],
        "copy_": lambda: [to.copy_(t) for to, t in zip(kept, tensors, strict=True)],
    }


# ------------------------------------------------------------------ cases


def qk_case(x: Inputs, compiler: Compiler) -> Case:
    """Return a case of rope_qk. With one token a call is short, so many are timed together."""
    notes: list[str] = []
    one_token = x.q.shape[2] == 1
    full = x.q.dtype == torch.float32
    headline: tuple[str, ...] = ()
    if x.q.shape[2] == 2048:
        headline = ("warm",) if full == x.interleaved else ("fresh", "warm") if full else ()
    elif one_token and full and not x.interleaved:
        headline = ("warm",)
    rivals = {"hf": hugging_face(x, notes), **torch_rivals(x, (x.q, x.k), compiler)}
    if full:
        arrays = [t.numpy() for t in (x.q, x.k)]
        cos, sin = x.cos.numpy(), x.sin.numpy()
        rivals["numpy"] = lambda: [with_numpy(t, cos, sin, x.interleaved) for t in arrays]
    return Case(
        op="ops.rope_qk",
        size=x.size,
        dtype=x.dtype,
        ours=lambda: ops.rope_qk(x.q, x.k, x.cos, x.sin, interleaved=x.interleaved),
        rivals=rivals,
        work=x.bytes(x.q, x.k),
        unit="GB/s",
        judge=x.judge(x.q, x.k),
        bound=BOUND[x.q.dtype],
        memory=("warm",) if one_token else ("fresh", "warm"),
        headline=headline,
        batch=200 if one_token else 1,
        inference=one_token,
        floor=FLOOR,
        notes=notes,
    )


def gradients_case(x: Inputs, compiler: Compiler) -> Case:
    """Return a case of rope_qk and the gradients of q and k."""
    leaves = tuple(t.clone().requires_grad_() for t in (x.q, x.k))
    turned = Inputs(*leaves, x.cos, x.sin, x.interleaved)
    random = torch.Generator().manual_seed(1)
    grads = tuple(torch.randn(t.shape, generator=random).to(t.dtype) for t in leaves)
    grads = tuple(torch.empty_like(t).copy_(g) for t, g in zip(leaves, grads, strict=True))
    notes: list[str] = []
    theirs = torch_rivals(turned, leaves, compiler)
    rivals = {"hf": hugging_face(turned, notes), **{n: theirs[n] for n in ("eager", "compile")}}

    def with_gradients(call: Call | None) -> Call | None:
        def both():
            out = call()
            return (*(t.detach() for t in out), *torch.autograd.grad(out, leaves, grads))

        return both if call else None

    return Case(
        op="ops.rope_qk + gradients",
        size=x.size,
        dtype=x.dtype,
        ours=with_gradients(lambda: ops.rope_qk(*leaves, x.cos, x.sin, interleaved=x.interleaved)),
        rivals={
            **{name: with_gradients(call) for name, call in rivals.items()},
            "clone": lambda: [t.clone() for t in (x.q, x.k, *grads)],
        },
        work=2 * x.bytes(x.q, x.k),
        unit="GB/s",
        judge=x.judge_gradients((x.q, x.k), grads),
        bound=BOUND[x.q.dtype],
        memory=("warm",),
        batch=50 if x.q.shape[2] == 1 else 1,
        floor=FLOOR,
        notes=notes,
    )


def in_place_case(x: Inputs, compiler: Compiler) -> Case:
    """Return a case of rope_ on q and k.

    Every call rotates the values further, so they are reset before a call that is judged.
    """
    tensors = [x.q.clone(), x.k.clone()]
    kept = [t.clone() for t in tensors]

    def both(function, *more):
        return [function(t, x.cos, x.sin, *more) for t in tensors]

    def expression(cos, sin, q, k):
        return in_place(q, cos, sin, x.interleaved), in_place(k, cos, sin, x.interleaved)

    def reset():
        tensors[0].copy_(x.q)
        tensors[1].copy_(x.k)

    return Case(
        op="ops.rope_",
        size=x.size,
        dtype=x.dtype,
        ours=lambda: [ops.rope_(t, x.cos, x.sin, interleaved=x.interleaved) for t in tensors],
        rivals={
            "eager": lambda: both(in_place, x.interleaved),
            "compile": compiler(expression, x.cos, x.sin, *tensors),
            "copy_": lambda: [to.copy_(t) for to, t in zip(kept, tensors, strict=True)],
        },
        work=x.bytes(x.q, x.k),
        unit="GB/s",
        judge=x.judge(x.q, x.k),
        bound=BOUND[x.q.dtype],
        memory=("in place",),
        reset=reset,
        floor=FLOOR,
    )


def numpy_case(x: Inputs) -> Case:
    q, cos, sin = x.q.numpy(), x.cos.numpy(), x.sin.numpy()
    kept = q.copy(order="K")

    def copyto():
        np.copyto(kept, q)

    return Case(
        op="wavepe.rope",
        size=x.size.partition("+")[0] + x.size[x.size.index(" heads") :],
        dtype=x.dtype,
        ours=lambda: wavepe.rope(q, cos, sin, interleaved=x.interleaved),
        rivals={
            "numpy": lambda: with_numpy(q, cos, sin, x.interleaved),
            "clone": lambda: q.copy(order="K"),
            "copy_": copyto,
        },
        work=x.bytes(x.q),
        unit="GB/s",
        judge=x.judge(x.q),
        bound=BOUND[x.q.dtype],
        floor=FLOOR,
    )


def cases(quick: bool, compiler: Compiler) -> Iterator[Case]:
    """Yield all cases; each is made when it is asked for."""
    for length in (1, 32) if quick else (1, 128, 2048, 16384):
        for dtype in (torch.float32, torch.bfloat16):
            for pairs_interleaved in (False, True):
                x = Inputs.make(quick, dtype, pairs_interleaved, length)
                yield qk_case(x, compiler)
                yield gradients_case(x, compiler)
                if length > 1:
                    yield in_place_case(x, compiler)
    yield numpy_case(Inputs.make(quick, torch.float32, False, 32 if quick else 2048))
