"""rope, rope_, rope_qk and rope_table for torch [R]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._common import (
    FLOATS,
    INTEGERS,
    check,
    check_choice,
    check_device,
    check_dtype,
    check_tensors,
    not_differentiable,
)

_ops = torch.ops.wavepe


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inverse: bool = False
) -> Tensor:
    """Rotate pairs of the last axis by the angles whose cos and sin are given [R].

    Parameters
    ----------
    x : Tensor (B, H, L, d), or (H, L, d), (L, d)
        float32, float64, bfloat16 or float16, any strides.
    cos, sin : Tensor (L, h) or (1|B, L, h), any float dtype
        h <= d/2 pairs are rotated, the other elements copied. Read as float32 (float64 for
        float64 x). Not differentiated.
    interleaved : bool
        Pairs are (2i, 2i+1) as in GPT-J; else (i, i+h) as in NeoX and Llama.
    inverse : bool
        Rotate by the negative angles.

    Returns
    -------
    Tensor of x's shape, dtype and (dense) strides, differentiable in x.
    """
    check_tensors(x=x, cos=cos, sin=sin)
    return _ops.rope(x, cos, sin, interleaved, inverse)


def rope_(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inverse: bool = False
) -> Tensor:
    """`rope` in place; returns x. Raises where autograd would need the overwritten values."""
    check_tensors(x=x, cos=cos, sin=sin)
    _ops.rope_(x, cos, sin, interleaved, inverse)
    return x


def rope_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rope` of queries and keys, which may have different numbers of heads, in one call [R]."""
    check_tensors(q=q, k=k, cos=cos, sin=sin)
    return _ops.rope_qk(q, k, cos, sin, interleaved, inverse)


