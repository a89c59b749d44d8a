"""Run the GPU's kernels of attention on the CPU, in Triton's interpreter.

`interpreted` takes the arguments of ops.attention. TRITON_INTERPRET=1 must be set before Triton is
loaded. The interpreter runs one program after the other in NumPy. So it does not show races, or
roundings that are different on a GPU, and its bfloat16 is not bfloat16 arithmetic.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    raise ImportError("the interpreter needs TRITON_INTERPRET=1, set before Triton is loaded")

from wavepe.ops import RelativeTable
from wavepe.ops._attention_checks import Arguments
from wavepe.ops._attention_gpu import call as gpu
from wavepe.ops._attention_in_graph import sinks_gradient


class _Interpreted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = gpu.forward(*arguments)
        ctx.save_for_backward(out, lse)
        ctx.arguments = arguments
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        call = Arguments(*ctx.arguments)
        wanted = [ctx.needs_input_grad[call._fields.index(name)] for name in ("p", "bias")]
        saved = (grad_out, grad_lse, *ctx.saved_tensors)
        grads = gpu.backward(*saved, *ctx.arguments, *wanted)
        gradients = dict(zip(("q", "k", "v", "p", "q_rel", "bias"), grads, strict=True))
        if call.sinks is not None:
            gradients["sinks"] = sinks_gradient(call.sinks, *saved)
        needed = {name: x for name, x in gradients.items() if getattr(call, name) is not None}
        return tuple(needed.get(name) for name in call._fields)


def interpreted(
    q: Tensor, k: Tensor, v: Tensor, *, p: Any = None, return_lse: bool = False, **options: Any
) -> Any:
    if isinstance(p, RelativeTable):  # converted as on a GPU
        table, options["first"], zones = p.build_tensors(q.dtype, torch.device("cpu"), gpu=True)
        options |= {"p": table, "beyond": p.beyond, "zones": list(zones) or None}
    elif p is not None:
        options["p"] = p
    if isinstance(options.get("offset"), int):
        options["offset"] = torch.tensor(options["offset"])
    if options.get("dropout_p"):
        options["seed"] = torch.randint(2**62, ())
    out, lse = _Interpreted.apply(*Arguments(q, k, v, **options))
    return (out, lse) if return_lse else out
