"""Attention as one operator that serves all calls of a compiled function.

- Python computes the constant table of a length and its low-rank zones. A compiler must not trace
  that, because the shapes depend on the table's values. So the operator takes a name of the table.
  The zones save up to a third of the time at 4096 tokens.
- A compiler takes the floats of an operator for constants, and compiles again if one changes. So
  the operator takes a tensor `numbers`: scale and softcap, if they are not None, and dropout_p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._attention_checks import Arguments
from ._relative_table import RelativeTable
from ._scores import default_scale
from ._torch_private import is_known

_FORWARD = torch.ops.wavepe.attention_forward.default
_BACKWARD = torch.ops.wavepe.attention_backward.default
COUNT = len(Arguments._fields)
_MORE_ARGUMENTS = 'str name="", bool one_sided=False, Tensor? numbers=None'
_DIFFERENTIABLE = [
    Arguments._fields.index(x) for x in ("q", "k", "v", "p", "q_rel", "bias", "sinks")
]
_ZONES = Arguments._fields.index("zones")
_find_table: Callable[[torch.device, str, int, int, bool], RelativeTable] | None = None
_SCHEMA = str(_FORWARD._schema).partition("(")[2].partition(") ->")[0] + ", " + _MORE_ARGUMENTS


def set_table_source(find: Callable[[torch.device, str, int, int, bool], RelativeTable]) -> None:
    """Let the operator call `find(device, name, keys, columns, one_sided)` for a named table."""
    global _find_table
    _find_table = find


def attention_in_graph(
    call: Arguments, name: str = "", one_sided: bool = False
) -> tuple[Tensor, Tensor]:
    """Return out and lse of the arguments of `_FORWARD`."""
    values, numbers = (call.scale, call.softcap, call.dropout_p), None
    usual = call.softcap is None and is_known(call.dropout_p == 0)
    # Most models give the default, and its comparison costs one guard.
    usual = usual and (call.scale is None or is_known(call.scale == default_scale(call.q)))
    if torch.compiler.is_exporting():
        usual = all(x is None or is_known(x <= 0, x > 0) for x in values)
    elif call.q.device.type != "cpu":  # a tensor on the CPU would keep it out of a CUDA graph
        usual = True
    if not usual:
        one = torch.ones((), dtype=torch.float64)  # only its products keep symbols
        numbers = torch.stack([one * x for x in values if x is not None])
        scale, softcap = (None if x is None else 1.0 for x in values[:2])
        call = call._replace(scale=scale, softcap=softcap, dropout_p=0.0)
    if numbers is None and not name:
        return _FORWARD(*call)
    return torch.ops.wavepe.attention_in_graph(*call, name, one_sided, numbers)


def attention_of_encoding(
    q: Tensor, k: Tensor, v: Tensor, name: str, one_sided: bool, **options: Any
) -> Tensor:
    """Return attention in a graph, with the constant table of the encoding called `name`.

    A table that is `one_sided` has rows for the distances 0..keys-1 only. The options are those of
    `wavepe.ops.attention` without p.
    """
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
        if options.get("q_rel") is not None:
            options["q_rel"] = options["q_rel"].to(q.dtype)
    offset = options.get("offset")
    if not isinstance(offset, Tensor):
        offset = k.shape[2] - q.shape[2] if offset is None else offset
        options["offset"] = torch.full((), offset, dtype=torch.int64, device=q.device)
    if options.get("dropout_p", 0.0) > 0:
        options["seed"] = torch.randint(2**62, (), device=q.device)
    out, _ = attention_in_graph(Arguments(q, k, v, **options), name, one_sided)
    return out


def _arguments(inputs: tuple[Any, ...]) -> Arguments:
    """Return the arguments of `_FORWARD` for those of the operator."""
    call = Arguments(*inputs[:COUNT])  # torch drops trailing defaults
    name, one_sided, numbers = (*inputs[COUNT:], *[None] * (COUNT + 3 - len(inputs)))[:3]
    if name:
        size = (call.q if call.q_rel is None else call.q_rel).shape[-1]
        if _find_table is None:
            raise RuntimeError(
                f"wavepe: the program reads the table of {name!r}: import wavepe.positions"
            )
        table = _find_table(call.q.device, name, call.k.shape[2], size, bool(one_sided))
        p, first, zones = table.tensors(call.q.dtype, call.q.device)
        call = call._replace(p=p, first=first, beyond=table.beyond, zones=zones or None)
    if numbers is not None:
        names = [name for name in ("scale", "softcap") if getattr(call, name) is not None]
        call = call._replace(**dict(zip([*names, "dropout_p"], numbers.tolist(), strict=True)))
    return call


@torch.library.custom_op(
    "wavepe::attention_in_graph", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)"
)
def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    return _FORWARD(*_arguments(inputs))


@_forward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    call = Arguments(*inputs[:COUNT])
    named = any(inputs[COUNT : COUNT + 1])
    return _FORWARD(*(call._replace(q_rel=None) if named else call))  # the name stands for p


# The gradients of q, k, v, p, q_rel and bias; empty for a tensor that is not given.
@torch.library.custom_op(
    "wavepe::attention_in_graph_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool p_grad, "
    f"bool bias_grad, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(*inputs: Any) -> tuple[Tensor, ...]:
    p_grad, bias_grad, *rest = inputs[4:]
    return _BACKWARD(*inputs[:4], *_arguments(tuple(rest)), p_grad, bias_grad)


@_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    p_grad, bias_grad, *rest = inputs[4:]
    return _BACKWARD(*inputs[:4], *Arguments(*rest[:COUNT]), p_grad, bias_grad)


def _gradient(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    inputs, out, lse = saved_attention(ctx)
    p_grad, bias_grad, sinks_grad = wanted_gradients(ctx)
    grads = torch.ops.wavepe.attention_in_graph_backward(
        grad_out, grad_lse, out, lse, p_grad, bias_grad, *inputs
    )
    call = Arguments(*inputs[:COUNT])
    grads = [None if call[i] is None else x for i, x in zip(_DIFFERENTIABLE, grads, strict=False)]
    dsinks = sinks_gradient(call.sinks, grad_out, grad_lse, out, lse) if sinks_grad else None
    return by_input(ctx, [*grads, dsinks])


# ---- for the autograd of `attention_forward`, too ------------------------------------------------


def wanted_gradients(ctx: Any) -> tuple[bool, ...]:
    """Return whether p, bias and sinks need a gradient."""
    # needs_input_grad ends early: torch drops trailing arguments that have their defaults
    names = map(Arguments._fields.index, ("p", "bias", "sinks"))
    return tuple(any(ctx.needs_input_grad[i : i + 1]) for i in names)


def sinks_gradient(
    sinks: Tensor | None, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> Tensor:
    """Return the gradient of the sinks: -sum exp(sink - lse) (dO . out - d lse) of each head."""
    assert sinks is not None
    # dense, because strides would change the order of the sum
    row = (grad_out.to(lse.dtype) * out.to(lse.dtype)).contiguous().sum(-1)
    if grad_lse is not None:
        row = row - grad_lse
    terms = torch.exp(sinks[:, None] - lse) * row
    terms = torch.where(sinks[:, None] == -math.inf, 0.0, terms)  # lse may be -inf, too
    return -terms.sum((0, 2))


def save_attention(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    """Save the call of an operator whose first arguments are those of `_FORWARD`."""
    call = list(inputs)
    zones = call.pop(_ZONES) if len(call) > _ZONES else None
    # `is not None` takes a quarter of the time of isinstance
    tensors = [i for i, x in enumerate(call) if x is not None and isinstance(x, Tensor)]
    ctx.save_for_backward(*[call[i] for i in tensors], *(zones or ()), *output)
    for i in tensors:
        call[i] = None
    ctx.call, ctx.tensors, ctx.zones = call, tensors, None if zones is None else len(zones)


def saved_attention(ctx: Any) -> tuple[list[Any], Tensor, Tensor]:
    """Return the arguments, out and lse of the call that `save_attention` saved."""
    inputs, saved = list(ctx.call), iter(ctx.saved_tensors)
    for i in ctx.tensors:
        inputs[i] = next(saved)
    *zones, out, lse = saved
    if len(inputs) >= _ZONES:
        inputs.insert(_ZONES, zones or None)
    return inputs, out, lse


def by_input(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return the gradients of q, k, v, p, q_rel, bias and sinks at these arguments' places."""
    result: list[Any] = [None] * (COUNT + 3)
    for i, grad in zip(_DIFFERENTIABLE, grads, strict=True):
        result[i] = grad
    if ctx.zones is not None:  # torch.library expects a list of gradients for a list
        result[_ZONES] = [None] * ctx.zones
    return tuple(result[: len(ctx.needs_input_grad)])


_forward.register_autograd(_gradient, setup_context=save_attention)
