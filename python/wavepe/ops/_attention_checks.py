"""Checks of the arguments of attention outside the CPU kernel.

Options are checked before torch's schema converts them. For fake tensors, for the GPU and for
attention in plain torch, all that the CPU kernel checks is checked here.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arrays.relative_bias import BEYOND
from ._common import (
    FLOATS,
    INTEGERS,
    check,
    check_choice,
    check_device,
    check_dtype,
    integer,
    number,
    wide,
)

_Numbers = tuple[int, int | None, float | None, float | None, float]


def numbers(first: Any, window: Any, softcap: Any, scale: Any, dropout_p: Any) -> _Numbers:
    """Return these options as plain int and float; NumPy's numbers are accepted."""
    return (
        first if type(first) is int and first == 0 else integer("first", first),
        None if window is None else integer("window", window),
        None if softcap is None else number("softcap", softcap),
        None if scale is None else number("scale", scale),
        dropout_p if type(dropout_p) is float else number("dropout_p", dropout_p),
    )


def check_mask(mask: Tensor) -> None:
    """Raise for a mask of another dtype or 2 or 3 axes, with advice how to convert it."""
    if mask.dtype != torch.bool:
        advice = (
            "pass mask == 0 for a mask of 0 and -inf"
            if mask.is_floating_point()
            else "pass mask != 0"
        )
        check(False, f"mask must be bool, with True for visible keys: {advice}; got {mask.dtype}")
    if mask.dim() in (2, 3):
        three = "mask[:, None] of (B, m, n), mask[None] of (H, m, n)"
        advice = "mask[None, None]" if mask.dim() == 2 else three
        check(False, f"mask must be (B|1, H|1, m, n), got {tuple(mask.shape)}; give {advice}")


class Arguments(NamedTuple):
    """The arguments of ``torch.ops.wavepe.attention_forward``."""

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
    sinks: Tensor | None = None


def check_arguments(call: Arguments) -> None:
    """Raise RuntimeError if arguments are wrong or do not fit together.

    Messages are made on failure only, because a compiler would fix the sizes in them.
    """
    q, k, v, p, bias, window, softcap = (
        call.q, call.k, call.v, call.p, call.bias, call.window, call.softcap
    )  # fmt: skip
    optional = ("p", "q_rel", "slopes", "offset", "key_mask", "segments", "mask", "bias", "sinks")
    given = {name: x for name in optional if (x := getattr(call, name)) is not None}
    check_device(q=q, k=k, v=v, **given)
    check_dtype("q", q)
    _check_sizes(q, k, v)
    _check_dtypes({"q": q, "k": k, "v": v, **given})
    _check_shapes(q, k, given)
    check_choice("beyond", call.beyond, BEYOND)
    if p is not None and call.beyond == "edge":
        check(p.shape[-2] > 0, "beyond='edge' needs a table of at least one row")
    check_choice("bias_beyond", call.bias_beyond, BEYOND)
    if bias is not None and call.bias_beyond == "edge":
        check(bias.shape[-1] > 0, "bias_beyond='edge' needs a bias of at least one number")
    if call.q_rel is not None:
        check(p is not None, "q_rel needs a table p")
    if not 0 <= call.dropout_p <= 1:
        check(False, f"dropout_p must lie in 0..1, got {call.dropout_p}")
    if window is not None and window < 0:
        check(False, f"window must not be negative, got {window}")
    if call.scale is not None and not -math.inf < call.scale < math.inf:
        check(False, f"scale must be finite, got {call.scale}")
    if softcap is not None:
        _check_softcap(softcap, q.dtype)


def _check_softcap(softcap: float, dtype: torch.dtype) -> None:
    # In float32, the inverse must be a normal number, too. csrc/torch/attention_call.cpp has the
    # same limits.
    most = 1e300 if dtype == torch.float64 else 1e30
    if not 1 / most <= softcap <= most:
        check(False, f"softcap must lie in {1 / most:g}..{most:g}, got {float(softcap):g}")


def _check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for label, tensor in {"q": q, "k": k, "v": v}.items():
        if tensor.dim() != 4:
            check(False, f"{label} must be (B, heads, length, size), got {tuple(tensor.shape)}")
    batch, heads, _, d = q.shape
    kv_heads = k.shape[1]
    sizes = (
        k.shape[0] == batch and v.shape[0] == batch and v.shape[1:3] == k.shape[1:3]
    ) and k.shape[3] == d
    if not sizes or (heads % kv_heads if kv_heads else heads):
        got = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        check(False, f"q (B, H, m, d), k (B, Hk, n, d), v (B, Hk, n, dv), Hk | H needed, got {got}")


def _check_dtypes(given: dict[str, Tensor]) -> None:
    q = given["q"]
    for name in ("k", "v", "p", "q_rel"):
        if name in given and given[name].dtype != q.dtype:
            check(False, f"q and {name} must have one dtype, got {q.dtype} and {given[name].dtype}")
    for name, known in {"slopes": FLOATS, "offset": INTEGERS, "segments": INTEGERS}.items():
        if name in given:
            check_dtype(name, given[name], known)
    for name in ("bias", "sinks"):
        if name in given and given[name].dtype != wide(q):
            check(False, f"{name} must be {wide(q)} for q of {q.dtype}, got {given[name].dtype}")
    if "key_mask" in given:
        check_dtype("key_mask", given["key_mask"], (torch.bool,))
    if "mask" in given:
        check_mask(given["mask"])


def _check_shapes(q: Tensor, k: Tensor, given: dict[str, Tensor]) -> None:
    batch, heads, queries, d = q.shape
    keys = k.shape[2]
    p = given.get("p")
    c = p.shape[-1] if p is not None and p.dim() else d
    allowed: dict[str, tuple[tuple[int, ...], ...]] = {
        "q_rel": ((batch, heads, queries, c),),
        "slopes": ((heads,),),
        "sinks": ((heads,),),
        "offset": ((), (1,), (batch,)),
        "key_mask": ((batch, keys), (1, keys)),
        "segments": ((batch, keys), (1, keys)),
        "mask": tuple((b, h, queries, keys) for b in (batch, 1) for h in (heads, 1)),
    }
    for name, shapes in allowed.items():
        x = given.get(name)
        if x is not None and not any(tuple(x.shape) == shape for shape in shapes):
            listed = " or ".join(map(str, dict.fromkeys(shapes)))
            check(False, f"{name} must be {listed}, got {tuple(x.shape)}")
    if p is not None and not (p.dim() == 2 or (p.dim() == 3 and p.shape[0] == heads)):
        check(False, f"p must be (w, {c}) or ({heads}, w, {c}), got {tuple(p.shape)}")
    if c != d and "q_rel" not in given:
        check(False, f"p of size {c} with q of head size {d} needs q_rel of size {c}")
    bias = given.get("bias")
    if bias is not None and not (
        bias.dim() in (1, 2) and (bias.dim() == 1 or bias.shape[0] == heads)
    ):
        check(False, f"bias must be (w) or ({heads}, w), got {tuple(bias.shape)}")
    if "segments" in given and queries != keys:
        check(False, f"segments need m = n, got {queries} queries and {keys} keys")
