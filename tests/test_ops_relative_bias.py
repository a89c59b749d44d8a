"""wavepe.ops.relative_bias: against the oracle, gradients to q and p, compile, threads, bad
input."""

import itertools

import numpy as np
import oracle
import pytest
import wavepe
from cases import (
    SIZES,
    UNIT,
    assert_same_bits,
    assert_within,
    compiled_once,
    generator,
    load_torch,
    recording_backend,
)
from checks import check_relative_bias
from tensors import assert_threads_agree, normal

torch, ops = load_torch()

each_beyond = pytest.mark.parametrize("beyond", ["zero", "edge"])
SHAPES = [  # lead of q, lead of p, m, keys, w, first
    ((), (), 1, 1, 1, 0),
    ((2, 3), (), 5, 9, 4, -1),
    ((2, 3), (3,), 9, 5, 20, -6),
    ((2, 3), (3,), 17, 17, 7, 2),
    ((4,), (), 1, 33, 33, 0),
    ((1, 2), (2,), 16, 16, 31, -15),
]


def check(got, q, p, keys, first=0, beyond="zero", what=""):
    got, q, p = (x.detach().numpy() for x in (got, q, p))
    check_relative_bias(got, q, p, keys, first, beyond, what)


def plain(q, p, keys, first=0, beyond="zero"):
    """The definition in plain torch, for its gradients."""
    m, w = q.shape[-2], p.shape[-2]
    row = torch.arange(m)[:, None] + (keys - m) - torch.arange(keys) - first
    out = (q[..., :, None, :] * p[..., row.clamp(0, w - 1), :]).sum(-1)
    return out if beyond == "edge" else out.where((row >= 0) & (row < w), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_beyond
def test_against_the_oracle(variant, dtype, beyond):
    rng = generator("oracle")
    for d in SIZES:
        for lead, lead_p, m, keys, w, first in SHAPES:
            q, p = normal(rng, *lead, m, d, dtype=dtype), normal(rng, *lead_p, w, d, dtype=dtype)
            got = ops.relative_bias(q, p, keys, first=first, beyond=beyond)
            assert got.shape == (*lead, m, keys)
            check(got, q, p, keys, first, beyond)
            want = wavepe.relative_bias(q.numpy(), p.numpy(), keys, first=first, beyond=beyond)
            assert_same_bits(got.numpy(), want, "NumPy and torch")


def test_any_strides(variant):
    rng = generator("strides")
    ps = (
        normal(rng, 9, 12),
        normal(rng, 12, 9).t(),
        normal(rng, 18, 24)[::2, 1::2],
        normal(rng, 1, 12).expand(9, 12),
        normal(rng, 3, 9, 12),
        normal(rng, 9, 3, 12).transpose(0, 1),
        normal(rng, 1, 9, 12).expand(3, 9, 12),
    )
    qs = (
        normal(rng, 2, 3, 7, 12),
        normal(rng, 2, 7, 3, 12).transpose(1, 2),
        normal(rng, 12, 7, 3, 2).permute(3, 2, 1, 0),
        normal(rng, 2, 3, 14, 24)[:, :, ::2, ::2],
        normal(rng, 2, 1, 7, 12).expand(2, 3, 7, 12),
        normal(rng, 505)[1:].view(2, 3, 7, 12),
    )
    for q, p in itertools.product(qs, ps):
        got = ops.relative_bias(q, p, 11, first=-2, beyond="edge")
        assert torch.equal(
            got, ops.relative_bias(q.contiguous(), p.contiguous(), 11, first=-2, beyond="edge")
        )
        check(got, q, p, 11, -2, "edge", f"{q.stride()} {p.stride()}")


@pytest.mark.parametrize(
    ("shape", "w", "keys"),
    [
        ((0, 3, 5, 4), 6, 7),
        ((2, 3, 0, 4), 6, 7),
        ((2, 3, 5, 4), 6, 0),
        ((2, 3, 5, 0), 6, 7),
        ((5, 4), 0, 7),
    ],
)
def test_empty(shape, w, keys):
    q = torch.ones(shape, requires_grad=True)
    p = torch.ones(w, shape[-1], requires_grad=True)
    got = ops.relative_bias(q, p, keys)
    assert got.shape == (*shape[:-1], keys)
    assert not got.any() or (got.numel() and w)
    got.sum().backward()
    assert q.grad.shape == q.shape
    assert p.grad.shape == p.shape


# ------------------------------------------------------------------ gradients


@each_beyond
@pytest.mark.parametrize("case", SHAPES)
def test_first_and_second_derivatives(variant, case, beyond):
    lead, lead_p, m, keys, w, first = case
    m, keys, w = (min(n, 4) for n in (m, keys, w))
    rng = generator("gradcheck")
    q = normal(rng, *lead[-1:], m, 3, dtype=torch.float64).requires_grad_()
    p = normal(rng, *lead_p, w, 3, dtype=torch.float64).requires_grad_()

    def bias(q, p):
        return ops.relative_bias(q, p, keys, first=first, beyond=beyond)

    assert torch.autograd.gradcheck(bias, (q, p))
    assert torch.autograd.gradgradcheck(bias, (q, p))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_beyond
def test_gradients_against_the_definition(variant, dtype, beyond):
    rng = generator("grads")
    for (lead, lead_p, m, keys, w, first), d in itertools.product(SHAPES, (1, 8, 33)):
        tensors = (
            normal(rng, *lead, m, d, dtype=dtype),
            normal(rng, *lead_p, w, d, dtype=dtype),
            normal(rng, *lead, m, keys, dtype=dtype),
        )

        def gradients(function, q, p, g, n=keys, f=first):
            q, p = q.clone().requires_grad_(), p.clone().requires_grad_()
            return torch.autograd.grad(function(q, p, n, first=f, beyond=beyond), (q, p), g)

        got = gradients(ops.relative_bias, *tensors)
        want = gradients(plain, *(t.double() for t in tensors))
        size = gradients(plain, *(t.double().abs() for t in tensors))
        repeats = tensors[0].numel() // (m * d) // (tensors[1].numel() // (w * d))
        roundoff = UNIT[np.dtype(np.float32 if dtype == torch.float32 else np.float64)]
        # Any order of adding: keys products for q; for p one a query, head and batch row.
        for a, b, s, terms in zip(got, want, size, (keys, m * keys * repeats), strict=True):
            assert a.dtype == dtype
            bound = 2 * (terms + 1) * roundoff * s.numpy()
            assert_within(
                a.numpy(), b.numpy(), bound, f"{lead} {lead_p} {m} {keys} {w} {first} d={d}"
            )


def test_only_one_gradient_wanted(variant):
    rng = generator("one")
    q, p = normal(rng, 2, 3, 5, 4), normal(rng, 3, 6, 4)
    for which in (0, 1):
        leaves = [q.clone(), p.clone()]
        leaves[which].requires_grad_()
        ops.relative_bias(*leaves, 7).sum().backward()
        again = [q.clone(), p.clone()]
        again[which].requires_grad_()
        plain(*again, 7).sum().backward()
        assert torch.allclose(leaves[which].grad, again[which].grad, atol=1e-5)
    with torch.no_grad():
        assert not ops.relative_bias(q.clone().requires_grad_(), p, 7).requires_grad


def test_table_used_twice_adds_its_gradients(variant):
    rng = generator("twice")
    q = normal(rng, 5, 4, dtype=torch.float64)
    p = normal(rng, 6, 4, dtype=torch.float64).requires_grad_()
    (ops.relative_bias(q, p, 7) * ops.relative_bias(2 * q, p, 7, beyond="edge")).sum().backward()
    again = p.detach().clone().requires_grad_()
    (plain(q, again, 7) * plain(2 * q, again, 7, beyond="edge")).sum().backward()
    assert torch.allclose(p.grad, again.grad)


# ------------------------------------------------------------------ framework


def test_bits_do_not_depend_on_threads(variant):
    """Those of the forward; the gradients are matrix products of torch's."""
    rng = generator("threads")
    q, shared, own = (normal(rng, *shape, 17) for shape in ((3, 5, 70), (40,), (5, 40)))

    def call():
        options = {"first": -3, "beyond": "edge"}
        return [ops.relative_bias(q, p, 90, **options) for p in (shared, own)]

    assert_threads_agree(call, 2, 3, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_computes_in_float32(variant, dtype):
    rng = generator("low")
    q, p = normal(rng, 2, 3, 9, 24, dtype=dtype), normal(rng, 12, 24, dtype=dtype)
    got = ops.relative_bias(q, p, 11)
    assert got.dtype == dtype
    exact = torch.from_numpy(oracle.relative_bias(q.double().numpy(), p.double().numpy(), 11))
    rounding = (exact.to(dtype).double() - exact).abs()
    spacing = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype] * exact.abs() * 2
    assert ((got.double() - exact).abs() <= torch.maximum(2 * rounding, spacing) + 1e-5).all()
    leaves = q.clone().requires_grad_(), p.clone().requires_grad_()
    ops.relative_bias(*leaves, 11).sum().backward()
    assert [leaf.grad.dtype for leaf in leaves] == [dtype, dtype]


def test_autocast_casts_as_attention_does():
    q, p = torch.ones(1, 2, 3, 8), torch.ones(5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype
        assert ops.relative_bias(q, p, 3).dtype == want == torch.bfloat16
        assert ops.relative_bias(q.double(), p.double(), 3).dtype == torch.float64


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("lead", "lead_p"), [((), ()), ((2, 3), ()), ((2, 3), (3,))])
@each_beyond
def test_opcheck(grad, lead, lead_p, beyond):
    rng = generator("opcheck")
    q = normal(rng, *lead, 4, 5).mT.contiguous().mT.requires_grad_(grad)
    p = normal(rng, *lead_p, 6, 5).requires_grad_(grad)
    op = torch.ops.wavepe.relative_bias.default
    torch.library.opcheck(op, (q, p, 7), {"first": -1, "beyond": beyond})


def test_compiles_whole_for_any_length():
    rng = generator("compile")
    backend = recording_backend()

    def bias(q, p):
        return ops.relative_bias(q, p, q.shape[-2] + 3, first=-1, beyond="edge") * 2

    compiled = torch.compile(bias, backend=backend, fullgraph=True, dynamic=True)
    p = normal(rng, 3, 20, 8)
    for length in (5, 9, 23):
        q, results = normal(rng, 2, 3, length, 8), []
        for function in (bias, compiled):
            leaves = q.clone().requires_grad_(), p.clone().requires_grad_()
            out = function(*leaves)
            out.pow(2).sum().backward()
            results.append((out, *(leaf.grad for leaf in leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert compiled_once(backend)


def test_meta_tensors_give_shapes():
    got = ops.relative_bias(
        torch.ones(2, 3, 5, 4, device="meta"), torch.ones(6, 4, device="meta"), 7
    )
    assert got.is_meta
    assert got.shape == (2, 3, 5, 7)


Q, P = torch.ones(2, 3, 5, 4), torch.ones(6, 4)
ERRORS = [
    ("4(.|\n)*3|3(.|\n)*4", (Q, torch.ones(6, 3), 7), {}),
    ("heads.*2, 3, 5, 4.*2, 6, 4", (Q, torch.ones(2, 6, 4), 7), {}),
    (r"needed, got \(2, 3, 5, 4\) and \(4", (Q, torch.ones(4), 7), {}),
    (r"needed, got \(4,?\) and \(6, 4\)", (torch.ones(4), P, 7), {}),
    (r"needed, got \(\) and \(6, 4\)", (torch.tensor(1.0), P, 7), {}),
    ("-1", (Q, P, -1), {}),
    ("edge", (Q, P, 7), {"beyond": "wrap"}),
    ("edge", (Q, torch.ones(0, 4), 7), {"beyond": "edge"}),
    ("[Dd]ouble|float64", (Q, P.double(), 7), {}),
    ("[Ll]ong|int64", (Q.long(), P.long(), 7), {}),
    ("[Cc]omplex", (Q.to(torch.complex64), P.to(torch.complex64), 7), {}),
]


ERRORS += [
    ("first must fit into 64 bits, got 10", (Q, P, 7), {"first": 10**30}),
    ("keys must fit into 64 bits, got 18", (Q, P, 2**64), {}),
    ("keys must be an integer, got 7.0", (Q, P, 7.0), {}),
    ("unknown beyond 1; known: zero, edge", (Q, P, 7), {"beyond": 1}),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("match", "args", "options"), ERRORS)
def test_errors(match, args, options, device):
    q, p, keys = args
    with pytest.raises(RuntimeError, match=match):
        ops.relative_bias(q.to(device), p.to(device), keys, **options)


def test_devices_must_agree():
    for q, p in ((Q, P.to("meta")), (Q.to("meta"), P)):
        with pytest.raises(RuntimeError, match="meta"):
            ops.relative_bias(q, p, 7)


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
    check(ops.relative_bias(q, p, 4, first=first, beyond=beyond), q, p, 4, first, beyond)


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
