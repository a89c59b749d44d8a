"""wavepe.ops.rope, rope_, rope_qk and rope_table: what test_ops_every.py does not test."""

import itertools

import numpy as np
import oracle
import pytest
import torch
import wavepe
from cases import Guard, assert_agrees, assert_same_bits, generator, not_emulated
from tensors import FLOATS, LAYOUTS, check_rope, laid_out, normal, of_transforms, table
from torch.autograd import forward_ad
from wavepe import ops

pytestmark = of_transforms
FORMS = list(itertools.product((False, True), repeat=2))
each_form = pytest.mark.parametrize(("interleaved", "inverse"), FORMS)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("of_table", FLOATS)
def test_types_of_x_and_table(variant, dtype, of_table):
    rng = generator("types")
    x = normal(rng, 2, 3, 5, 22, dtype=dtype)
    for shape, interleaved in itertools.product(((5, 10), (1, 5, 10), (2, 5, 11)), (False, True)):
        cos, sin = table(rng, *shape, dtype=of_table)
        got = ops.rope(x, cos, sin, interleaved=interleaved)
        check_rope(got, x, cos, sin, interleaved)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        again = ops.rope(x, cos.to(wide), sin.to(wide), interleaved=interleaved)
        assert torch.equal(got, again), "the table is read as float32"


def test_outputs_are_dense_in_the_order_of_axes():
    x, (cos, sin) = normal(generator("dense"), 2, 3, 5, 8), table(generator("dense"), 5, 4)
    for name, view in laid_out(x):
        want = torch.empty_like(view).stride()
        for y in (ops.rope(view, cos, sin), *ops.rope_qk(x, view, cos, sin)[1:]):
            assert y.stride() == want, name


def test_no_pairs_is_a_copy():
    x = normal(generator("copy"), 2, 3, 5, 8)
    got = ops.rope(x, torch.ones(5, 0), torch.ones(5, 0))
    assert torch.equal(got, x)
    assert got.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("high", [0x0000, 0x3F80, 0x3F81, 0xFF7F, 0x7F80, 0xFFFF])
def test_bfloat16_rounds_every_number_to_nearest_even(variant, high):
    """Every float32 with these upper 16 bits: ties, the largest number, infinity and NaNs."""
    bits = np.arange(1 << 16, dtype=np.uint32) | np.uint32(high << 16)
    cos = torch.from_numpy(bits.view(np.float32)).reshape(-1, 32)
    sin = cos.flip(1)
    for interleaved in (False, True):
        x = torch.zeros(len(cos), 64, dtype=torch.bfloat16)
        (x[:, ::2] if interleaved else x[:, :32]).fill_(1)  # the pairs become (cos, sin)
        got = ops.rope(x, cos, sin, interleaved=interleaved)
        pairs = got.unflatten(1, (32, 2)).mT if interleaved else got.unflatten(1, (2, 32))
        want = torch.stack([cos * 1 - sin * 0, sin * 1 + cos * 0], 1).bfloat16()
        torch.testing.assert_close(pairs, want, rtol=0, atol=0, equal_nan=True)


@each_form
def test_in_place(variant, interleaved, inverse):
    rng, options = generator("in place"), {"interleaved": interleaved, "inverse": inverse}
    for name, view in laid_out(normal(rng, 2, 3, 5, 18), [LAYOUTS]):
        x, (cos, sin) = view.clone(memory_format=torch.preserve_format), table(rng, 5, 8)
        want, version = ops.rope(x, cos, sin, **options), x._version
        assert ops.rope_(x, cos, sin, **options) is x, name
        assert torch.equal(x, want), name
        assert x._version > version, "autograd would not notice the change"


def test_in_place_stays_inside(variant):
    rng = generator("in place canary")
    for shape, h in (
        ((1, 1, 1, 2), 1),
        ((2, 3, 5, 7), 3),
        ((1, 2, 3, 66), 32),
        ((2, 1, 4, 35), 17),
    ):
        for layout, interleaved in itertools.product(
            ("contiguous", "sliced", "fortran", "offset"), (False, True)
        ):
            guard, (cos, sin) = Guard(shape, np.float32, layout), table(rng, shape[2], h)
            guard.out[...] = rng.normal(size=shape)
            want = wavepe.rope(guard.out, cos.numpy(), sin.numpy(), interleaved=interleaved)
            ops.rope_(torch.from_numpy(guard.out), cos, sin, interleaved=interleaved)
            guard.check(f"{shape} {layout}")
            assert_agrees(guard.out, want, f"{shape} {layout}")


def test_in_place_refuses_memory_that_is_shared():
    cos, sin = table(generator("shared"), 5, 9)
    for x in (torch.ones(1, 1, 5, 18).expand(2, 3, 5, 18), torch.ones(1).expand(1, 1, 5, 18)):
        with pytest.raises(RuntimeError, match=r"cannot write to an expanded x: .* has stride 0"):
            ops.rope_(x, cos, sin)


def test_in_place_on_a_leaf_raises():
    cos, sin = table(generator("leaf"), 5, 9)
    x = torch.ones(1, 2, 5, 18, requires_grad=True)
    with pytest.raises(RuntimeError, match=BY_ROPE):
        ops.rope_(x, cos, sin)
    assert torch.equal(x, torch.ones_like(x)), "refused, but changed"
    with torch.no_grad():
        assert ops.rope_(x, cos, sin) is x
    with torch.inference_mode():
        ops.rope_(torch.ones(1, 2, 5, 18), cos, sin)


