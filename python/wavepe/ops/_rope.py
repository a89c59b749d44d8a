"""rope, rope_ and rope_qk for torch [R]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._common import (
    axis_first,
    check,
    check_device,
    check_dtype,
    check_tensors,
    library,
    recorded,
    register_autograd,
    register_standard,
    wide,
)
from ._compiler import is_compiling, traced
from ._torch_private import below_autograd, holds, transformed, under_transforms

_ops = torch.ops.wavepe
_ROPE, _ROPE_QK = _ops.rope.default, _ops.rope_qk.default


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inverse: bool = False
) -> Tensor:
    """Rotate pairs of elements of x by the angles of a cosine and sine table, as `wavepe.rope`.

    Parameters
    ----------
    x : Tensor (B, H, L, d), (H, L, d) or (L, d)
        Queries or keys of float32, float64, bfloat16 or float16, with any strides.
    cos, sin : Tensor (L, h) or (1|B, L, h), any float dtype
        Cosines and sines of the angles, as `rope_table` returns them; 2h <= d.
    interleaved, inverse : bool
        As in `wavepe.rope`.

    Returns
    -------
    rotated : Tensor of x's shape and dtype
        Its memory is dense, in the order of x's axes. Differentiable in x, but not in cos and sin.

    Raises
    ------
    RuntimeError
        If a shape, dtype or device is wrong, or if cos or sin requires grad.

    Examples
    --------
    >>> import torch
    >>> import wavepe
    >>> from wavepe import ops
    >>> inv_freq, _ = wavepe.rope_frequencies(16)
    >>> cos, sin = ops.rope_table(torch.arange(10), torch.from_numpy(inv_freq))
    >>> ops.rope(torch.randn(2, 4, 10, 16), cos, sin).shape
    torch.Size([2, 4, 10, 16])
    """
    if not (type(x) is type(cos) is type(sin) is Tensor):
        check_tensors(x=x, cos=cos, sin=sin)
    compiling = is_compiling()
    if transformed():
        return _Rope.apply(x, cos, sin, interleaved, inverse)
    if compiling:
        return traced(_ROPE, _standard)(x, cos, sin, interleaved, inverse)
    if recorded(x, cos, sin):
        call = _ROPE if under_transforms() else _Recorded.apply
        return call(x, cos, sin, interleaved, inverse)
    with below_autograd():
        return _ROPE(x, cos, sin, interleaved, inverse)


def rope_(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inverse: bool = False
) -> Tensor:
    """Rotate x in place: `rope` that writes its result to x, and returns x.

    Parameters
    ----------
    x, cos, sin, interleaved, inverse
        As in `rope`.

    Raises
    ------
    RuntimeError
        As in `rope`; also if x requires grad, under torch.func and in forward mode.
    """
    check_tensors(x=x, cos=cos, sin=sin)
    compiling = is_compiling()
    check(
        not under_transforms(),
        "rope_ has no derivative and no vmap for torch.func and forward mode; use rope",
    )
    if torch.is_grad_enabled():
        _refuse_gradients_in_place(x, cos, sin)
    if compiling:
        traced(_ops.rope_.default, _standard_)(x, cos, sin, interleaved, inverse)
        return x
    check(not x.is_neg(), "rope_ cannot write to a negated view; use rope, or x.clone()")
    with below_autograd():
        _ops.rope_(x, cos, sin, interleaved, inverse)
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)
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
    """Rotate queries and keys in one call, which is faster than two calls of `rope`.

    Parameters
    ----------
    q, k : Tensor (B, H, L, d) and (B, Hk, L, d) of one dtype
        Queries and keys, each in the form of x in `rope`.
    cos, sin, interleaved, inverse
        As in `rope`.

    Returns
    -------
    q, k : Tensors of the shapes and dtype of q and k
        Differentiable in q and k.

    Raises
    ------
    RuntimeError
        As in `rope`; also if q and k have different dtypes.
    """
    if not (type(q) is type(k) is type(cos) is type(sin) is Tensor):
        check_tensors(q=q, k=k, cos=cos, sin=sin)
    compiling = is_compiling()
    if transformed():
        check(q.dtype == k.dtype, f"q and k must have one dtype, got {q.dtype} and {k.dtype}")
        return tuple(_Rope.apply(x, cos, sin, interleaved, inverse) for x in (q, k))
    if compiling:
        return traced(_ROPE_QK, _standard_qk)(q, k, cos, sin, interleaved, inverse)
    if recorded(q, k, cos, sin):
        call = _ROPE_QK if under_transforms() else _Recorded.apply
        return call(q, k, cos, sin, interleaved, inverse)
    with below_autograd():
        return _ROPE_QK(q, k, cos, sin, interleaved, inverse)


def _check_rope(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_dtype(name, x)
    shape = tuple(x.shape)
    check(2 <= x.dim() <= 4, f"{name} must be (L, d), (H, L, d) or (B, H, L, d), got {shape}")
    batch = x.shape[0] if x.dim() == 4 else 1
    for table_name, table in (("cos", cos), ("sin", sin)):
        check_dtype(table_name, table)
        check(
            table.dim() in (2, 3)
            and holds(table.shape[-2] == x.shape[-2])
            and (table.dim() == 2 or holds(table.shape[0] == 1, table.shape[0] == batch)),
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
def _fake(x: Tensor, cos: Tensor, sin: Tensor, *flags: bool) -> Tensor:
    check_device(x=x, cos=cos, sin=sin)
    _check_rope("x", x, cos, sin)
    return torch.empty_like(x)


@torch.library.register_fake("wavepe::rope_")
def _(*arguments: Any) -> None:
    _fake(*arguments)


@torch.library.register_fake("wavepe::rope_qk")
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *flags: bool) -> tuple[Tensor, Tensor]:
    check_device(q=q, k=k, cos=cos, sin=sin)
    _check_rope("q", q, cos, sin)
    _check_rope("k", k, cos, sin)
    check(q.dtype == k.dtype, f"q and k must have one dtype, got {q.dtype} and {k.dtype}")
    return torch.empty_like(q), torch.empty_like(k)


# ---- in operators of torch ----------------------------------------------------------------------


def _standard(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inverse: bool = False
) -> Tensor:
    """Return `rope` in operators of torch."""
    _check_rope("x", x, cos, sin)
    pairs, dtype = cos.shape[-1], wide(x)
    cos, sin = (t.to(dtype) for t in (cos, -sin if inverse else sin))
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    turned = x[..., : 2 * pairs].to(dtype)
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
    else:
        a, b = turned[..., :pairs], turned[..., pairs:]
    both = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * pairs :]], -1)


def _standard_(x: Tensor, *rest: Any) -> None:
    x.copy_(_standard(x, *rest))


def _standard_qk(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    check(q.dtype == k.dtype, f"q and k must have one dtype, got {q.dtype} and {k.dtype}")
    return _standard(q, *rest), _standard(k, *rest)


register_standard("rope", _standard)
register_standard("rope_", _standard_)
register_standard("rope_qk", _standard_qk)


# ---- derivatives: a rotation is linear, and its transpose is the rotation back ------------------


def _refuse_table_gradient(needs_cos: bool, needs_sin: bool) -> None:
    if needs_cos or needs_sin:
        raise RuntimeError(
            "wavepe: rope is not differentiable in cos and sin; detach them (they require grad)"
        )


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    *_, cos, sin, ctx.interleaved, ctx.inverse = inputs
    count = len(inputs)
    _refuse_table_gradient(*ctx.needs_input_grad[count - 4 : count - 2])
    ctx.set_materialize_grads(False)  # so that absent gradients and tangents are None
    ctx.save_for_backward(cos, sin)
    ctx.save_for_forward(cos, sin)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_rotate(ctx, grads, not ctx.inverse), None, None, None, None


def _jvp(
    ctx: Any, tangent: Tensor | None, cos: Tensor | None, sin: Tensor | None, *_: Any
) -> Tensor | None:
    _refuse_table_gradient(cos is not None, sin is not None)
    return _rotate(ctx, (tangent,), ctx.inverse)[0]


def _rotate(ctx: Any, tensors: Sequence[Any], inverse: bool) -> tuple[Tensor | None, ...]:
    """Rotate the gradients or tangents of q and k (or x); None stays None."""
    cos, sin = ctx.saved_tensors
    options = {"interleaved": ctx.interleaved, "inverse": inverse}
    if len(tensors) == 2 and all(x is not None for x in tensors):
        return rope_qk(tensors[0], tensors[1], cos, sin, **options)
    return tuple(x if x is None else rope(x, cos, sin, **options) for x in tensors)


class _Rope(torch.autograd.Function):
    """rope with derivatives in both directions, for torch.func and forward mode."""

    generate_vmap_rule = True
    # The operator itself: Dynamo would inline a Python function and lose the derivatives.
    forward = staticmethod(_ROPE)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)
    jvp = staticmethod(_jvp)


class _Recorded(torch.autograd.Function):
    """The autograd that is registered below, for calls that are not traced, in half the time."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        _setup_context(ctx, inputs, None)
        with below_autograd():
            return (_ROPE if len(inputs) == 5 else _ROPE_QK)(*inputs)

    backward = staticmethod(_backward)


