"""Attention with a relative term, slopes or a bias, differentiable, in memory linear in length."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arrays.relative_bias import BEYOND, Bias, Table
from ._attention_checks import OPTIONAL, Arguments, check_arguments, check_mask, plain_options
from ._attention_composed import can_mask, composed, masked
from ._attention_gpu import attend, missing_kernel, serves, warn_of_memory
from ._attention_in_graph import (
    COUNT,
    attention_in_graph,
    by_input,
    save_attention,
    saved_attention,
    sinks_gradient,
    wanted_gradients,
)
from ._attention_ragged import attend_requests
from ._common import (
    FLOATS,
    autocast_enabled,
    check,
    check_tensors,
    full_precision,
    integer,
    not_differentiable,
    recorded,
    register_autograd,
    wide,
    with_range,
)
from ._compiler import is_compiling, wants_standard
from ._relative_table import RelativeTable
from ._torch_private import below_autograd, is_known, under_transforms

# Most calls give no others. Those are left out if they have their defaults, because torch takes
# 0.07 microseconds to check each one.
COMMON_ARGUMENTS = 12
_FORWARD = torch.ops.wavepe.attention_forward.default
_BACKWARD = torch.ops.wavepe.attention_backward.default


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    p: Tensor | Table | RelativeTable | None = None,
    first: int = 0,
    beyond: str = "zero",
    q_rel: Tensor | None = None,
    slopes: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    offset: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    bias: Tensor | Bias | None = None,
    bias_first: int = 0,
    bias_beyond: str = "zero",
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return softmax attention whose scores depend on the distance of query and key.

    The scores are those of `wavepe.attention`, and with a softcap ``softcap * tanh(score /
    softcap)``. One fused kernel computes the result, and another one the gradients. Neither makes a
    tensor of size (m, n): memory grows with m + n.

    Parameters
    ----------
    q, k, v : Tensor (B, H, m, d), (B, Hk, n, d) and (B, Hk, n, dv)
        float32, float64, bfloat16 or float16, with any strides. H is a multiple of Hk, and query
        head h reads key head h // (H / Hk). Differentiable.
    p : Tensor (w, c) or (H, w, c) of q's dtype, or Table, or RelativeTable, optional
        A tensor is differentiable. `relative_table` returns a `RelativeTable`, which is faster for
        a constant table. A `wavepe.Table` may hold a NumPy array.
    q_rel : Tensor (B, H, m, c), q's dtype, optional
        Differentiable.
    slopes : Tensor (H,), any float dtype, optional
        Not differentiable.
    bias : Tensor (w') or (H, w'), float32 (float64 for float64 q), or Bias, optional
        It is added before the softcap. Differentiable.
    sinks : Tensor (H,), any float dtype, optional
        Neither scaled nor capped. Differentiable.
    first, beyond, bias_first, bias_beyond, causal, scale, return_lse
        As in `wavepe.attention`.
    window : int, optional
        Hide keys with delta >= window, also if `causal` is False.
    softcap : float, optional
        A bound for the scores, from 1e-30 to 1e30 (for float64 from 1e-300 to 1e300).
    offset : int or integer Tensor (), (1,) or (B,), optional
        The position of query 0, counted from key 0. None is n - m: the last query and the last key
        belong to the same token.
    key_mask : bool Tensor (B|1, n), optional
        False hides a key from all queries.
    segments : integer Tensor (B|1, n), optional
        The number of each token's sequence, for packed sequences: keys of other sequences are
        hidden. It needs m = n.
    mask : bool Tensor (B|1, H|1, m, n), optional
        False hides a key from a query.
    dropout_p : float
        The probability that a weight is dropped, from 0 to 1. The seed comes from torch's
        generator.
    cu_seqlens_q, cu_seqlens_k : integer Tensor (R + 1,), optional
        Where the queries and the keys of R requests begin, from 0 to the totals: q, k, v and q_rel
        hold the tokens of all requests, with B = 1. Each request is computed by itself, and its
        last query and its last key belong to the same token. offset, key_mask, segments, mask and
        dropout_p do not go with them.
    block_table : integer Tensor (R, P), optional
        With cu_seqlens: k and v are pages (blocks, Hk, page, d) and (blocks, Hk, page, dv), with a
        last stride of 1. Row r holds the numbers of the pages of request r, in the order of its
        keys. Numbers behind its last page are not read. Requests may share pages.

    Returns
    -------
    out : Tensor (B, H, m, dv), q's dtype
        The attention output. It is 0 for a query that sees no key.
    lse : Tensor (B, H, m), float32 (float64 for float64), only with `return_lse`
        As in `wavepe.attention`. Differentiable. `merge_attention` takes it.

    Raises
    ------
    RuntimeError
        If a shape, dtype, device or value is wrong.

    Notes
    -----
    Softmax and sums are computed in float32, or in float64 for float64 inputs. Results are bitwise
    equal for any number of threads. On the CPU subnormal numbers count as zero.

    Under autocast the inputs are cast as scaled_dot_product_attention does, but `bias` and `sinks`
    become float32. torch.func and forward mode run torch's own operators, whose memory grows with
    m n.

    Calls with cu_seqlens are one kernel on the CPU, which has no gradient: with gradients, and on
    other devices, they run request by request. A compiled program with gradients is refused.

    Examples
    --------
    >>> import torch
    >>> import wavepe
    >>> from wavepe import ops
    >>> q, k, v = (torch.randn(2, heads, 100, 16) for heads in (4, 2, 2))
    >>> table = ops.relative_table(wavepe.encoding("wavelet").table(100, 16))
    >>> ops.attention(q, k, v, p=table).shape
    torch.Size([2, 4, 100, 16])
    >>> out, lse = ops.attention(q[:, :, -1:], k, v, p=table, return_lse=True)  # the last query
    >>> lse.shape
    torch.Size([2, 4, 1])
    """
    compiling = is_compiling()
    if isinstance(p, tuple):
        p, first, beyond = with_range("p", p, first, beyond, q, q.dtype)
    if isinstance(bias, tuple):
        in_range = (bias, bias_first, bias_beyond)
        bias, bias_first, bias_beyond = with_range("bias", *in_range, q, wide(q))
    # Types are checked inline, because each call in Python takes time. The operator checks values.
    if not (type(q) is type(k) is type(v) is Tensor):
        check_tensors(q=q, k=k, v=v)
    if not (p is None or isinstance(p, (Tensor, RelativeTable))):
        check_tensors(p=p)
    optional = (q_rel, slopes, key_mask, segments, mask, bias, sinks)
    for x in optional:
        if x is not None and not isinstance(x, Tensor):
            named = zip(OPTIONAL, optional, strict=True)
            check_tensors(**{name: x for name, x in named if x is not None})
    if slopes is not None and slopes.requires_grad:
        check(False, "slopes are not differentiable: detach them")
    if not (
        (causal is True or causal is False)
        and (return_lse is True or return_lse is False)
        and type(first) is type(bias_first) is int
        and type(beyond) is type(bias_beyond) is str
        and beyond in BEYOND
        and bias_beyond in BEYOND
        and (window is None or type(window) is int)
        and (softcap is None or type(softcap) is float)
        and (scale is None or type(scale) is float)
        and type(dropout_p) is float
    ):
        (causal, return_lse, first, beyond, bias_first, bias_beyond, window, softcap, scale,
         dropout_p) = plain_options(
            compiling, causal=causal, return_lse=return_lse, first=first, beyond=beyond,
            bias_first=bias_first, bias_beyond=bias_beyond, window=window, softcap=softcap,
            scale=scale, dropout_p=dropout_p,
        )  # fmt: skip
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4):
        check_mask("mask", mask)
    if key_mask is not None and key_mask.dtype != torch.bool:
        check_mask("key_mask", key_mask)
    kind = "cpu" if q.is_cpu else q.device.type  # the first one is faster
    casts = torch.is_autocast_enabled(kind) if kind == "cpu" else autocast_enabled(kind)
    if casts and q.dtype != torch.float64:
        low = torch.get_autocast_dtype(kind)
        q, k, v = q.to(low), k.to(low), v.to(low)
        p = p.to(low) if isinstance(p, Tensor) else p
        q_rel = None if q_rel is None else q_rel.to(low)
        bias = bias.float() if bias is not None and bias.dtype in FLOATS else bias
    if sinks is not None and sinks.dtype in FLOATS:
        sinks = sinks.to(wide(q))
    zones: Any = None
    table = p
    if isinstance(p, RelativeTable):
        if not (first == 0 and beyond == "zero"):
            message = "a relative_table has its own first and beyond: give them to relative_table"
            check(False, message)
        beyond = p.beyond
        ready = None if compiling else p._by_dtype.get((q.dtype, q.device))
        p, first, zones = ready or p.tensors(q.dtype, q.device)
    if offset is not None and not isinstance(offset, Tensor):
        usual = not compiling and type(offset) is int and q.dim() == k.dim() == 4
        if usual and cu_seqlens_q is None and offset == k.shape[2] - q.shape[2]:
            offset = None  # a tensor of it would take four microseconds
        else:
            offset = integer("offset", offset)
            offset = torch.full((), offset, dtype=torch.int64, device=q.device)
    drops = not is_known(dropout_p <= 0) if compiling else dropout_p > 0
    seed = torch.randint(2**62, (), device=q.device) if drops else None
    arguments: tuple[Any, ...] = (
        q, k, v, p, first, beyond, q_rel, slopes, causal, window, softcap, scale, offset, key_mask,
        segments, mask, dropout_p, seed, zones or None, bias, bias_first, bias_beyond, sinks,
    )  # fmt: skip
    if not (cu_seqlens_q is cu_seqlens_k is block_table is None):
        requests = (cu_seqlens_q, cu_seqlens_k, block_table)
        one = functools.partial(attention, return_lse=return_lse)
        return attend_requests(requests, Arguments(*arguments), table, return_lse, one)
    missing = "" if kind in ("cpu", "meta") else missing_kernel(q, v, p)
    standard = compiling and wants_standard()
    if missing or standard or under_transforms():
        return _in_torch(Arguments(*arguments), "" if standard else missing, standard, return_lse)
    if compiling:
        out, lse = attention_in_graph(Arguments(*arguments))
    else:
        few = offset is key_mask is segments is mask is seed is bias is sinks is None
        if few and not zones and dropout_p == 0:
            arguments = arguments[:COMMON_ARGUMENTS]
        if torch.is_grad_enabled() and recorded(q, k, v, p, q_rel, bias, sinks):
            out, lse = _Attention.apply(arguments, q, k, v, p, q_rel, bias, sinks)
        elif q.is_cpu:
            with below_autograd():
                out, lse = _FORWARD(*arguments)
        else:
            out, lse = _run("forward", _FORWARD, arguments)
    return (out, lse) if return_lse else out


