"""wavepe.ops.relative_bias: what test_ops_every.py does not test."""

import pytest
import torch
from cases import generator
from checks import check_relative_bias
from tensors import normal
from wavepe import ops

F64 = torch.float64


def test_autocast_casts_as_attention_does():
    q, p = torch.ones(1, 2, 3, 8), torch.ones(5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype
        assert ops.relative_bias(q, p, 3).dtype == want == torch.bfloat16
        assert ops.relative_bias(q.double(), p.double(), 3).dtype == F64


@pytest.mark.parametrize("keys", [2**62, 2**44])
def test_sizes_that_overflow(keys):
    """No product of sizes may wrap: a clear error instead."""
    with pytest.raises(RuntimeError, match=r"large|memory|new_empty"):
        ops.relative_bias(torch.ones(2, 3), torch.ones(4, 3), keys)


@pytest.mark.parametrize("first", [2**63 - 1, -(2**63), 2**62, -(2**62)])
@pytest.mark.parametrize("beyond", ["zero", "edge"])
def test_extreme_first(variant, first, beyond):
    """delta - first must not wrap around into the table."""
    q, p = torch.ones(2, 3), torch.arange(12.0).view(4, 3)
    got = ops.relative_bias(q, p, 4, first=first, beyond=beyond)
    check_relative_bias(got.numpy(), q.numpy(), p.numpy(), 4, first, beyond)


def test_tables_larger_than_memory_can_be():
    """Expanded tensors have such sizes. Only rows that some delta reads are packed, and their bytes
    must not wrap around."""
    zero = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"out of memory: \d+ bytes for p of shape"):
        ops.relative_bias(zero.expand(1, 1, 2**31), zero.expand(2**31, 2**31), 1)
    q, p = torch.arange(12.0).view(3, 4), torch.ones(1).expand(2**60, 4)
    for beyond in ("zero", "edge"):
        got = ops.relative_bias(q, p, 5, first=-(2**40), beyond=beyond)
        assert torch.equal(got, q.sum(-1, keepdim=True).expand(3, 5))


@pytest.mark.parametrize(
    ("match", "q", "p"),
    [
        ("2 heads, q has 1", (6, 8), (2, 7, 8)),
        ("1 heads, q has 3", (2, 3, 6, 8), (1, 7, 8)),
        (r"needed, got .*\(2, 3, 7, 8\)", (2, 3, 6, 8), (2, 3, 7, 8)),
    ],
)
def test_the_same_inputs_are_refused(match, q, p):
    with pytest.raises(RuntimeError, match=match):
        ops.relative_bias(torch.ones(q), torch.ones(p), 7)
    with pytest.raises(RuntimeError, match="wavepe: q"):
        torch.func.vjp(lambda q, p: ops.relative_bias(q, p, 7), torch.ones(q), torch.ones(p))


def test_vmap_is_no_head():
    """The table of one head serves queries (m, d), of which vmap makes (B, m, d)."""
    rng = generator("one head")
    q, p = normal(rng, 4, 5, 8, dtype=F64), normal(rng, 1, 6, 8, dtype=F64)
    got = torch.vmap(lambda q: ops.relative_bias(q, p, 7))(q)
    torch.testing.assert_close(got, ops.relative_bias(q, p[0], 7), rtol=1e-12, atol=1e-12)
