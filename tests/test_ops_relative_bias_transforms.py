"""relative_bias under torch.func, vmap and forward mode, against gather in torch."""

import pytest
from cases import load_torch

torch, ops = load_torch()
from torch.autograd import forward_ad

F64 = torch.float64
# torch's own: when it first loads the decompositions of forward mode, and when Dynamo tries
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),  # 2.10
]
func = torch.func


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def by_gather(q, p, keys):
    delta = torch.arange(q.shape[-2])[:, None] + (keys - q.shape[-2]) - torch.arange(keys)
    rows = p[..., delta.clamp(0, p.shape[-2] - 1), :]
    seen = (delta >= 0) & (delta < p.shape[-2])
    return torch.where(seen, (q[..., :, None, :] * rows).sum(-1), 0.0)


Q, P, DQ, DP = draw(2, 5, 3), draw(6, 3, seed=1), draw(2, 5, 3, seed=2), draw(6, 3, seed=3)


def ours(q, p):
    return ops.relative_bias(q, p, 7)


def theirs(q, p):
    return by_gather(q, p, 7)


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("argument", [0, 1])
@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd"])
def test_derivatives(name, argument):
    def cubes(call):
        return lambda q, p: (call(q, p) ** 3).sum()

    transform = getattr(func, name)
    assert_close(transform(cubes(ours), argument)(Q, P), func.grad(cubes(theirs), argument)(Q, P))


def test_jvp_and_forward_mode():
    expected = theirs(DQ, P) + theirs(Q, DP)
    assert_close(func.jvp(ours, (Q, P), (DQ, DP))[1], expected)
    with forward_ad.dual_level():
        out = ours(forward_ad.make_dual(Q, DQ), P)
        assert_close(forward_ad.unpack_dual(out).tangent, theirs(DQ, P))


def test_vmap():
    assert_close(torch.vmap(lambda q: ours(q, P))(Q), theirs(Q, P))
    many = draw(4, 6, 3, seed=4)
    assert_close(torch.vmap(lambda p: ours(Q, p))(many), torch.stack([theirs(Q, p) for p in many]))


def test_gradcheck():
    q, p = Q.clone().requires_grad_(), P.clone().requires_grad_()
    assert torch.autograd.gradcheck(ours, (q, p), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, (q, p))


@pytest.mark.parametrize(
    ("match", "q", "p"),
    [
        ("2 heads, q has 1", (6, 8), (2, 7, 8)),
        ("1 heads, q has 3", (2, 3, 6, 8), (1, 7, 8)),
        (r"needed, got .*\(2, 3, 7, 8\)", (2, 3, 6, 8), (2, 3, 7, 8)),
    ],
)
def test_the_same_inputs_are_refused(match, q, p):
    q, p = draw(*q), draw(*p)
    with pytest.raises(RuntimeError, match=match):
        ours(q, p)
    with pytest.raises(RuntimeError, match="wavepe: q"):
        func.vjp(ours, q, p)


def test_vmap_over_both_and_per_head():
    q, p = draw(4, 2, 3, 5, 8), draw(4, 3, 6, 8, seed=1)
    expected = torch.stack([ours(a, b) for a, b in zip(q, p, strict=True)])
    assert_close(torch.vmap(ours)(q, p), expected)
    assert_close(torch.vmap(lambda q: ours(q, p[0]))(q), ours(q, p[0]))
    one = draw(1, 6, 8)
    flat = draw(4, 5, 8, seed=2)
    assert_close(torch.vmap(lambda q: ours(q, one))(flat), ours(flat, one[0]))
    assert_close(torch.vmap(lambda p: ours(q[0], p))(p), torch.stack([ours(q[0], t) for t in p]))


def test_compiled_forward_mode():
    torch._dynamo.reset()
    call = torch.compile(lambda q: func.jvp(lambda q: ours(q, P), (q,), (DQ,))[1], backend="eager")
    assert_close(call(Q), theirs(DQ, P))
    torch._dynamo.reset()
