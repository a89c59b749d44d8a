"""The GPU's kernels of attention on the CPU, by Triton's interpreter: `interpreted` is called as
ops.attention is. It runs one program after the other in NumPy, so it shows neither races nor what a
GPU rounds otherwise, and its bfloat16 is not arithmetic."""

import os

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs Triton")
assert os.environ.get("TRITON_INTERPRET") == "1", (
    "tests/conftest.py sets it before Triton is loaded"
)

import torch
from attention_cases import BIAS_NAMES, DEFAULTS, NAMES
from wavepe.ops import RelativeTable
from wavepe.ops._attention_gpu import call as gpu
from wavepe.ops._attention_gpu.chunk import Arguments


class _Interpreted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        out, lse = gpu.forward(*arguments)
        ctx.save_for_backward(out, lse)
        ctx.arguments = arguments
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        call = Arguments(*ctx.arguments)
        wanted = [ctx.needs_input_grad[call._fields.index(name)] for name in ("p", "bias")]
        saved = (grad_out, grad_lse, *ctx.saved_tensors)
        grads = gpu.backward(*saved, *ctx.arguments, *wanted)
        found = dict(zip(("q", "k", "v", "p", "q_rel", "bias"), grads, strict=True))
        given = {name: x for name, x in found.items() if getattr(call, name) is not None}
        return tuple(given.get(name) for name in call._fields)


def interpreted(q, k, v, *, p=None, return_lse=False, **options):
    given = DEFAULTS | {"p": p, **options}
    zones = None
    if isinstance(p, RelativeTable):  # as on a GPU
        given["p"], given["first"], zones = p._build(q.dtype, torch.device("cpu"), gpu=True)
        given["beyond"] = p.beyond
    if isinstance(given.get("offset"), int):
        given["offset"] = torch.tensor(given["offset"])
    seed = torch.randint(2**62, ()) if given["dropout_p"] > 0 else None
    arguments, of_bias = ([given.get(n) for n in names] for names in (NAMES, BIAS_NAMES))
    out, lse = _Interpreted.apply(q, k, v, *arguments, seed, list(zones or ()) or None, *of_bias)
    return (out, lse) if return_lse else out
