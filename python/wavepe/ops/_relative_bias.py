"""relative_bias for torch: the relative term of attention scores, differentiable [W][S]."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..arrays.relative_bias import BEYOND, Table
from ..common import checks
from ._common import (
    autocast_enabled,
    axis_first,
    check,
    check_choice,
    check_device,
    check_dtype,
    check_tensors,
    full_precision,
    integer,
    recorded,
    register_autograd,
    register_standard,
    report_out_of_memory,
    run_check,
    with_range,
)
from ._compiler import is_compiling, traced
from ._scores import clamped, take_rows
from ._torch_private import below_autograd, holds, transformed

_ops = torch.ops.wavepe
_SKEW, _UNSKEW = _ops.relative_bias_skew.default, _ops.relative_bias_unskew.default
_BIAS = _ops.relative_bias.default
_REAL = (torch.float32, torch.float64)


@report_out_of_memory("relative_bias")
def relative_bias(
    q: Tensor, p: Tensor | Table, keys: int, *, first: int = 0, beyond: str = "zero"
) -> Tensor:
    """Return the relative term of attention scores, as `wavepe.relative_bias`, differentiable.

    Parameters
    ----------
    q : Tensor (..., m, d), float32, float64, bfloat16 or float16
        Queries. bfloat16 and float16 are computed in float32 and rounded once.
    p : Tensor (w, d), or (H, w, d) for q (..., H, m, d), or Table
        The table, in q's dtype.
    keys, first, beyond
        As in `wavepe.relative_bias`.

    Returns
    -------
    out : Tensor (..., m, n), q's dtype
        Differentiable in q and p any number of times.

    Raises
    ------
    RuntimeError
        If a shape, dtype, device or value is wrong.

    Notes
    -----
    Under autocast q and p are cast as scaled_dot_product_attention does. Subnormal numbers count
    as zero. Gradients are computed by torch's matrix product, so their last bits may depend on
    torch's number of threads. torch.func and forward mode run torch's own operators.

    Examples
    --------
    >>> import torch
    >>> from wavepe import ops
    >>> q, p = torch.ones(2, 1), torch.tensor([[10.0], [20.0]])
    >>> ops.relative_bias(q, p, 3)
    tensor([[20., 10.,  0.],
            [ 0., 20., 10.]])
    """
    if isinstance(p, tuple):
        check_tensors(q=q)
        p, first, beyond = with_range("p", p, first, beyond, q, q.dtype)
    check_tensors(q=q, p=p)
    check_choice("beyond", beyond, BEYOND)
    compiling = is_compiling()
    if not compiling:  # a compiler's numbers may have no value yet
        keys, first = integer("keys", keys), integer("first", first)
    kind = "cpu" if q.is_cpu else q.device.type  # the first one is faster
    # scaled_dot_product_attention casts the same way
    if autocast_enabled(kind) and q.dtype != torch.float64:
        low = torch.get_autocast_dtype(kind)
        q, p = q.to(low), p.to(low)
    dtype = q.dtype
    if dtype in (torch.bfloat16, torch.float16):
        check(dtype == p.dtype, f"q and p must have one dtype, got {dtype} and {p.dtype}")
        q, p = q.float(), p.float()
    if transformed():
        out = _standard(q, p, keys, first, beyond)
    elif compiling:
        out = traced(_BIAS, _standard)(q, p, keys, first, beyond)
    elif recorded(q, p):
        out = _BIAS(q, p, keys, first, beyond)
    else:
        with below_autograd():
            out = _BIAS(q, p, keys, first, beyond)
    return out if out.dtype == dtype else out.to(dtype)


def _check(q: Tensor, p: Tensor, keys: int, beyond: str) -> None:
    check_device(q=q, p=p)
    check_dtype("q", q, _REAL)
    check_choice("beyond", beyond, BEYOND)
    shapes = f"{tuple(q.shape)} and {tuple(p.shape)}"
    check(q.dtype == p.dtype, f"q and p must have one dtype, got {q.dtype} and {p.dtype}")
    check(
        q.dim() >= 2 and p.dim() in (2, 3),
        f"q (..., m, d) and p (w, d) or (H, w, d) needed, got {shapes}",
    )
    check(q.shape[-1] == p.shape[-1], f"q and p have different head sizes: {shapes}")
    check(
        p.dim() == 2 or p.shape[0] == (q.shape[-3] if q.dim() > 2 else 1),
        f"q and p have different numbers of heads: {shapes}",
    )
    if not holds(keys >= 0):  # with the message, a compiler would fix a traced size
        check(False, f"keys must not be negative, got {keys}")
    if beyond == "edge":
        run_check(checks.edge, "beyond", beyond, int(holds(p.shape[-2] > 0)))


@torch.library.register_fake("wavepe::relative_bias")
def _(q: Tensor, p: Tensor, keys: int, first: int = 0, beyond: str = "zero") -> Tensor:
    _check(q, p, keys, beyond)
    return q.new_empty((*q.shape[:-1], keys))


@torch.library.register_fake("wavepe::relative_bias_skew")
def _(t: Tensor, keys: int, first: int = 0, beyond: str = "zero") -> Tensor:
    check_dtype("t", t, _REAL)
    return t.new_empty((*t.shape[:-1], keys))


@torch.library.register_fake("wavepe::relative_bias_unskew")
def _(skewed: Tensor, rows: int, first: int = 0, beyond: str = "zero") -> Tensor:
    check_dtype("skewed", skewed, _REAL)
    return skewed.new_empty((*skewed.shape[:-1], rows))


def by_product(q: Tensor, p: Tensor, keys: int, first: int = 0, beyond: str = "zero") -> Tensor:
    """Return relative_bias by torch's matrix product, which on a GPU is faster than a fused one."""
    with full_precision(q.device.type):  # the caller has already cast
        product = _product(q, p, keys, beyond)
    return _SKEW(product, keys, first, beyond)


