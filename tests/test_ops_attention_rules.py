"""The rules of ops.attention for softcap and scale, with the same messages on every device."""

import math
import re

import pytest
from attention_cases import attention, torch

LIMITS = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 1e30, torch.float64: 1e300}
RAW = torch.ops.wavepe.attention_forward


def arguments(dtype, device="cpu"):
    return [torch.ones(1, 2, 3, 4, dtype=dtype, device=device) for _ in range(3)]


def functional(dtype, **options):
    q, k, v = arguments(dtype)
    torch.func.vjp(lambda q: attention(q, k, v, **options), q)


def compiled(dtype, **options):
    torch._dynamo.reset()
    torch.compile(lambda *x: attention(*x, **options), backend="eager")(*arguments(dtype))
    torch._dynamo.reset()


def recorded(dtype, **options):
    attention(*(x.requires_grad_() for x in arguments(dtype)), **options)


WAYS = {
    "kernel": lambda dtype, **options: attention(*arguments(dtype), **options),
    "operator": lambda dtype, **options: RAW(*arguments(dtype), **options),
    "meta": lambda dtype, **options: attention(*arguments(dtype, "meta"), **options),
    "operator on meta": lambda dtype, **options: RAW(*arguments(dtype, "meta"), **options),
    "autograd": recorded,
    "torch.func": functional,
    "compile": compiled,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_softcap(way, dtype):
    most = LIMITS[dtype]
    wrong = [most * 1.001, math.nextafter(1 / most, 0), 0.0, -1.0]
    for softcap in wrong[:1] if way == "compile" else wrong:
        message = f"wavepe: softcap must lie in {1 / most:g}..{most:g}, got {softcap:g}"
        with pytest.raises(RuntimeError, match=re.escape(message)):
            WAYS[way](dtype, softcap=softcap)
    for softcap in (most, 1 / most):
        WAYS[way](dtype, softcap=softcap)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_scale(way, scale):
    with pytest.raises(RuntimeError, match=f"wavepe: scale must be finite, got {scale}"):
        WAYS[way](torch.float32, scale=scale)
