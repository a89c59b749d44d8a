"""wavepe.ops.rope, rope_, rope_qk: against the oracle, with autograd, compile, threads and bad
input."""

import itertools

import pytest
import wavepe
from cases import (
    SIZES,
    assert_same_bits,
    compiled_once,
    generator,
    load_torch,
    not_emulated,
    recording_backend,
)
from tensors import FORMS, assert_threads_agree, each_form, laid_out, normal, table
from tensors import check_rope as check

torch, ops = load_torch()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@each_form
def test_every_size(variant, dtype, interleaved, inverse):
    rng = generator("sizes")
    for h in SIZES:
        for rest in (0, 1, 9):
            x, (cos, sin) = normal(rng, 1, 2, 3, 2 * h + rest, dtype=dtype), table(rng, 3, h)
            got = ops.rope(x, cos, sin, interleaved=interleaved, inverse=inverse)
            check(got, x, cos, sin, interleaved, inverse, f"h={h} rest={rest}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_table", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_types_of_x_and_table(variant, dtype, of_table):
    rng = generator("types")
    x = normal(rng, 2, 3, 5, 22, dtype=dtype)
    for shape in ((5, 10), (1, 5, 10), (2, 5, 11)):
        cos, sin = table(rng, *shape, dtype=of_table)
        for interleaved in (False, True):
            got = ops.rope(x, cos, sin, interleaved=interleaved)
            check(got, x, cos, sin, interleaved)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            again = ops.rope(x, cos.to(wide), sin.to(wide), interleaved=interleaved)
            assert torch.equal(got, again), "the table is read as float32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_strides_and_dense_outputs(variant, dtype):
    rng = generator("strides")
    for name, x in laid_out(normal(rng, 2, 3, 5, 18, dtype=dtype)):
        for h, interleaved in itertools.product((4, 9), (False, True)):
            cos, sin = table(rng, 5, h)
            got = ops.rope(x, cos, sin, interleaved=interleaved)
            check(got, x, cos, sin, interleaved, what=name)
            assert got.stride() == torch.empty_like(x).stride(), name
            assert got.data_ptr() != x.data_ptr()
            plain = ops.rope(x.contiguous(), cos, sin, interleaved=interleaved)
            assert torch.equal(got, plain), name
            wide = table(rng, 5, 2 * h)
            strided = wide[0][:, ::2], wide[1].t().contiguous().t()[:, h:]
            check(ops.rope(x, *strided, interleaved=interleaved), x, *strided, interleaved)


@not_emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_form
def test_numpy_and_torch_agree_bit_for_bit(variant, dtype, interleaved, inverse):
    rng = generator("both")
    x, (cos, sin) = normal(rng, 2, 3, 9, 37, dtype=dtype), table(rng, 9, 17, dtype=dtype)
    options = {"interleaved": interleaved, "inverse": inverse}
    want = wavepe.rope(x.numpy(), cos.numpy(), sin.numpy(), **options)
    assert_same_bits(ops.rope(x, cos, sin, **options).numpy(), want)
    assert_same_bits(ops.rope_(x.clone(), cos, sin, **options).numpy(), want)


@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8), (2, 3, 5, 0)])
def test_empty(shape):
    x = torch.ones(shape)
    cos = torch.ones(shape[2], shape[3] // 2)
    assert ops.rope(x, cos, cos).shape == shape
    assert ops.rope_(x, cos, cos) is x
    assert all(t.shape == shape for t in ops.rope_qk(x, x, cos, cos))


def test_no_pairs_is_a_copy():
    x = normal(generator("copy"), 2, 3, 5, 8)
    got = ops.rope(x, torch.ones(5, 0), torch.ones(5, 0))
    assert torch.equal(got, x)
    assert got.data_ptr() != x.data_ptr()


@each_form
def test_inverse_undoes(variant, interleaved, inverse):
    rng = generator("inverse")
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        x, (cos, sin) = normal(rng, 2, 3, 5, 37, dtype=dtype), table(rng, 5, 16, dtype=dtype)
        there = ops.rope(x, cos, sin, interleaved=interleaved, inverse=inverse)
        back = ops.rope(there, cos, sin, interleaved=interleaved, inverse=not inverse)
        assert torch.allclose(back, x, rtol=tolerance, atol=4 * tolerance)
        assert torch.equal(back[..., 32:], x[..., 32:])


# ------------------------------------------------------------------ rope_qk


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@each_form
def test_qk_is_two_ropes(variant, dtype, interleaved, inverse):
    rng, options = generator("qk"), {"interleaved": interleaved, "inverse": inverse}
    for heads, key_heads in ((4, 4), (4, 1), (8, 2), (1, 3)):
        q = normal(rng, 2, 7, heads, 20, dtype=dtype).transpose(1, 2)
        k = normal(rng, 2, 7, key_heads, 20, dtype=dtype).transpose(1, 2)
        for shape in ((7, 10), (1, 7, 8), (2, 7, 10)):
            cos, sin = table(rng, *shape)
            got = ops.rope_qk(q, k, cos, sin, **options)
            assert isinstance(got, tuple)
            assert torch.equal(got[0], ops.rope(q, cos, sin, **options))
            assert torch.equal(got[1], ops.rope(k, cos, sin, **options))
            assert [t.stride() for t in got] == [torch.empty_like(t).stride() for t in (q, k)]


def test_qk_gradients():
    rng = generator("qk grad")
    q, k = (
        normal(rng, 1, 4, 3, 7, dtype=torch.float64),
        normal(rng, 1, 2, 3, 7, dtype=torch.float64),
    )
    cos, sin = table(rng, 3, 3, dtype=torch.float64)
    for interleaved, inverse in FORMS:

        def turned(q, k, i=interleaved, v=inverse):
            return ops.rope_qk(q, k, cos, sin, interleaved=i, inverse=v)

        inputs = q.clone().requires_grad_(), k.clone().requires_grad_()
        assert torch.autograd.gradcheck(turned, inputs)
        assert torch.autograd.gradgradcheck(turned, inputs)
    # A gradient of one of the two alone.
    for which in (0, 1):
        inputs = [q.clone(), k.clone()]
        inputs[which].requires_grad_()
        ops.rope_qk(*inputs, cos, sin)[which].sum().backward()
        want = ops.rope(torch.ones_like(inputs[which]), cos, sin, inverse=True)
        assert torch.allclose(inputs[which].grad, want, atol=1e-14)


# ------------------------------------------------------------------ autograd


@each_form
def test_gradcheck(variant, interleaved, inverse):
    rng = generator("grad")
    cos, sin = table(rng, 3, 3, dtype=torch.float64)

    def turned(x):
        return ops.rope(x, cos, sin, interleaved=interleaved, inverse=inverse)

    for x in (
        normal(rng, 2, 2, 3, 7, dtype=torch.float64),
        normal(rng, 2, 3, 2, 6, dtype=torch.float64).transpose(1, 2),
    ):
        assert torch.autograd.gradcheck(turned, x.requires_grad_())
        assert torch.autograd.gradgradcheck(turned, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_form
def test_gradient_is_the_inverse_rotation(variant, dtype, interleaved, inverse):
    rng = generator("low grad")
    cos, sin = table(rng, 5, 8)
    for name, x in laid_out(normal(rng, 2, 3, 5, 18, dtype=dtype)):
        x.requires_grad_()
        grad = normal(rng, 2, 3, 5, 18, dtype=dtype)
        y = ops.rope(x, cos, sin, interleaved=interleaved, inverse=inverse)
        (got,) = torch.autograd.grad(y, x, grad)
        check(got, grad, cos, sin, interleaved, not inverse, name)


def test_gradient_of_an_expanded_upstream():
    """sum() hands down a gradient of stride 0."""
    x = normal(generator("sum"), 2, 3, 5, 18).requires_grad_()
    cos, sin = table(generator("sum"), 5, 9)
    ops.rope(x, cos, sin).sum().backward()
    check(x.grad, torch.ones_like(x), cos, sin, inverse=True)


# ------------------------------------------------------------------ framework


def test_bits_do_not_depend_on_threads(variant):
    rng = generator("threads")
    x, k, (cos, sin) = normal(rng, 3, 5, 301, 34), normal(rng, 3, 2, 301, 34), table(rng, 301, 17)
    for call in (
        lambda: [ops.rope(x, cos, sin), ops.rope_(x.clone(), cos, sin)],
        lambda: ops.rope_qk(x, k, cos, sin),
    ):
        assert_threads_agree(call, 2, 3, 8)


OPCHECKS = [
    (name, grad, dtype, i)
    for name in ("rope", "rope_", "rope_qk")
    for grad, dtype in ((True, torch.float32), (False, torch.bfloat16))
    for i in (False, True)
    if not (name == "rope_" and grad)
]


@pytest.mark.parametrize(("name", "grad", "dtype", "flag"), OPCHECKS)
def test_opcheck(name, grad, dtype, flag):
    rng = generator("opcheck")
    x = normal(rng, 2, 5, 4, 10, dtype=dtype).transpose(1, 2).requires_grad_(grad)
    tensors = [x, *table(rng, 5, 4)] if flag else [x, *table(rng, 2, 5, 5)]
    if name == "rope_qk":
        tensors.insert(1, normal(rng, 2, 2, 5, 10, dtype=dtype).requires_grad_(grad))
    op = getattr(torch.ops.wavepe, name).default
    torch.library.opcheck(op, tuple(tensors), {"interleaved": flag, "inverse": not flag})


def test_compiles_whole_for_any_length():
    rng = generator("compile")
    backend = recording_backend()

    def turned(q, k, cos, sin):
        q, k = ops.rope_qk(q, k, cos, sin, interleaved=True)
        return ops.rope(q, cos, sin, inverse=True) + k.sum()

    compiled = torch.compile(turned, backend=backend, fullgraph=True, dynamic=True)
    for length in (5, 9, 23):
        cos, sin = table(rng, length, 4)
        results = []
        q, k = normal(rng, 2, 4, length, 9), normal(rng, 2, 2, length, 9)
        for function in (turned, compiled):
            leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
            out = function(*leaves, cos, sin)
            out.pow(2).sum().backward()
            results.append((out, *(leaf.grad for leaf in leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert compiled_once(backend)


def test_autocast_keeps_the_types():
    rng = generator("autocast")
    x, (cos, sin) = normal(rng, 1, 2, 5, 8), table(rng, 5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ops.rope(x, cos, sin), ops.rope(x, cos, sin).float())
        assert ops.rope(x, cos, sin).dtype == torch.float32
        assert [t.dtype for t in ops.rope_qk(x, x, cos, sin)] == [torch.float32] * 2


def test_meta_tensors_give_shapes():
    x, (cos, sin) = (
        normal(generator("meta"), 2, 5, 3, 8).transpose(1, 2),
        table(generator("meta"), 5, 4),
    )
    got = ops.rope(x.to("meta"), cos.to("meta"), sin.to("meta"))
    assert got.is_meta
    assert got.dtype == x.dtype
    assert (got.shape, got.stride()) == (x.shape, torch.empty_like(x).stride())


ONES = torch.ones
X, COS = ONES(2, 3, 5, 8), ONES(5, 4)
ERRORS = [
    ("8", (X, ONES(5, 5), ONES(5, 5))),
    ("6", (X, ONES(6, 4), ONES(6, 4))),
    ("3", (X, COS, ONES(5, 3))),
    ("3", (X, ONES(3, 5, 4), ONES(3, 5, 4))),
    ("cos must be .*L, h.*2, 3, 5, 4, 1", (X, ONES(2, 3, 5, 4, 1), ONES(2, 3, 5, 4, 1))),
    (r"cos must be .*L, h.*got \(4", (X, ONES(4), ONES(4))),
    (r"cos must be .*L, h.*got \(\)", (X, torch.tensor(1.0), torch.tensor(1.0))),
    (r"[xq] must be \(L, d\).* got .*\(\)", (torch.tensor(1.0), COS, COS)),
    (r"[xq] must be \(L, d\).* got .*\(8", (ONES(8), COS, COS)),
    ("[Ii]nt|Long", (X.long(), COS, COS)),
    ("[Cc]omplex", (X.to(torch.complex64), COS, COS)),
    ("[Ii]nt|Long", (X, COS.long(), COS.long())),
    ("[Bb]ool", (X.bool(), COS, COS)),
    ("meta", (X, COS.to("meta"), COS)),
    ("meta", (X.to("meta"), COS, COS)),
    ("SparseCPU", (X.to_sparse(), COS, COS)),
]


@pytest.mark.parametrize("name", ["rope", "rope_", "rope_qk"])
@pytest.mark.parametrize(("match", "args"), ERRORS)
def test_errors(name, match, args):
    args = (args[0].clone(), *args[1:])
    if name == "rope_qk":
        args = (args[0], *args)
    with pytest.raises(RuntimeError, match=match):
        getattr(ops, name)(*args)


@pytest.mark.parametrize("name", ["rope", "rope_", "rope_qk"])
def test_none_is_no_tensor(name):
    """torch hands None on as a tensor that is not defined."""
    raw = getattr(torch.ops.wavepe, name)
    args = [X.clone()] * (2 if name == "rope_qk" else 1) + [COS, None]
    with pytest.raises(RuntimeError, match=r"must be a (torch\.)?Tensor, got None"):
        raw(*args)


@pytest.mark.parametrize(("match", "args"), [e for e in ERRORS if not e[1][0].is_sparse])
def test_errors_without_data(match, args):
    """The fake kernel refuses what the real one refuses, or a compiled model would fail only when
    run."""
    if match == "meta":
        return
    with pytest.raises(RuntimeError, match=match):
        ops.rope(*(t.to("meta") for t in args))


def test_errors_of_qk():
    for q, k, match in (
        (X, ONES(2, 3, 4, 8), "4"),
        (X, ONES(2, 3, 5, 6), "6"),
        (ONES(2, 3, 4, 8), X, "4"),
        (X, X.double(), "float64|[Dd]ouble"),
        (X, X.to("meta"), "meta"),
    ):
        with pytest.raises(RuntimeError, match=match):
            ops.rope_qk(q, k, COS, COS)


def test_options_are_keywords_only():
    for call in (ops.rope, ops.rope_):
        with pytest.raises(TypeError, match="positional arguments"):
            call(X.clone(), COS, COS, True)
