"""Checks of the arguments of attention where the CPU's kernel, which checks its own, does not run.

That is for fake tensors, whose sizes may be symbols, for the GPU, and for attention in plain torch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arrays.relative_bias import BEYOND
from ..common import checks
from ._common import (
    FLOATS,
    INTEGERS,
    check,
    check_choice,
    check_device,
    check_dtype,
    flag,
    integer,
    number,
    run_check,
    wide,
)
from ._torch_private import has_shape, holds, is_known


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


OPTIONAL = ("q_rel", "slopes", "key_mask", "segments", "mask", "bias", "sinks")


def plain_options(compiling: bool, **options: Any) -> list[Any]:
    """Return options as plain bool, str, int and float; a compiler's numbers stay symbols."""
    plain = []
    for name, value in options.items():
        if name in ("causal", "return_lse"):
            value = flag(name, value)
        elif name in ("beyond", "bias_beyond"):
            check_choice(name, value, BEYOND)
        elif compiling:
            if isinstance(value, Tensor):
                number(name, value)
        elif name in ("first", "bias_first") or (name == "window" and value is not None):
            value = integer(name, value)
        elif value is not None or name == "dropout_p":
            value = number(name, value)
        plain.append(value)
    return plain


def check_mask(name: str, mask: Tensor) -> None:
    """Raise for a mask of another dtype or 2 or 3 axes, with advice how to convert it."""
    if mask.dtype != torch.bool:
        advice = f"{name} != 0"
        if mask.is_floating_point():
            advice = f"{name} == 0 for a mask of 0 and -inf, {advice} for one of 0 and 1"
        text = f"{name} must be bool, with True for visible keys: pass {advice}"
        check(False, f"{text}; got {mask.dtype}")
    if name == "mask" and mask.dim() in (2, 3):
        three = "mask[:, None] of (B, m, n), mask[None] of (H, m, n)"
        two = "mask[None, None] of (m, n), or key_mask of (B, n)"
        advice = two if mask.dim() == 2 else three
        check(False, f"mask must be (B|1, H|1, m, n), got {tuple(mask.shape)}; give {advice}")


# Messages are made on failure only, because a compiler would fix the sizes in them.
def check_arguments(call: Arguments) -> None:
    """Raise RuntimeError if arguments are wrong or do not fit together."""
    q = call.q
    names = ("q", "k", "v", "p", "offset", *OPTIONAL)
    tensors = {name: x for name in names if (x := getattr(call, name)) is not None}
    check_device(**tensors)
    check_dtype("q", q)
    for name, x in tensors.items():
        if name in ("k", "v", "p", "q_rel") and x.dtype != q.dtype:
            check(False, f"q and {name} must have one dtype, got {q.dtype} and {x.dtype}")
        if name in ("bias", "sinks") and x.dtype != wide(q):
            check(False, f"{name} must be {wide(q)} for q of {q.dtype}, got {x.dtype}")
        if name in ("offset", "segments", "slopes"):
            check_dtype(name, x, FLOATS if name == "slopes" else INTEGERS)
        if name in ("mask", "key_mask"):
            check_mask(name, x)
    _check_shapes(tensors)
    for option, name, axis in (("beyond", "p", -2), ("bias_beyond", "bias", -1)):
        check_choice(option, beyond := getattr(call, option), BEYOND)
        if name in tensors and beyond == "edge":
            run_check(checks.edge, option, beyond, int(holds(tensors[name].shape[axis] > 0)))
    if not 0 <= call.dropout_p <= 1:
        check(False, f"dropout_p must lie in 0..1, got {call.dropout_p}")
    if call.window is not None and not holds(call.window >= 0):
        check(False, f"window must not be negative, got {call.window}")
    if call.scale is not None and not -math.inf < call.scale < math.inf:
        check(False, f"scale must be finite, got {call.scale}")
    # The inverse must be a normal number of float32, too. csrc/torch/attention_call.cpp has the
    # same limits.
    most = 1e300 if q.dtype == torch.float64 else 1e30
    if call.softcap is not None and not 1 / most <= call.softcap <= most:
        check(False, f"softcap must lie in {1 / most:g}..{most:g}, got {float(call.softcap):g}")


def _check_shapes(tensors: dict[str, Tensor]) -> None:
    operands = {name: x for name, x in tensors.items() if name in ("q", "k", "v", "p", "q_rel")}
    run_check(checks.sizes, operands, lambda one, other: holds(one == other))
    for name in "qkv":
        if tensors[name].dim() != 4:
            check(False, f"{name} must be (B, heads, length, size), got {checks.listed(operands)}")
    (batch, heads, queries, d), (_, key_heads, keys, _) = tensors["q"].shape, tensors["k"].shape
    if not holds(heads == 0 if is_known(key_heads == 0) else heads % key_heads == 0):
        run_check(checks.heads, heads, key_heads, operands)
    w, c = tensors["p"].shape[-2:] if "p" in tensors else (0, d)
    w_bias = tensors["bias"].shape[-1] if "bias" in tensors and tensors["bias"].dim() else 0
    over_keys: tuple[tuple[int, ...], ...] = ((batch, keys), (1, keys))
    allowed: dict[str, tuple[tuple[int, ...], ...]] = {
        "q": ((batch, heads, queries, d),),
        "k": ((batch, key_heads, keys, d),),
        "v": ((batch, key_heads, keys, tensors["v"].shape[-1]),),
        "p": ((w, c), (heads, w, c)),
        "q_rel": ((batch, heads, queries, c),),
        "slopes": ((heads,),),
        "bias": ((w_bias,), (heads, w_bias)),
        "sinks": ((heads,),),
        "offset": ((), (1,), (batch,)),
        "key_mask": over_keys,
        "segments": over_keys,
        "mask": tuple((b, h, queries, keys) for b in (batch, 1) for h in (heads, 1)),
    }
    for name, x in tensors.items():
        shapes = (shape for shape in allowed[name] if len(shape) == x.dim())
        if not holds(*(has_shape(x, shape) for shape in shapes)):
            listing = " or ".join(map(str, dict.fromkeys(allowed[name])))
            got = checks.listed(operands) if name in operands else tuple(x.shape)
            advice = f"; a mask of keys alone is key_mask {(batch, keys)}" * (name == "mask")
            check(False, f"{name} must be {listing}, got {got}{advice}")
    if "segments" in tensors and not holds(queries == keys):
        check(False, f"segments need m = n, got {queries} queries and {keys} keys")
