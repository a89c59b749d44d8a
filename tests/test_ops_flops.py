"""FLOPs as torch's FlopCounterMode counts them, against products that are counted by hand."""

import pytest
import torch
import wavepe
from processes import forked, output
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from wavepe import ops
from wavepe.nn import Attention

B, H, KV, M, N, D, DV = 2, 4, 2, 5, 11, 8, 6


def made(*shape):
    return torch.randn(*shape, requires_grad=True)


def counted(call):
    """Return the FLOPs of a call and of its backward pass."""
    with FlopCounterMode(display=False) as forward:
        out = call()
    out = out if isinstance(out, torch.Tensor) else out[0]
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def product(*sizes):
    """Return the FLOPs of a matrix product of these sizes."""
    flops = 2
    for size in sizes:
        flops *= size
    return flops


@pytest.mark.parametrize("rows", [None, 3, 40])
@pytest.mark.parametrize("learned", [False, True])
def test_attention(rows, learned):
    q, k, v = made(B, H, M, D), made(B, KV, N, D), made(B, KV, N, DV)
    p = None if rows is None else torch.randn(rows, D, requires_grad=learned)
    forward, backward = counted(lambda: ops.attention(q, k, v, p=p))
    scores, values = product(B, H, M, N, D), product(B, H, M, N, DV)
    # of 40 rows queries and keys read those of their distances, 11 + 5 - 1
    relative = 0 if rows is None else product(B, H, M, min(rows, N + M - 1), D)
    assert forward == scores + values + relative
    table = relative if learned else 0
    assert backward == scores + 2 * (scores + values) + 2 * relative + table


def test_the_same_as_torch_without_a_table():
    """PyTorch counts its own attention so: all pairs, and the scores once more for backward."""
    q, k, v = made(B, H, M, D), made(B, H, N, D), made(B, H, N, DV)
    shapes = q.shape, k.shape, v.shape
    wanted = sdpa_flop_count(*shapes), sdpa_backward_flop_count((B, H, M, DV), *shapes)
    assert counted(lambda: ops.attention(q, k, v)) == wanted


def test_relative_bias():
    q, p = made(B, H, M, D), made(7, D)
    forward, backward = counted(lambda: ops.relative_bias(q, p, N))
    assert forward == product(B, H, M, 7, D)
    assert backward == 2 * forward


def test_rotations():
    x, k, angle = made(B, H, M, D), made(B, KV, M, D), torch.randn(M, 3)
    pairs = B * H * M * 3
    assert counted(lambda: ops.rope(x, angle, angle)) == (6 * pairs, 6 * pairs)
    forward, _ = counted(lambda: ops.rope_qk(x, k, angle, angle))
    assert forward == 6 * (pairs + B * KV * M * 3)


def test_the_operator_of_compiled_modules():
    """It has no table among its arguments, and counts it all the same."""
    from wavepe.ops._attention_in_graph import attention_of_encoding
    from wavepe.positions import tables

    name = tables.name_of(wavepe.encoding("wavelet:scales=4"))
    module = Attention("wavelet:scales=4", D, H, causal=False)
    q, k, v = made(B, H, M, D), made(B, H, M, D), made(B, H, M, D)
    scores, relative = product(B, H, M, M, D), product(B, H, M, 2 * M - 1, D)
    for call in (
        lambda: module(q, k, v),
        lambda: attention_of_encoding(q, k, v, name, False, causal=False),
    ):
        assert counted(call) == (2 * scores + relative, 5 * scores + 2 * relative)


USE = """
import torch
from torch.utils.flop_counter import FlopCounterMode
from wavepe import ops
x = torch.randn(1, 1, 4, 8)
with FlopCounterMode(display=False) as mode:
    ops.attention(x, x, x)
assert mode.get_total_flops() == 2 * 2 * 4 * 4 * 8
"""
BROUGHT = """
import sys, torch
before = set(sys.modules)
import wavepe.nn, wavepe.ops
brought = {name for name in set(sys.modules) - before if name.startswith(("torch", "triton"))}
assert not brought, brought
"""


FIRST = "import sys, wavepe.ops; assert 'torch.utils.flop_counter' not in sys.modules"


@pytest.mark.parametrize("before", [FIRST, "import torch.utils.flop_counter"])
def test_the_order_of_imports(before):
    """The counter's import registers the formulas, before ours and after it."""
    output("-c", before + USE, start=forked)


def test_ours_bring_no_more_of_torch_and_no_triton():
    output("-c", BROUGHT)