def _product(q: Tensor, p: Tensor, keys: int, beyond: str) -> Tensor:
    """Check the arguments and return q p^T; skew turns it into relative_bias."""
    _check(q, p, keys, beyond)
    return q @ (p[0] if q.dim() == 2 and p.dim() == 3 else p).mT


torch.library.impl("wavepe::relative_bias", "cuda", by_product)
register_standard("relative_bias", by_product)


# relative_bias(q, p) = skew(q p^T), and skew is linear with unskew as its transpose. So
# G = unskew(grad) gives dq = G p and dp = G^T q, each differentiable by the same three operators.
def _setup_bias(ctx: Any, inputs: tuple, output: Tensor) -> None:
    q, p, _, ctx.first, ctx.beyond = inputs
    ctx.save_for_backward(q, p)


@report_out_of_memory("the gradient of relative_bias")
def _bias_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, p = ctx.saved_tensors
    g = _UNSKEW(grad, p.shape[-2], ctx.first, ctx.beyond)
    grad_q = grad_p = None
    if ctx.needs_input_grad[0]:
        grad_q = g @ p
    if ctx.needs_input_grad[1]:
        per_head = q.dim() > 2 and p.dim() == 3
        g, q = (_rows(x.movedim(-3, 0), 1) if per_head else _rows(x, 0) for x in (g, q))
        grad_p = (g.mT @ q).reshape(p.shape)  # the sum over the axes that p lacks
    return grad_q, grad_p, None, None, None


def _rows(x: Tensor, kept: int) -> Tensor:
    """Join all axes but the first `kept` ones and the last, also of a batch of gradients."""
    return x.reshape(*x.shape[:kept], math.prod(x.shape[kept:-1]), x.shape[-1])


def _setup_skew(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, _, ctx.first, ctx.beyond = inputs
    ctx.size = x.shape[-1]


def _transposed(op: Any) -> Any:
    """Return the backward of skew or unskew, by the operator that is its transpose."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return op(grad, ctx.size, ctx.first, ctx.beyond), None, None, None

    return backward


register_autograd("relative_bias", _bias_backward, _setup_bias)
register_autograd("relative_bias_skew", _transposed(_UNSKEW), _setup_skew)
register_autograd("relative_bias_unskew", _transposed(_SKEW), _setup_skew)


# ---- in operators of torch, which serve torch.func and forward mode, too ------------------------


def _standard(q: Tensor, p: Tensor, keys: int, first: int, beyond: str) -> Tensor:
    """Return `relative_bias` in operators of torch."""
    return _standard_skew(_product(q, p, keys, beyond), keys, first, beyond)


def _standard_skew(t: Tensor, keys: int, first: int = 0, beyond: str = "zero") -> Tensor:
    """Return t[i, delta - first] (..., m, n) from t (..., m, w)."""
    return take_rows(t, _places(t, keys, first, keys), beyond)


def _standard_unskew(skewed: Tensor, rows: int, first: int = 0, beyond: str = "zero") -> Tensor:
    """Return the transpose of skew: the sums (..., m, w) over the keys that read each element."""
    keys = skewed.shape[-1]
    t = take_rows(skewed, _places(skewed, keys, first, rows), "zero").contiguous()
    if beyond == "edge":
        row = _places(skewed, keys, first, keys)
        t[..., 0] += torch.where(row < 0, skewed, 0.0).sum(-1)
        t[..., -1] += torch.where(row >= rows, skewed, 0.0).sum(-1)
    return t


def _places(x: Tensor, keys: int, first: int, columns: int) -> Tensor:
    """Return, for rows i of x, delta - first at the key j (m, columns); or j at delta - first."""
    m, device = x.shape[-2], x.device
    delta = torch.arange(m, device=device)[:, None] + (keys - m)
    return delta - torch.arange(columns, device=device) - clamped(first)


register_standard("relative_bias_skew", _standard_skew)
register_standard("relative_bias_unskew", _standard_unskew)


def _vmap_leading(op: Any) -> Any:
    """Return the vmap rule of skew or unskew, which take any leading axes: vmap's comes first."""

    def rule(info: Any, in_dims: tuple, x: Tensor, *options: Any) -> tuple[Tensor, int]:
        return op(x.movedim(in_dims[0], 0), *options), 0

    return rule


torch.library.register_vmap("wavepe::relative_bias_skew", _vmap_leading(_SKEW))
torch.library.register_vmap("wavepe::relative_bias_unskew", _vmap_leading(_UNSKEW))


@torch.library.register_vmap("wavepe::relative_bias")
def _(
    info: Any, in_dims: tuple, q: Tensor, p: Tensor, keys: int, first: int = 0, beyond: str = "zero"
) -> tuple[Tensor, int]:
    q_axis, p_axis, *_ = in_dims
    q = axis_first(q, q_axis, info.batch_size)
    if p_axis is None:
        # if q was (m, d) and p is (1, w, d), vmap's axis is not a head
        p = p[0] if q.dim() == 3 and p.dim() == 3 else p
        return _ops.relative_bias(q, p, keys, first, beyond), 0
    rows = zip(q, p.movedim(p_axis, 0), strict=True)
    return torch.stack([_ops.relative_bias(*row, keys, first, beyond) for row in rows]), 0
