"""rope and rope_qk under torch.func, vmap and forward mode, against the expression in torch."""

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


def turn(*shape):
    angle = torch.rand(*shape, dtype=F64, generator=torch.Generator().manual_seed(5)) * 6
    return angle.cos(), angle.sin()


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


COS, SIN = turn(5, 3)


def rotated(x, cos=COS, sin=SIN, interleaved=False):
    h = cos.shape[-1]
    first, second = (
        (slice(0, 2 * h, 2), slice(1, 2 * h, 2))
        if interleaved
        else (
            slice(0, h),
            slice(h, 2 * h),
        )
    )
    y = x.clone()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def cubes(rope):
    return lambda x: (rope(x) ** 3).sum()


OURS = cubes(lambda x: ops.rope(x, COS, SIN))
THEIRS = cubes(rotated)


def assert_close(got, expected):
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8)])
@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd"])
def test_first_derivatives(name, shape):
    x = draw(*shape)
    assert_close(getattr(func, name)(OURS)(x), func.grad(THEIRS)(x))


def test_second_derivatives():
    x = draw(2, 5, 8)
    assert_close(func.hessian(OURS)(x), func.hessian(THEIRS)(x))
    assert_close(
        func.grad(lambda x: func.grad(OURS)(x).pow(2).sum())(x),
        func.grad(lambda x: func.grad(THEIRS)(x).pow(2).sum())(x),
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_jvp(interleaved):
    x, t = draw(2, 3, 5, 8), draw(2, 3, 5, 8, seed=1)
    value, tangent = func.jvp(lambda x: ops.rope(x, COS, SIN, interleaved=interleaved), (x,), (t,))
    assert_close(value, rotated(x, interleaved=interleaved))
    # a rotation is linear, the copied tail too
    assert_close(tangent, rotated(t, interleaved=interleaved))


@pytest.mark.parametrize("axis", [0, 1, -1, -3])
def test_vmap_over_any_axis(axis):
    x = draw(2, 3, 5, 8)
    moved = x.movedim(0, axis)
    got = torch.vmap(lambda y: ops.rope(y, COS, SIN), in_dims=axis)(moved)
    assert_close(got, rotated(x))


@pytest.mark.parametrize("shape", [(4, 5, 8), (4, 3, 5, 8), (4, 2, 3, 5, 8)])
def test_vmap_shapes(shape):
    x = draw(*shape)
    assert_close(torch.vmap(lambda y: ops.rope(y, COS, SIN))(x), rotated(x))
    raw = torch.ops.wavepe.rope
    assert_close(torch.vmap(lambda y: raw(y, COS, SIN, False, True))(x), rotated(x, COS, -SIN))


def test_vmap_nested():
    x = draw(4, 2, 3, 5, 8)
    assert_close(torch.vmap(torch.vmap(lambda y: ops.rope(y, COS, SIN)))(x), rotated(x))


def test_vmap_over_tables():
    x = draw(2, 3, 5, 8)
    cos, sin = turn(2, 5, 3)
    expected = torch.stack([rotated(x[i], cos[i], sin[i]) for i in range(2)])
    assert_close(torch.vmap(ops.rope)(x, cos, sin), expected)
    alone = torch.vmap(lambda c, s: ops.rope(x, c, s))(cos, sin)
    assert_close(alone, torch.stack([rotated(x, cos[i], sin[i]) for i in range(2)]))
    many, _ = turn(4, 2, 5, 3)  # a table (B, L, h) per example, the other shared
    got = torch.vmap(lambda c: ops.rope(x, c, sin))(many)
    assert_close(got, torch.stack([rotated(x, c[:, None], sin[:, None]) for c in many]))


def test_vmap_of_gradients_and_back():
    x = draw(2, 3, 5, 8)
    expected = func.grad(THEIRS)(x)
    assert_close(torch.vmap(func.grad(OURS))(x), expected)
    assert_close(func.grad(lambda x: torch.vmap(OURS)(x).sum())(x), expected)


def test_rope_qk():
    q, k, t = draw(2, 3, 5, 8), draw(2, 1, 5, 8, seed=1), draw(2, 3, 5, 8, seed=2)

    def ours(q, k):
        q, k = ops.rope_qk(q, k, COS, SIN)
        return (q**2).sum() * (k**3).sum()

    def theirs(q, k):
        return (rotated(q) ** 2).sum() * (rotated(k) ** 3).sum()

    for argument in (0, 1):
        assert_close(func.grad(ours, argument)(q, k), func.grad(theirs, argument)(q, k))
    for y, x in zip(
        torch.vmap(lambda q, k: ops.rope_qk(q, k, COS, SIN))(q, k), (q, k), strict=True
    ):
        assert_close(y, rotated(x))
    raw = torch.vmap(lambda q, k: torch.ops.wavepe.rope_qk(q, k, COS, SIN))(q, k)
    for y, x in zip(raw, (q, k), strict=True):
        assert_close(y, rotated(x))
    _, (dq, dk) = func.jvp(lambda q: ops.rope_qk(q, k, COS, SIN), (q,), (t,))
    assert_close(dq, rotated(t))
    assert not dk.any()
    with pytest.raises(RuntimeError, match="one dtype"):
        func.grad(lambda q: ops.rope_qk(q, k.float(), COS, SIN)[0].sum())(q)


def test_forward_mode():
    x, k, t = draw(2, 3, 5, 8), draw(2, 1, 5, 8, seed=1), draw(2, 3, 5, 8, seed=2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t)
        assert_close(forward_ad.unpack_dual(ops.rope(dual, COS, SIN)).tangent, rotated(t))
        q_out, k_out = ops.rope_qk(dual, k, COS, SIN)
        assert_close(forward_ad.unpack_dual(q_out).tangent, rotated(t))
        assert forward_ad.unpack_dual(k_out).tangent is None
        with pytest.raises(RuntimeError, match="not differentiable in cos and sin"):
            ops.rope(x, forward_ad.make_dual(COS, COS), SIN)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck_both_ways(interleaved):
    q, k = draw(1, 2, 5, 8).requires_grad_(), draw(1, 1, 5, 8, seed=1).requires_grad_()

    def both(q, k):
        return ops.rope_qk(q, k, COS, SIN, interleaved=interleaved)

    options = {"check_forward_ad": True, "check_batched_grad": True}
    assert torch.autograd.gradcheck(both, (q, k), **options)
    assert torch.autograd.gradgradcheck(both, (q, k))
    one = (q,)
    assert torch.autograd.gradcheck(lambda q: ops.rope(q, COS, SIN), one, **options)


def test_tables_have_no_gradient_anywhere():
    x = draw(3, 5, 8)
    for transform in (func.grad, func.jacfwd, func.jacrev):
        with pytest.raises(RuntimeError, match="not differentiable in cos and sin"):
            transform(lambda c: ops.rope(x, c, SIN).sum())(COS)


def test_what_the_raw_operator_cannot_do_says_so():
    with pytest.raises(RuntimeError, match="setup_context"):
        func.grad(lambda x: torch.ops.wavepe.rope(x, COS, SIN).sum())(draw(5, 8))
    x, t = draw(5, 8), draw(5, 8, seed=1)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward mode"):
        torch.ops.wavepe.rope(forward_ad.make_dual(x, t), COS, SIN)
    with pytest.raises(RuntimeError, match="no forward mode"):
        func.jvp(lambda x: torch.ops.wavepe.rope(x, COS, SIN), (x,), (t,))
    with pytest.raises(RuntimeError, match="rope_"):
        torch.vmap(lambda x: ops.rope_(x.clone(), COS, SIN))(draw(3, 5, 8))


def test_in_place_refuses():
    x, t = draw(3, 5, 8), draw(3, 5, 8, seed=1)
    for transform in (func.grad, func.jacfwd):
        with pytest.raises(RuntimeError, match="rope_ has no derivative"):
            transform(lambda x: ops.rope_(x.clone(), COS, SIN).sum())(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward mode; use rope"):
        ops.rope_(forward_ad.make_dual(x, t), COS, SIN)


def test_rope_table_is_a_constant():
    positions, inv_freq = torch.arange(4), torch.tensor([1.0, 0.5])
    for transform in (func.grad, func.jacfwd):
        with pytest.raises(RuntimeError, match="rope_table has no gradient to inv_freq"):
            transform(lambda f: ops.rope_table(positions, f)[0].sum())(inv_freq)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no gradient to inv_freq"):
        ops.rope_table(positions, forward_ad.make_dual(inv_freq, inv_freq))
    x = draw(4, 4)

    def with_table(x):
        cos, sin = ops.rope_table(positions, inv_freq, dtype=F64)
        return (ops.rope(x, cos, sin) ** 3).sum()

    cos, sin = ops.rope_table(positions, inv_freq, dtype=F64)
    expected = func.grad(lambda x: (rotated(x, cos, sin) ** 3).sum())(x)
    assert_close(func.grad(with_table)(x), expected)


def test_vmap_of_rope_table():
    positions, inv_freq = torch.arange(12).view(3, 4), torch.rand(3, 2, dtype=F64)
    for got, expected in zip(
        torch.vmap(lambda m: ops.rope_table(m, inv_freq[0]))(positions),
        ops.rope_table(positions, inv_freq[0]),
        strict=True,
    ):
        assert torch.equal(got, expected)
    alone, _ = torch.vmap(lambda f: ops.rope_table(positions, f))(inv_freq)
    both, _ = torch.vmap(ops.rope_table)(positions, inv_freq)
    for i in range(3):
        assert torch.equal(alone[i], ops.rope_table(positions, inv_freq[i])[0])
        assert torch.equal(both[i], ops.rope_table(positions[i], inv_freq[i])[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_transforms_are_right_or_say_so(backend):
    """Dynamo, left alone, would trace past the derivative and give zeros."""
    x, t = draw(2, 5, 8), draw(2, 5, 8, seed=1)

    def compiled(call, **options):
        torch._dynamo.reset()
        return torch.compile(call, backend=backend, **options)

    def rope(x):
        return ops.rope(x, COS, SIN)

    assert_close(compiled(lambda x: func.jvp(rope, (x,), (t,))[1])(x), rotated(t))
    assert_close(compiled(lambda x: torch.vmap(rope)(x), fullgraph=True)(x), rotated(x))
    with pytest.raises(Exception, match=r"Dynamo (requires|does not support)"):
        compiled(lambda x: func.grad(OURS)(x), fullgraph=True)(x)
    call = compiled(rope)
    assert_close(call(x), rotated(x))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward mode"):
        call(forward_ad.make_dual(x, t))
    torch._dynamo.reset()