def rope_table(
    positions: Tensor,
    inv_freq: Tensor,
    *,
    attention_factor: float = 1.0,
    precision: str = "exact",
    sections: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * inv_freq, exact for positions within +-2^31 [R].

    Parameters
    ----------
    positions : Tensor (...) of any integer dtype, or (..., axes) with `sections`
    inv_freq : Tensor (h,)
        Radians per position of each pair.
    attention_factor : float
        Multiplies cos and sin.
    precision : "exact" or "hf"
        exact: the product without rounding error, cos and sin rounded once. hf: a float32
        product of float32 operands, as Hugging Face computes it.
    sections : sequence of int, optional
        Pairs per axis of positions, summing to h; pair i keeps inv_freq[i].
    dtype : torch.dtype
        float32, float64, bfloat16 or float16 (these two rounded from float64 as torch does).

    Returns
    -------
    (cos, sin) : Tensors (..., h), not differentiable
    """
    check_tensors(positions=positions, inv_freq=inv_freq)
    if sections is not None:
        check(isinstance(sections, Sequence), f"sections must be a list, got {sections!r}")
        sections = list(sections)
    return _ops.rope_table(positions, inv_freq, attention_factor, precision, sections, dtype)


def _check_rope(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_dtype(name, x)
    shape = tuple(x.shape)
    check(2 <= x.dim() <= 4, f"{name} must be (L, d), (H, L, d) or (B, H, L, d), got {shape}")
    batch = x.shape[0] if x.dim() == 4 else 1
    for table_name, table in (("cos", cos), ("sin", sin)):
        check_dtype(table_name, table)
        check(
            table.dim() in (2, 3)
            and table.shape[-2] == x.shape[-2]
            and (table.dim() == 2 or table.shape[0] == 1 or table.shape[0] == batch),
            f"{table_name} must be (L, h) or (1|B, L, h), got {tuple(table.shape)} "
            f"for {name} of shape {shape}",
        )
        check(
            2 * table.shape[-1] <= x.shape[-1],
            f"{table_name} holds {table.shape[-1]} pairs, {name} has head size {x.shape[-1]}",
        )
    check(
        cos.shape[-1] == sin.shape[-1],
        f"cos and sin hold {cos.shape[-1]} and {sin.shape[-1]} pairs",
    )


@torch.library.register_fake("wavepe::rope")
def _(x, cos, sin, interleaved=False, inverse=False):
    check_device(x=x, cos=cos, sin=sin)
    _check_rope("x", x, cos, sin)
    return torch.empty_like(x)


@torch.library.register_fake("wavepe::rope_")
def _(x, cos, sin, interleaved=False, inverse=False):
    check_device(x=x, cos=cos, sin=sin)
    _check_rope("x", x, cos, sin)


@torch.library.register_fake("wavepe::rope_qk")
def _(q, k, cos, sin, interleaved=False, inverse=False):
    check_device(q=q, k=k, cos=cos, sin=sin)
    _check_rope("q", q, cos, sin)
    _check_rope("k", k, cos, sin)
    check(q.dtype == k.dtype, f"q and k must have one dtype, got {q.dtype} and {k.dtype}")
    return torch.empty_like(q), torch.empty_like(k)


@torch.library.register_fake("wavepe::rope_table")
def _(positions, inv_freq, attention_factor=1.0, precision="exact", sections=None, dtype=None):
    check_device(positions=positions, inv_freq=inv_freq)
    check_dtype("positions", positions, INTEGERS)
    check_dtype("inv_freq", inv_freq)
    check(inv_freq.dim() == 1, f"inv_freq must be 1-D (pairs,), got {tuple(inv_freq.shape)}")
    dtype = torch.float32 if dtype is None else dtype
    check(dtype in FLOATS, f"dtype must be a float dtype, got {dtype}")
    check_choice("precision", precision, ("exact", "hf"))
    leading = positions.shape
    if sections is not None:
        pairs, leading = inv_freq.shape[0], positions.shape[:-1]
        check(
            all(size >= 0 for size in sections) and sum(sections) == pairs,
            f"sections {list(sections)} must sum to inv_freq's {pairs} pairs",
        )
        check(
            positions.dim() > 0 and positions.shape[-1] == len(sections),
            f"positions of shape {tuple(positions.shape)} need a last axis of {len(sections)}",
        )
    cos = positions.new_empty((*leading, inv_freq.shape[0]), dtype=dtype)
    return cos, torch.empty_like(cos)


# A rotation's gradient is the rotation back: the same kernel, differentiable again.
def _setup_rope(ctx, inputs, output):
    *_, cos, sin, ctx.interleaved, ctx.inverse = inputs
    if any(ctx.needs_input_grad[len(inputs) - 4 : len(inputs) - 2]):
        raise RuntimeError(
            "wavepe: rope is not differentiable in cos and sin; detach them (they require grad)"
        )
    ctx.save_for_backward(cos, sin)


def _rope_backward(ctx, grad):
    cos, sin = ctx.saved_tensors
    return _ops.rope(grad, cos, sin, ctx.interleaved, not ctx.inverse), None, None, None, None


def _rope_qk_backward(ctx, grad_q, grad_k):
    cos, sin = ctx.saved_tensors
    grads = _ops.rope_qk(grad_q, grad_k, cos, sin, ctx.interleaved, not ctx.inverse)
    return *grads, None, None, None, None


torch.library.register_autograd("wavepe::rope", _rope_backward, setup_context=_setup_rope)
torch.library.register_autograd("wavepe::rope_qk", _rope_qk_backward, setup_context=_setup_rope)
not_differentiable("rope_table", "inv_freq")


# torch.library knows no autograd for operators that write to their arguments: refuse where x needs
# a gradient, and raise x's version, so that backward notices a saved x that was overwritten.
_library = torch.library.Library("wavepe", "FRAGMENT")


def _rope_autograd(keys, x, *args):
    check(
        not (torch.is_grad_enabled() and x.requires_grad),
        "rope_ would overwrite an x that requires grad; use rope, or torch.no_grad()",
    )
    return _ops.rope_.default.redispatch(keys & torch._C._after_autograd_keyset, x, *args)


def _rope_version(keys, x, *args):
    torch.autograd.graph.increment_version(x)
    return _ops.rope_.default.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, x, *args)


_library.impl("rope_", _rope_autograd, "Autograd", with_keyset=True)
_library.impl("rope_", _rope_version, "ADInplaceOrView", with_keyset=True)
