"""relative_bias for torch: the query-dependent relative term, differentiable [W][S]."""

from __future__ import annotations

import torch
from torch import Tensor

from .._relative_bias import BEYOND
from ._common import check, check_choice, check_device, check_dtype, check_tensors

_ops = torch.ops.wavepe
_REAL = (torch.float32, torch.float64)


def relative_bias(
    q: Tensor, p: Tensor, keys: int, *, first: int = 0, beyond: str = "zero"
) -> Tensor:
    """``out[i, j] = q[i] . p[delta - first]`` with ``delta = i + (keys - m) - j`` [W][S].

    The last query stands on the last key. No scaling, no mask.

    Parameters
    ----------
    q : Tensor (..., m, d)
        float32 or float64; bfloat16 and float16 are computed in float32 and rounded once.
    p : Tensor (w, d), or (H, w, d) for q (..., H, m, d)
        Row r belongs to delta = first + r.
    keys : int
        Number of keys n.
    first : int
        delta of the table's first row.
    beyond : "zero" or "edge"
        A row outside the table counts as zero, or as the nearest row.

    Returns
    -------
    Tensor (..., m, n) of q's dtype, differentiable in q and p any number of times. The gradients
    are matrix products of torch's, whose last bits may follow its number of threads.
    """
    check_tensors(q=q, p=p)
    kind = q.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if autocast and q.dtype != torch.float64:  # as scaled_dot_product_attention casts
        low = torch.get_autocast_dtype(kind)
        q, p = q.to(low), p.to(low)
    if q.dtype not in (torch.bfloat16, torch.float16):
        return _ops.relative_bias(q, p, keys, first, beyond)
    check(q.dtype == p.dtype, f"q and p must have one dtype, got {q.dtype} and {p.dtype}")
    return _ops.relative_bias(q.float(), p.float(), keys, first, beyond).to(q.dtype)


@torch.library.register_fake("wavepe::relative_bias")
def _(q, p, keys, first=0, beyond="zero"):
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
    check(keys >= 0, f"keys must not be negative, got {keys}")
    if beyond == "edge":
        check(p.shape[-2] > 0, "beyond='edge' needs a table of at least one row")
    return q.new_empty((*q.shape[:-1], keys))


@torch.library.register_fake("wavepe::relative_bias_skew")
def _(t, keys, first=0, beyond="zero"):
    check_dtype("t", t, _REAL)
    return t.new_empty((*t.shape[:-1], keys))


@torch.library.register_fake("wavepe::relative_bias_unskew")
def _(skewed, rows, first=0, beyond="zero"):
    check_dtype("skewed", skewed, _REAL)
    return skewed.new_empty((*skewed.shape[:-1], rows))


# relative_bias(q, p) = skew(q p^T), and skew is linear with unskew as its transpose. So
# G = unskew(grad) gives dq = G p and dp = G^T q, each differentiable by the same three operators.
def _setup_bias(ctx, inputs, output):
    q, p, _, ctx.first, ctx.beyond = inputs
    ctx.save_for_backward(q, p)


def _bias_backward(ctx, grad):
    q, p = ctx.saved_tensors
    g = _ops.relative_bias_unskew(grad, p.shape[-2], ctx.first, ctx.beyond)
    grad_q = grad_p = None
    if ctx.needs_input_grad[0]:
        grad_q = g @ p
    if ctx.needs_input_grad[1]:
        per_head = q.dim() > 2 and p.dim() == 3
        sums = "...hmw,...hmd->hwd" if per_head else "...mw,...md->wd"  # over what p is shared by
        grad_p = torch.einsum(sums, g, q).reshape(p.shape)
    return grad_q, grad_p, None, None, None


def _setup_skew(ctx, inputs, output):
    x, _, ctx.first, ctx.beyond = inputs
    ctx.size = x.shape[-1]


def _skew_backward(ctx, grad):
    return _ops.relative_bias_unskew(grad, ctx.size, ctx.first, ctx.beyond), None, None, None


def _unskew_backward(ctx, grad):
    return _ops.relative_bias_skew(grad, ctx.size, ctx.first, ctx.beyond), None, None, None


torch.library.register_autograd("wavepe::relative_bias", _bias_backward, setup_context=_setup_bias)
torch.library.register_autograd(
    "wavepe::relative_bias_skew", _skew_backward, setup_context=_setup_skew
)
torch.library.register_autograd(
    "wavepe::relative_bias_unskew", _unskew_backward, setup_context=_setup_skew
)
