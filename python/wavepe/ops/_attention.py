"""Attention with a relative term, slopes or a bias, differentiable, in memory linear in length."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..arrays.relative_bias import BEYOND, Bias, Table
from ._attention_checks import Arguments, check_arguments, check_mask, numbers
from ._attention_composed import composed
from ._attention_gpu import missing_kernel, warn_of_memory
from ._attention_in_graph import (
    attention_in_graph,
    by_input,
    save_attention,
    saved_attention,
    sinks_gradient,
)
from ._attention_masked import can_mask, masked
from ._common import (
    autocast_enabled,
    check,
    check_choice,
    check_tensors,
    flag,
    full_precision,
    integer,
    number,
    recorded,
    register_autograd,
    wide,
    with_range,
)
from ._compiler import is_compiling, wants_standard
from ._relative_table import RelativeTable
from ._torch_private import below_autograd, direct, under_transforms

_ops = torch.ops.wavepe
_Q, _K, _V, _P, _Q_REL, _BIAS, _SINKS = map(
    Arguments._fields.index, ("q", "k", "v", "p", "q_rel", "bias", "sinks")
)
_COUNT = len(Arguments._fields)
_DEFAULTS = (None, None, None, *Arguments._field_defaults.values())
# The arguments that most calls give. The others are left out if they have their defaults, because
# torch takes 0.07 microseconds to check each one.
_FEW = 12
_FORWARD, _BACKWARD = _ops.attention_forward.default, _ops.attention_backward.default
_DIRECT_FORWARD, _DIRECT_BACKWARD = direct(_FORWARD), direct(_BACKWARD)


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Return softmax attention whose scores depend on the distance of query and key.

    ``score[i, j] = (q_i . k_j + r_i . p[delta - first]) * scale - slope * abs(delta)
    + bias[delta - bias_first]``, where ``delta = i + offset - j`` is the distance from key j to
    query i, and r is q_rel or q. With a softcap, the score becomes
    ``softcap * tanh(score / softcap)``. One fused kernel computes the result, and another one the
    gradients. Neither makes a tensor of size (m, n): memory grows with m + n.

    Parameters
    ----------
    q : Tensor (B, H, m, d)
        Queries of float32, float64, bfloat16 or float16, with any strides. Differentiable.
    k : Tensor (B, Hk, n, d), q's dtype
        Keys. H is a multiple of Hk, and query head h reads key head h // (H / Hk).
        Differentiable.
    v : Tensor (B, Hk, n, dv), q's dtype
        Values of the keys. Differentiable.
    p : Tensor (w, c) or (H, w, c) of q's dtype, or Table, or RelativeTable, optional
        The table of a relative encoding: wavelet, Shaw or Transformer-XL. Row r belongs to
        delta = first + r. c is d, or the size of q_rel. A tensor is differentiable. A
        `wavepe.Table` has its own first and beyond, and its p may be a NumPy array. So does the
        `RelativeTable` that `relative_table` returns, which is faster for a constant table.
    first : int
        The delta of the table's first row.
    beyond : "zero" or "edge"
        What stands for a row outside the table: zeros, or the nearest row.
    q_rel : Tensor (B, H, m, c), q's dtype, optional
        The factor r of the table in place of q. A small c makes the table's products cheap.
        Differentiable.
    slopes : Tensor (H,), any float dtype, optional
        ALiBi's slope of each head. Not differentiable.
    causal : bool
        Hide keys with delta < 0.
    window : int, optional
        Hide keys with delta >= window, also if `causal` is False.
    softcap : float, optional
        A bound for the scores, from 1e-30 to 1e30 (for float64 from 1e-300 to 1e300).
    scale : float, optional
        The factor on the products; None is d^-1/2.
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
    return_lse : bool
        Whether to return lse as well.
    bias : Tensor (w',) or (H, w'), float32 (float64 for float64 q), or Bias, optional
        A number for each delta, or for each head and delta. It is added to the score before the
        softcap, and not scaled. Element r belongs to delta = bias_first + r. Differentiable. A
        `wavepe.Bias` has its own first and beyond.
    bias_first : int
        The delta of the first element of `bias`. It is independent of `first`.
    bias_beyond : "zero" or "edge"
        What stands for an element outside `bias`: zero, or the nearest element.
    sinks : Tensor (H,), any float dtype, optional
        One more score for each head, which has no value: exp(sink) is added to the sum that divides
        the weights. It is neither scaled nor capped. -inf means none. Differentiable.

    Returns
    -------
    out : Tensor (B, H, m, dv), q's dtype
        The attention output. It is 0 for a query that sees no key.
    lse : Tensor (B, H, m), float32 (float64 for float64), only with `return_lse`
        The logarithm of the sum of exp(score) over the keys and the sink. For a query that sees no
        key it is the sink, or -inf without one. Differentiable. `merge_attention` takes it.

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

    References
    ----------
    Tables: Oka et al., "Wavelet-based positional representation for long context", ICLR 2025,
    arXiv 2502.02004; Shaw et al., 2018, arXiv 1803.02155; Dai et al., "Transformer-XL", 2019,
    arXiv 1901.02860. Slopes: Press et al., ALiBi, 2022, arXiv 2108.12409.

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
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        check_tensors(q=q, k=k, v=v)
    if isinstance(p, tuple):
        p, first, beyond = with_range("p", p, first, beyond, q, q.dtype)
    if isinstance(bias, tuple):
        given = (bias, bias_first, bias_beyond)
        bias, bias_first, bias_beyond = with_range("bias", *given, q, wide(q))
    if causal is not True and causal is not False:
        causal = flag("causal", causal)
    if not (isinstance(beyond, str) and beyond in BEYOND):
        check_choice("beyond", beyond, BEYOND)
    if not (isinstance(bias_beyond, str) and bias_beyond in BEYOND):
        check_choice("bias_beyond", bias_beyond, BEYOND)
    if return_lse is not True and return_lse is not False:
        return_lse = flag("return_lse", return_lse)
    if not compiling:  # a compiler's numbers may have no value yet
        first, window, softcap, scale, dropout_p = numbers(first, window, softcap, scale, dropout_p)
        if type(bias_first) is not int or bias_first != 0:
            bias_first = integer("bias_first", bias_first)
        if type(offset) is int and q.dim() == k.dim() == 4 and offset == k.shape[2] - q.shape[2]:
            offset = None  # a tensor of it would take four microseconds
    elif isinstance(scale, Tensor) or isinstance(softcap, Tensor):
        number(*(("scale", scale) if isinstance(scale, Tensor) else ("softcap", softcap)))
    if isinstance(p, RelativeTable):
        check(
            first == 0 and beyond == "zero",
            "a relative_table has its own first and beyond: give them to relative_table",
        )
        beyond = p.beyond
    if not (p is q_rel is slopes is key_mask is segments is mask is bias is sinks is None):
        _check_optional(p, q_rel, slopes, key_mask, segments, mask, bias, sinks)
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4):
        check_mask(mask)
    kind = "cpu" if q.is_cpu else q.device.type  # the first one is faster
    if autocast_enabled(kind) and q.dtype != torch.float64:
        q, k, v, p, q_rel = _autocast(kind, q, k, v, p, q_rel)
        if bias is not None and bias.is_floating_point():
            bias = bias.float()
    if sinks is not None and sinks.is_floating_point():
        sinks = sinks.to(wide(q))
    zones = None
    if isinstance(p, RelativeTable):
        p, first, zones = p.tensors(q.dtype, q.device)
    if offset is not None and not isinstance(offset, Tensor):
        offset = torch.full((), integer("offset", offset), dtype=torch.int64, device=q.device)
    seed = None
    if dropout_p > 0:
        seed = torch.randint(2**62, (), device=q.device)
    scores = (p, first, beyond, q_rel, slopes, causal, window, softcap, scale, offset)
    hidden = (key_mask, segments, mask, dropout_p, seed)
    last = (bias, bias_first, bias_beyond, sinks)
    arguments: tuple[Any, ...] = (q, k, v, *scores, *hidden, zones or None, *last)
    missing = "" if kind in ("cpu", "meta") else missing_kernel(q, v, arguments[_P])
    standard = compiling and wants_standard()
    if not (missing or standard or under_transforms()):
        if compiling:
            out, lse = attention_in_graph(Arguments(*arguments))
        else:
            few = offset is key_mask is segments is mask is seed is bias is sinks is None
            if few and not zones and dropout_p == 0:
                arguments = arguments[:_FEW]
            if recorded(q, k, v, arguments[_P], q_rel, bias, sinks):
                out, lse = _Attention.apply(arguments, q, k, v, p, q_rel, bias, sinks)
            else:
                with below_autograd():
                    out, lse = _DIRECT_FORWARD(*arguments)
        return (out, lse) if return_lse else out
    check_arguments(Arguments(*arguments))
    with full_precision(kind):  # autocast has been applied above
        if missing and not standard:
            warn_of_memory(missing)
        small = can_mask(softcap, dropout_p, return_lse) and not under_transforms()
        if (missing or standard) and small:
            return masked(Arguments(*arguments))
        out, lse, _ = composed(*arguments)
    return (out, lse) if return_lse else out


def _check_optional(p: Any, *tensors: Any) -> None:
    if not (p is None or isinstance(p, RelativeTable)):
        check_tensors(p=p)
    names = ("q_rel", "slopes", "key_mask", "segments", "mask", "bias", "sinks")
    for name, x in zip(names, tensors, strict=True):
        if x is not None and not isinstance(x, Tensor):
            check_tensors(**{name: x})
    slopes = tensors[1]
    check(
        slopes is None or not slopes.requires_grad,
        "slopes are not differentiable: detach them",
    )


def _autocast(kind: str, *tensors: Tensor | RelativeTable | None) -> list[Any]:
    low = torch.get_autocast_dtype(kind)
    return [x.to(low) if isinstance(x, Tensor) else x for x in tensors]


@torch.library.register_fake("wavepe::attention_forward")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    check_arguments(Arguments(q, k, v, *rest))
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide(q))


@torch.library.register_fake("wavepe::attention_backward")
def _(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    # torch drops trailing arguments that have their defaults
    given = [*arguments, *[None] * (_COUNT + 2 - len(arguments))]
    q, q_rel, (p_grad, bias_grad) = given[_Q], given[_Q_REL], given[_COUNT:]

    def grad(x: Tensor | None, needed: bool = True) -> Tensor:
        return q.new_empty((0,)) if x is None or not needed else torch.empty_like(x)

    return (
        *(grad(given[i]) for i in (_Q, _K, _V)),
        grad(given[_P], p_grad),
        grad(q_rel),
        grad(given[_BIAS], bias_grad),
    )


def _gradients(
    ctx: Any, grad_out: Tensor, grad_lse: Tensor | None, *needed: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, p, q_rel, bias and sinks; `needed` is for p, bias, sinks."""
    p_grad, bias_grad, sinks_grad = needed
    inputs, out, lse = saved_attention(ctx)
    arguments = [grad_out, grad_lse, out, lse, *inputs]
    if p_grad or bias_grad:
        arguments += (*_DEFAULTS[len(inputs) :], p_grad, bias_grad)
    if torch.is_grad_enabled():
        dq, dk, dv, dp, dq_rel, dbias = _BACKWARD(*arguments)
    else:
        with below_autograd():
            dq, dk, dv, dp, dq_rel, dbias = _DIRECT_BACKWARD(*arguments)
    dq_rel = None if inputs[_Q_REL] is None else dq_rel
    dsinks = None
    if sinks_grad:
        dsinks = sinks_gradient(inputs[_SINKS], grad_out, grad_lse, out, lse)
    return dq, dk, dv, dp if p_grad else None, dq_rel, dbias if bias_grad else None, dsinks


def _registered_backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    # needs_input_grad ends early: torch drops trailing arguments that have their defaults
    needed = (any(ctx.needs_input_grad[i : i + 1]) for i in (_P, _BIAS, _SINKS))
    return by_input(ctx, _gradients(ctx, grad_out, grad_lse, *needed))


register_autograd("attention_forward", _registered_backward, save_attention)


def _refuse(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError(
        "wavepe: attention has no second derivative in autograd; use torch.func, which "
        "differentiates it any number of times"
    )


torch.library.register_autograd("wavepe::attention_backward", _refuse)


class _Attention(torch.autograd.Function):
    """The same autograd as registered above, for calls that are not compiled.

    The differentiable arguments are given apart, because each argument of a Function takes time.
    """

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *_: Tensor | None) -> tuple[Tensor, Tensor]:
        with below_autograd():
            output = _DIRECT_FORWARD(*arguments)
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
