"""wavepe.ops.wavelet_table: values, gradients to scale and shift, compile, bad input."""

import numpy as np
import oracle
import pytest
import wavepe
from cases import (
    SIZES,
    assert_agrees,
    assert_same_bits,
    compiled_once,
    generator,
    load_torch,
    not_emulated,
    recording_backend,
)
from checks import check_wavelet_table as check
from tensors import assert_threads_agree, normal

torch, ops = load_torch()

each_kind = pytest.mark.parametrize("kind", oracle.KINDS)
each_mirrored = pytest.mark.parametrize("mirrored", [None, False, True])


def grid(rng, dim, dtype=torch.float64):
    scale = torch.from_numpy(rng.uniform(0.7, 40, dim)).to(dtype)
    return scale, torch.from_numpy(rng.uniform(-5, 20, dim)).to(dtype)


@each_kind
@each_mirrored
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_the_oracle(variant, kind, mirrored, dtype):
    """As the NumPy function of the same name: evaluated in float64, rounded once to the dtype of
    scale."""
    rng = generator("oracle")
    numpy_dtype = np.float32 if dtype == torch.float32 else np.float64
    for w in SIZES:
        scale, shift = grid(rng, SIZES[-w % len(SIZES)], dtype)
        offsets = rng.integers(-100, 200, w)
        got = ops.wavelet_table(
            torch.from_numpy(offsets), scale, shift, kind=kind, mirrored=mirrored
        )
        arrays = scale.double().numpy(), shift.double().numpy()
        check(got.numpy(), offsets, *arrays, kind, mirrored, numpy_dtype)
        options = {"kind": kind, "mirrored": mirrored, "dtype": numpy_dtype}
        assert_agrees(got.numpy(), wavepe.wavelet_table(offsets, *arrays, **options))


@not_emulated
@each_kind
@each_mirrored
def test_numpy_and_torch_agree_bit_for_bit(variant, kind, mirrored):
    scale, shift = (torch.from_numpy(a) for a in wavepe.wavelet_grid(24, 6))
    for w in (1, 7, 64, 97):
        got = ops.wavelet_table(w, scale, shift, kind=kind, mirrored=mirrored)
        options = {"kind": kind, "mirrored": mirrored}
        want = wavepe.wavelet_table(w, scale.numpy(), shift.numpy(), dtype=np.float64, **options)
        assert_same_bits(got.numpy(), want)


def test_forms_of_offsets(variant):
    scale, shift = (torch.from_numpy(a) for a in wavepe.wavelet_grid(8))
    whole = ops.wavelet_table(20, scale, shift)
    for integer in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        for mirrored in (False, True):
            offsets = torch.arange(20, dtype=integer)
            got = ops.wavelet_table(offsets, scale, shift, mirrored=mirrored)
            assert torch.equal(got, ops.wavelet_table(20, scale, shift, mirrored=mirrored))
    assert torch.equal(ops.wavelet_table(torch.arange(20)[2::5], scale, shift), whole[2::5])
    smallest = torch.tensor([-128], dtype=torch.int8)
    assert torch.equal(
        ops.wavelet_table(smallest, scale, shift, mirrored=True),
        ops.wavelet_table(torch.tensor([128]), scale, shift),
    )
    assert torch.equal(
        ops.wavelet_table(20, scale.repeat_interleave(2)[::2], shift[:1].expand(8)),
        ops.wavelet_table(20, scale, torch.zeros_like(shift)),
    )
    assert ops.wavelet_table(0, scale, shift).shape == (0, 8)
    assert ops.wavelet_table(3, scale[:0], shift[:0]).shape == (3, 0)


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("which", [0, 1])
def test_gradients_of_one_alone(which):
    leaves = [torch.ones(2), torch.zeros(2)]
    leaves[which].requires_grad_()
    ops.wavelet_table(3, *leaves).sum().backward()
    assert leaves[which].grad.any()
    with torch.no_grad():
        assert not ops.wavelet_table(3, *leaves).requires_grad


