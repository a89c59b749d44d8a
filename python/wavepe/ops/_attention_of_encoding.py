"""Attention with a constant table as one operator, for compilers.

Python computes the table of a length and its low-rank zones. A compiler must not trace that,
because the shapes depend on the table's values. Inside one operator they stay out of the graph, so
one graph serves every length. The zones save up to a third of the time at 4096 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._attention_checks import Arguments
from ._common import save_call, saved_call
from ._tables import constant_table, encoding_named

_FORWARD = torch.ops.wavepe.attention_forward.default
_BACKWARD = torch.ops.wavepe.attention_backward.default

# The arguments of `_FORWARD`, with the name of an encoding in place of the table and its zones.
_OF_TABLE = ("p", "first", "beyond", "zones")
_NAMES = ("q", "k", "v", "name", "one_sided", *(
    name for name in Arguments._fields[3:] if name not in _OF_TABLE
))  # fmt: skip
_DEFAULTS = Arguments._field_defaults
_Q_REL, _BIAS = _NAMES.index("q_rel"), _NAMES.index("bias")


def _schema() -> str:
    listed = str(_FORWARD._schema).partition("(")[2].partition(") ->")[0].split(", ")
    given = {text.partition("=")[0].split()[-1]: text for text in listed}
    given |= {"name": "str name", "one_sided": "bool one_sided"}
    return ", ".join(given[name] for name in _NAMES)


def attention_of_encoding(
    q: Tensor, k: Tensor, v: Tensor, name: str, one_sided: bool, **options: Any
) -> Tensor:
    """Return `wavepe.ops.attention` with the constant table of the encoding called `name`.

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
    rest = [options.get(key, _DEFAULTS[key]) for key in _NAMES[5:]]
    out, _ = torch.ops.wavepe.attention_of_encoding(q, k, v, name, one_sided, *rest)
    return out


def _arguments(*inputs: Any) -> Arguments:
    """Return the arguments of `_FORWARD` for those of `_NAMES`."""
    given = dict(zip(_NAMES, inputs, strict=False))  # torch drops trailing defaults
    q, k, name, one_sided = given["q"], given["k"], given.pop("name"), given.pop("one_sided")
    table = constant_table(k.shape[2], encoding_named(name), q.shape[-1], one_sided)
    p, first, zones = table.tensors(q.dtype, q.device)
    return Arguments(**given, p=p, first=first, beyond=table.beyond, zones=zones or None)


@torch.library.custom_op(
    "wavepe::attention_of_encoding",
    mutates_args=(),
    schema=f"({_schema()}) -> (Tensor, Tensor)",
)
def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    return _FORWARD(*_arguments(*inputs))


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _FORWARD(q, k, v)


# The gradients of q, k, v, q_rel and bias; empty for a tensor that is not given.
@torch.library.custom_op(
    "wavepe::attention_of_encoding_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_schema()}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(*inputs: Any) -> tuple[Tensor, ...]:
    arguments = _arguments(*inputs[4:])
    has_bias = arguments.bias is not None
    dq, dk, dv, _, dq_rel, dbias = _BACKWARD(*inputs[:4], *arguments, False, has_bias)
    return dq, dk, dv, dq_rel, dbias


@_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    given = inputs[4:]
    optional = [given[i] if i < len(given) else None for i in (_Q_REL, _BIAS)]
    empty = given[0].new_empty
    return (
        *map(torch.empty_like, given[:3]),
        *(empty((0,)) if x is None else torch.empty_like(x) for x in optional),
    )


def _gradient(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    inputs, (out, lse) = saved_call(ctx)
    dq, dk, dv, dq_rel, dbias = torch.ops.wavepe.attention_of_encoding_backward(
        grad_out, grad_lse, out, lse, *inputs
    )
    result = [dq, dk, dv, *[None] * (len(inputs) - 3)]
    for i, grad in ((_Q_REL, dq_rel), (_BIAS, dbias)):
        if i < len(inputs) and inputs[i] is not None:
            result[i] = grad
    return tuple(result)


_forward.register_autograd(
    _gradient, setup_context=lambda ctx, inputs, output: save_call(ctx, inputs, *output)
)