def plain(y, change):
    return change(y)


def through_a_view(y, change):
    z = y * 2.0
    change(z[:, 1:])
    return z * z


def saved_constant(y, change):
    constant = torch.ones_like(y, requires_grad=False) * 1.5
    product = y * constant
    change(constant)
    return product


def saved_behind_detach(y, change):
    z = y.exp()
    change(z.detach())
    return z


def constant(y, change):
    return y * change(torch.ones_like(y, requires_grad=False) * 1.5)


BY_ROPE, BY_TORCH = "rope_ would overwrite an x that requires grad", "modified by an inplace"


REFUSED = {
    BY_ROPE: (plain, through_a_view),
    BY_TORCH: (saved_constant, saved_behind_detach),
    None: (constant,),
}


@pytest.mark.parametrize(
    ("build", "refused"), [(build, words) for words, builds in REFUSED.items() for build in builds]
)
def test_in_place_never_gives_a_wrong_gradient(build, refused):
    """RuntimeError, at the call or in backward, or the gradient of the same thing out of place."""
    cos, sin = table(generator("safety"), 5, 9, dtype=torch.float64)

    def gradient(change):
        leaf = normal(generator("safety"), 1, 3, 5, 18, dtype=torch.float64).requires_grad_()
        build(leaf * 1.5, change).pow(2).sum().backward()
        return leaf.grad

    if refused:
        with pytest.raises(RuntimeError, match=refused):
            gradient(lambda z: ops.rope_(z, cos, sin))
    else:
        want = gradient(lambda z: ops.rope(z, cos, sin))
        assert torch.equal(gradient(lambda z: ops.rope_(z, cos, sin)), want)


def test_in_place_compiles():
    rng = generator("compile in place")
    x, (cos, sin) = normal(rng, 1, 2, 5, 8), table(rng, 5, 4)
    want = ops.rope(x, cos, sin) * 2

    @torch.compile(backend="aot_eager", fullgraph=True)
    def turned(x, cos, sin):
        return ops.rope_(x, cos, sin) * 2

    assert torch.equal(turned(x, cos, sin), want)
    assert torch.equal(x * 2, want), "the input itself must have changed"


def test_in_place_refuses_transforms():
    x, (cos, sin) = normal(generator("func"), 3, 5, 8), table(generator("func"), 5, 3)

    def turned(x):
        return ops.rope_(x.clone(), cos, sin).sum()

    for transform in (torch.func.grad, torch.func.jacfwd):
        with pytest.raises(RuntimeError, match="rope_ has no derivative"):
            transform(turned)(x)
    with pytest.raises(RuntimeError, match="rope_"):
        torch.vmap(turned)(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward mode; use rope"):
        ops.rope_(forward_ad.make_dual(x, x), cos, sin)


def test_what_compiled_transforms_cannot_do_says_so():
    x, (cos, sin) = normal(generator("func"), 3, 5, 8), table(generator("func"), 5, 3)
    torch._dynamo.reset()

    def turned(x):
        return ops.rope(x, cos, sin)

    gradient = torch.func.grad(lambda x: turned(x).sum())
    with pytest.raises(Exception, match=r"Dynamo (requires|does not support)"):
        torch.compile(lambda x: gradient(x), backend="eager", fullgraph=True)(x)
    call = torch.compile(turned, backend="eager")
    assert torch.equal(call(x), turned(x))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward mode"):
        call(forward_ad.make_dual(x, x))
    torch._dynamo.reset()


def test_qk_needs_one_dtype_under_transforms_too():
    q, (cos, sin) = normal(generator("func"), 3, 5, 8), table(generator("func"), 5, 3)
    with pytest.raises(RuntimeError, match="one dtype"):
        torch.func.grad(lambda q: ops.rope_qk(q, q.double(), cos, sin)[0].sum())(q)


def test_a_table_made_within_a_transform_is_a_constant():
    x, inv_freq = normal(generator("func"), 4, 4, dtype=torch.float64), torch.tensor([1.0, 0.5])

    def cubes(x, tables=None):
        made = ops.rope_table(torch.arange(4), inv_freq, dtype=torch.float64)
        return (ops.rope(x, *(tables or made)) ** 3).sum()

    tables = ops.rope_table(torch.arange(4), inv_freq, dtype=torch.float64)
    got, want = torch.func.grad(cubes)(x), torch.func.grad(cubes)(x, tables)
    assert torch.equal(got, want)


FREQ = torch.from_numpy(oracle.rope_frequencies(34))


@pytest.mark.parametrize("integer", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_integer_types_of_positions(variant, integer):
    positions = torch.arange(40, dtype=integer)
    want = wavepe.rope_table(np.arange(40), FREQ.numpy())
    for got, array in zip(ops.rope_table(positions, FREQ), want, strict=True):
        assert_same_bits(got.numpy(), array)


@not_emulated  # a GPU's positions are not looked at
@pytest.mark.parametrize("position", [2**53 + 1, -(2**53) - 1, 2**53 + 2, 2**63 - 1])
def test_positions_that_float64_does_not_hold_are_refused(position):
    inv_freq = torch.tensor([1.0, 0.5])
    ops.rope_table(torch.tensor([2**53, -(2**53)]), inv_freq)
    with pytest.raises(RuntimeError, match=r"positions must lie within \+-2\^53"):
        ops.rope_table(torch.tensor([0, position]), inv_freq)