@pytest.mark.parametrize("kind", oracle.EVEN)
@each_mirrored
def test_derivatives(variant, kind, mirrored):
    scale, shift = (a.requires_grad_() for a in grid(generator("grad", kind), 5))
    offsets = torch.tensor([-7, -1, 0, 2, 5, 30])

    def table(scale, shift):
        return ops.wavelet_table(offsets, scale, shift, kind=kind, mirrored=mirrored)

    assert torch.autograd.gradcheck(table, (scale, shift))
    for which in (0, 1):
        inputs = [scale.detach().clone(), shift.detach().clone()]
        inputs[which].requires_grad_()
        assert torch.autograd.gradcheck(table, tuple(inputs))
    (first,) = torch.autograd.grad(table(scale, shift).sum(), scale, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(first.sum(), scale)


@pytest.mark.parametrize("kind", oracle.EVEN)
def test_float32_gradients(variant, kind):
    scale, shift = grid(generator("float32", kind), 33, torch.float32)
    g = torch.from_numpy(generator("g").normal(size=(50, 33)))
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [a.to(dtype).requires_grad_() for a in (scale, shift)]
        out = ops.wavelet_table(50, *leaves, kind=kind)
        results.append(torch.autograd.grad(out, leaves, g.to(dtype)))
    for a, b in zip(*results, strict=True):
        assert a.dtype == torch.float32
        assert torch.allclose(a.double(), b, rtol=2e-5, atol=2e-5 * b.abs().max().item())


@each_mirrored
def test_haar_has_gradient_zero(variant, mirrored):
    scale, shift = (a.requires_grad_() for a in grid(generator("haar"), 5))
    ops.wavelet_table(9, scale, shift, kind="haar", mirrored=mirrored).sum().backward()
    assert not scale.grad.any()
    assert not shift.grad.any()


@pytest.mark.parametrize("kind", oracle.EVEN)
def test_gradients_of_far_tails_are_zero(variant, kind):
    """Where psi is 0 its derivative is 0 too, never inf * 0."""
    scale = torch.tensor([1e-3, 1e-30, 1.0], requires_grad=True)
    shift = torch.tensor([0.0, 0.0, -1e30], requires_grad=True)
    table = ops.wavelet_table(torch.tensor([5, 2**31]), scale, shift, kind=kind)
    table.sum().backward()
    assert not table.any()
    assert not scale.grad.any()
    assert not shift.grad.any()


# ------------------------------------------------------------------ framework


@each_kind
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(kind, grad):
    scale, shift = (a.requires_grad_(grad) for a in grid(generator("opcheck"), 6))
    args = (torch.arange(-3, 5), scale, shift)
    options = {"kind": kind, "mirrored": None if grad else True}
    torch.library.opcheck(torch.ops.wavepe.wavelet_table.default, args, options)


def test_compiles_whole_for_any_length():
    backend = recording_backend()
    scale, shift = grid(generator("compile"), 8)

    def bias(q, scale, shift):
        p = ops.wavelet_table(q.shape[-2], scale, shift, kind="morlet")
        return ops.relative_bias(q, p, q.shape[-2])

    compiled = torch.compile(bias, backend=backend, fullgraph=True, dynamic=True)
    for length in (5, 9, 23):
        q, results = torch.ones(2, 3, length, 8, dtype=torch.float64), []
        for function in (bias, compiled):
            leaves = [a.clone().requires_grad_() for a in (q, scale, shift)]
            out = function(*leaves)
            results.append((out, *torch.autograd.grad(out.pow(2).sum(), leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert compiled_once(backend)


def test_bits_do_not_depend_on_threads(variant):
    leaves = [a.requires_grad_() for a in grid(generator("threads"), 33, torch.float32)]
    g = normal(generator("threads"), 1500, 33)

    def call():
        out = ops.wavelet_table(1500, *leaves)
        return [out, *torch.autograd.grad(out, leaves, g)]

    assert_threads_agree(call, 2, 5)


def test_autocast_keeps_the_type_and_meta_the_shape():
    scale, shift = torch.ones(4), torch.zeros(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.wavelet_table(5, scale, shift).dtype == torch.float32
    got = ops.wavelet_table(torch.arange(5, device="meta"), scale.to("meta"), shift.to("meta"))
    assert got.is_meta
    assert got.shape == (5, 4)


T, ONE = torch.arange(5), torch.ones(4)
ERRORS = [
    ("ricker", (T, ONE, ONE), {"kind": "mexican"}),
    ("3", (T, ONE, torch.ones(3)), {}),
    (r"scale and shift must be 1-D .* got \(2, 2\)", (T, torch.ones(2, 2), torch.ones(2, 2)), {}),
    (r"offsets must be 1-D, got .*\(1, 5\)", (T.view(1, 5), ONE, ONE), {}),
    ("offsets must .*got float32", (T.float(), ONE, ONE), {}),
    ("offsets must .* got bool", (T.bool(), ONE, ONE), {}),
    ("scale must be .*float32.* got int64", (T, ONE.long(), ONE.long()), {}),
    (
        "scale must be .*float32.* got complex64",
        (T, ONE.to(torch.complex64), ONE.to(torch.complex64)),
        {},
    ),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("match", "args", "options"), ERRORS)
def test_errors(match, args, options, device):
    with pytest.raises(RuntimeError, match=match):
        ops.wavelet_table(*(a.to(device) for a in args), **options)


def test_errors_of_counts_and_devices():
    with pytest.raises(RuntimeError, match="-1"):
        ops.wavelet_table(-1, ONE, ONE)
    for args in ((T.to("meta"), ONE, ONE), (T, ONE.to("meta"), ONE), (T, ONE, ONE.to("meta"))):
        with pytest.raises(RuntimeError, match="meta"):
            ops.wavelet_table(*args)
    with pytest.raises(RuntimeError, match="4611686018427387904"):
        ops.wavelet_table(2**62, ONE, ONE)
    for count in (2**64, 10**30):
        with pytest.raises(RuntimeError, match=f"offsets must be an int from 0 .*{count}"):
            ops.wavelet_table(count, ONE, ONE)
    with pytest.raises(RuntimeError, match="kind must be a string, got 3"):
        ops.wavelet_table(3, ONE, ONE, kind=3)
    with pytest.raises(TypeError, match="positional arguments"):
        ops.wavelet_table(3, ONE, ONE, "ricker")


def test_errors_of_the_raw_gradients():
    """What autograd calls; no error of a table that is not there."""
    grad = torch.ones(5, 4)
    for name in ("wavelet_table_backward", "sampled_wavelet_table_backward"):
        raw = getattr(torch.ops.wavepe, name)
        with pytest.raises(RuntimeError, match="kind 'mexican'"):
            raw(grad, T, ONE, ONE, "mexican", None)
        with pytest.raises(RuntimeError, match=r"must be a (torch\.)?Tensor, got None"):
            raw(grad, T, None, ONE, "ricker", None)
    with pytest.raises(RuntimeError, match=r"grad must be \(5, 4\), got \(5, 3\)"):
        torch.ops.wavepe.sampled_wavelet_table_backward(grad[:, :3], T, ONE, ONE, "x", None)


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_gradients_where_the_quotient_overflows(variant, kind):
    """psi is 0 there, whatever u and the scale are: no inf * 0."""
    scale = torch.tensor([1e-308, 1.0], dtype=torch.float64, requires_grad=True)
    shift = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    ops.wavelet_table(torch.tensor([50]), scale, shift, kind=kind).sum().backward()
    assert not scale.grad.any()
    assert not shift.grad.any()


# ------------------------------------------------------------------ torch.func


def loss(scale, shift, kind="ricker"):
    return ops.wavelet_table(T, scale, shift, kind=kind).square().sum()


@each_kind
def test_func_grad(kind):
    """As backward gives it, through jacrev and a batch of scales too."""
    scale, shift = grid(generator("func", kind), 6)
    leaves = [a.clone().requires_grad_() for a in (scale, shift)]
    wanted = torch.autograd.grad(loss(*leaves, kind), leaves)
    got = torch.func.grad(loss, argnums=(0, 1))(scale, shift, kind)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    table = lambda scale: ops.wavelet_table(T, scale, shift, kind=kind)  # noqa: E731
    jacobian = torch.func.jacrev(table)(scale)
    assert torch.equal(jacobian, torch.autograd.functional.jacobian(table, scale))
    scales = torch.stack([scale, scale / 2, scale + 1])
    batch = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None, None))(scales, shift, kind)
    each = [torch.func.grad(loss)(scale, shift, kind) for scale in scales]
    assert torch.equal(batch, torch.stack(each))


@each_kind
@each_mirrored
@pytest.mark.parametrize(
    "axes", [(None, 0, None), (None, 1, 0), (None, None, 1), (0, None, None), (1, 0, 1)], ids=str
)
def test_vmap(kind, mirrored, axes, capfd):
    rng = generator("vmap")
    size = 3
    tensors = [
        torch.from_numpy(rng.integers(-9, 30, (size, 7))),
        torch.from_numpy(rng.uniform(1, 9, (size, 5))),
        torch.from_numpy(rng.uniform(-3, 9, (size, 5))),
    ]

    def table(*args):
        return ops.wavelet_table(*args, kind=kind, mirrored=mirrored)

    rows = [
        [x[i] if axis is not None else x[0] for x, axis in zip(tensors, axes, strict=True)]
        for i in range(size)
    ]
    given = [
        x[0] if axis is None else x.movedim(0, axis) for x, axis in zip(tensors, axes, strict=True)
    ]
    got = torch.func.vmap(table, in_dims=axes)(*given)
    assert torch.equal(got, torch.stack([table(*row) for row in rows]))
    assert "performance drop" not in capfd.readouterr().err  # no loop of torch's own


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # forward mode's own
def test_forward_mode_and_second_derivatives_raise():
    """Torch would give tangents of zero in silence."""
    scale, shift = ONE.double() + 1, ONE.double()
    for transform in (torch.func.jacfwd, torch.func.hessian):
        with pytest.raises(NotImplementedError, match="jvp"):
            transform(loss)(scale, shift)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda scale: loss(scale, shift), (scale,), (scale,))
    forward = torch.autograd.forward_ad
    with forward.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        loss(forward.make_dual(scale, scale), shift)
    with forward.dual_level():  # nothing to differentiate here
        assert torch.equal(loss(scale, shift), loss(scale, shift))
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.func.jacrev(torch.func.grad(loss))(scale, shift)