def _run(role: str, run: Any, arguments: Sequence[Any], graph: bool = False) -> Any:
    """Return the results of an operator, which autograd does not record unless `graph`."""
    results = None if graph or not serves(arguments[0]) else attend(role, arguments)
    if results is None:
        with contextlib.nullcontext() if graph else below_autograd():
            results = run(*arguments)
    return results


def _in_torch(
    call: Arguments, missing: str, standard: bool, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Return attention in operators of torch: no kernel serves this call (`missing` says why)."""
    check_arguments(call)
    with full_precision(call.q.device.type):  # autocast has been applied
        if missing:
            warn_of_memory(missing)
        small = can_mask(call.softcap, call.dropout_p, return_lse) and not under_transforms()
        if (missing or standard) and small:
            return masked(call)
        out, lse, _ = composed(call)
    return (out, lse) if return_lse else out


@torch.library.register_fake("wavepe::attention_forward")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    check_arguments(Arguments(q, k, v, *rest))
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide(q))


@torch.library.register_fake("wavepe::attention_backward")
def _(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    call = Arguments(*arguments[:COUNT])
    p_grad, bias_grad = (*arguments[COUNT:], False, False)[:2]

    def grad(x: Tensor | None, needed: bool = True) -> Tensor:
        return call.q.new_empty((0,)) if x is None or not needed else torch.empty_like(x)

    grads = (grad(call.q), grad(call.k), grad(call.v), grad(call.p, p_grad), grad(call.q_rel))
    return *grads, grad(call.bias, bias_grad)


def _gradients(
    ctx: Any, grad_out: Tensor, grad_lse: Tensor | None, *needed: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, p, q_rel, bias and sinks; `needed` is for p, bias, sinks."""
    p_grad, bias_grad, sinks_grad = needed
    inputs, out, lse = saved_attention(ctx)
    call = Arguments(*inputs)
    arguments = [grad_out, grad_lse, out, lse, *inputs]
    if p_grad or bias_grad:
        arguments += (*call[len(inputs) :], p_grad, bias_grad)
    grads = _run("backward", _BACKWARD, arguments, graph=torch.is_grad_enabled())
    dq, dk, dv, dp, dq_rel, dbias = grads
    dsinks = sinks_gradient(call.sinks, grad_out, grad_lse, out, lse) if sinks_grad else None
    dq_rel = None if call.q_rel is None else dq_rel
    return dq, dk, dv, dp if p_grad else None, dq_rel, dbias if bias_grad else None, dsinks


register_autograd(
    "attention_forward",
    lambda ctx, *grads: by_input(ctx, _gradients(ctx, *grads, *wanted_gradients(ctx))),
    save_attention,
)


not_differentiable(
    "attention_backward",
    "attention has no second derivative in autograd; use torch.func, which differentiates it any "
    "number of times",
)


class _Attention(torch.autograd.Function):
    """The autograd registered above, for eager calls; each argument of a Function takes time."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *_: Tensor | None) -> tuple[Tensor, Tensor]:
        output = _run("forward", _FORWARD, arguments)
        ctx.set_materialize_grads(False)
        save_attention(ctx, arguments, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse = grads
        if grad_out is None:
            grad_out = torch.zeros_like(ctx.saved_tensors[-2])
        *_, p_grad, _, bias_grad, sinks_grad = ctx.needs_input_grad
        return None, *_gradients(ctx, grad_out, grad_lse, p_grad, bias_grad, sinks_grad)