register_autograd("rope", _backward, _setup_context)
register_autograd("rope_qk", _backward, _setup_context)


# ---- vmap: the new axis joins x's batch, and the tables follow ----------------------------------


def _fold(x: Tensor) -> Tensor:
    """Return x (size, B, H, L, d), (size, H, L, d) or (size, L, d) as (size * B, H, L, d)."""
    while x.dim() < 4:
        x = x.unsqueeze(1)
    return x if x.dim() == 4 else x.flatten(0, 1)


def _fold_table(table: Tensor, axis: int | None, size: int, batch: int) -> Tensor:
    """Return the table (L, h) or (1|B, L, h) for x as `_fold` returns it."""
    if axis is None and (table.dim() == 2 or table.shape[0] == 1):
        return table
    table = axis_first(table, axis, size)
    table = table.unsqueeze(1) if table.dim() == 3 else table
    return table.expand(size, batch, *table.shape[2:]).flatten(0, 1)


def _vmap(op: Any, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> list[Tensor]:
    """Return the results of rope or rope_qk, vmap's axis first."""
    size = info.batch_size
    pairs = zip(arguments, in_dims, strict=True)
    inputs = [(x, axis) for x, axis in pairs if isinstance(x, Tensor)]
    flags = arguments[len(inputs) :]
    tensors = [axis_first(x, axis, size) for x, axis in inputs[:-2]]
    batch = tensors[0].shape[1] if tensors[0].dim() == 5 else 1
    tables = [_fold_table(table, axis, size, batch) for table, axis in inputs[-2:]]
    out = op(*map(_fold, tensors), *tables, *flags)
    out = (out,) if isinstance(out, Tensor) else out
    return [y.reshape(x.shape) for y, x in zip(out, tensors, strict=True)]


@torch.library.register_vmap("wavepe::rope")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
    (out,) = _vmap(_ROPE, info, in_dims, *arguments)
    return out, 0


@torch.library.register_vmap("wavepe::rope_qk")
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, int]]:
    return tuple(_vmap(_ROPE_QK, info, in_dims, *arguments)), (0, 0)


def _refuse_gradients_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    _refuse_table_gradient(cos.requires_grad, sin.requires_grad)
    check(
        not x.requires_grad,
        "rope_ would overwrite an x that requires grad; use rope, or torch.no_grad()",
    )


# torch.library has no autograd for operators that write to their arguments. So refuse an x that
# needs a gradient, and raise x's version: then backward notices if a saved x was overwritten.
def _rope_in_place(x: Tensor, cos: Tensor, sin: Tensor, *flags: bool) -> None:
    check_tensors(x=x, cos=cos, sin=sin)
    if torch.is_grad_enabled():
        _refuse_gradients_in_place(x, cos, sin)
    torch.autograd.graph.increment_version(x)
    with below_autograd():
        _ops.rope_.default(x, cos, sin, *flags)


library.impl("rope_", _rope_in_place, "Autograd")
library.impl("rope_", _rope_in_place, "ADInplaceOrView")  # inference mode calls this one
