"""wavepe.ops.rope_: in place, inside its memory, and never behind autograd's back."""

import itertools

import numpy as np
import pytest
import wavepe
from cases import Guard, assert_agrees, generator, load_torch
from tensors import LAYOUTS, each_form, laid_out, normal, table

torch, ops = load_torch()


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


def saved(y, change):
    z = y.exp()
    change(z)
    return z


def saved_input(y, change):
    z = y * 1.0
    w = z * z
    return change(z) + w


def through_a_view(y, change):
    z = y * 2.0
    change(z[:, 1:])
    return z * z


def base_of_a_view(y, change):
    z = y * 2.0
    v = z[:, :1]
    change(z)
    return v * v + z.sum()


def saved_constant(y, change):
    constant = torch.ones_like(y, requires_grad=False) * 1.5
    product = y * constant
    change(constant)
    return product


def saved_leaf(y, change):
    leaf = y.detach().requires_grad_()
    product = y * leaf
    with torch.no_grad():
        change(leaf)
    return product


def saved_behind_detach(y, change):
    z = y.exp()
    change(z.detach())
    return z


def constant(y, change):
    return y * change(torch.ones_like(y, requires_grad=False) * 1.5)


BY_ROPE, BY_TORCH = "rope_ would overwrite an x that requires grad", "modified by an inplace"


@pytest.mark.parametrize(
    ("build", "refused"),
    [
        *(
            (build, BY_ROPE)
            for build in (plain, saved, saved_input, through_a_view, base_of_a_view)
        ),
        *((build, BY_TORCH) for build in (saved_constant, saved_leaf, saved_behind_detach)),
        (constant, None),
    ],
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
