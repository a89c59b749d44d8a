"""Tests of every operator: its rows and forms are in op_cases.py."""

import functools
import itertools

import pytest
import torch
from cases import SIZES, assert_agrees, compiled_once, generator, recording_backend
from op_cases import F32, F64, OPERATORS, PROGRAMS, fake, of_values, program_of, tensors_of
from tensors import (
    FLOATS,
    LAYOUTS,
    WIDE,
    assert_keeps_no_memory,
    assert_threads_agree,
    laid_out,
    normal,
    of_transforms,
)
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from wavepe import ops

func, close = torch.func, torch.testing.assert_close
pytestmark = of_transforms
EACH = list(OPERATORS.values())
RAW = [op for op in EACH if op.raw]
CASES = [(op, form) for op in EACH for form in op.forms]
# Where a case takes long, the plain tier has one form, or two.
ONE = [(op, form) for op in EACH for form in list(op.forms)[1:2]]
FEW = [case for case in ONE if case[0].name in ("rope", "relative_bias")]
TWO = [(op, form) for op in EACH for form in list(op.forms)[1:3]]
# Not of -inf: its differences are NaN.
DERIVED = [(op, form) for op, form in CASES if op.leaves and form != "unseen"]


def each_case(cases, plain=CASES):
    """Run a test for these cases; those that are not `plain` belong to the long tail."""
    slow = {True: (), False: pytest.mark.slow}
    rows = [pytest.param(c, id=f"{c[0].name}, {c[1]}", marks=slow[c in plain]) for c in cases]
    return pytest.mark.parametrize("case", rows)


def each(operators):
    return pytest.mark.parametrize("op", operators, ids=[op.name for op in operators])


def draw(case, n, dtype=F32, **sizes):
    """Return the operator, the generator, and the arguments of a call."""
    op, form = case
    rng = generator(op.name, form, n, dtype, *sizes)
    return op, rng, op.draw(rng, n, dtype, **op.forms[form] | sizes)


def schema_order(a):
    offsets = a.get("offsets")  # a number is a convenience of the function
    given = a | {"offsets": torch.arange(offsets)} if isinstance(offsets, int) else a
    return tuple(given.values())


# ---- values --------------------------------------------------------------------------------------
@each_case(CASES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_size(variant, case, dtype):
    """Results and gradients, against the oracle; NumPy and torch agree bit for bit.

    Low precision has the loops of float32.
    """
    for n in SIZES if dtype in WIDE else SIZES[::2]:
        length = min(SIZES[-n % len(SIZES)], case[0].most // n)
        op, rng, a = draw(case, n, dtype, length=length)
        before = {name: x.clone() for name, x in tensors_of(a).items()}
        grads = op.incoming(rng, a) if op.raw else ()
        found = op.call(a, grads)
        op.check(found, op.judge(a, grads), a, f"n={n}")
        assert all(torch.equal(a[name], x) for name, x in before.items()), "an input changed"
        if op.numpy and dtype in WIDE:
            for got, want in zip(found.values(), op.numpy(a), strict=False):
                assert_agrees(got.numpy(), want, f"n={n}")


@each_case(CASES)
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_any_strides(variant, case, dtype):
    """Vary each argument and incoming gradient; a fake call says which strides results have."""
    op, rng, a = draw(case, 9, dtype, length=5)
    grads = op.incoming(rng, a) if op.raw else ()
    for name, x in tensors_of(a).items():
        for layout, strided in laid_out(x):
            given, what = a | {name: strided}, f"{name}: {layout}"
            found = op.call(given, grads)
            op.check(found, op.judge(given, grads), a, what)
            dense = op.call(a | {name: strided.contiguous()})
            for result, promised in op.call(fake(given)).items():
                got = found[result]
                assert torch.equal(got, dense[result]), what
                assert got.stride() == promised.stride(), what
                assert got.data_ptr() != strided.data_ptr() or not got.numel()
    for i, grad in enumerate(grads) if op.leaves else ():
        for layout, strided in laid_out(grad):
            given = [*grads[:i], strided, *grads[i + 1 :]]
            op.check(op.call(a, given), op.judge(a, given), a, f"gradient {i}: {layout}")


@pytest.mark.parametrize(
    ("op", "sizes"), [(op, sizes) for op in EACH for sizes in op.empty], ids=lambda x: str(x)[:40]
)
def test_empty(op, sizes):
    rng = generator("empty")
    a = op.draw(rng, **{"n": 5} | sizes)
    grads = op.incoming(rng, a)
    found = op.call(a, grads)
    op.check(found, op.judge(a, grads), a)
    shapes = {name: x.shape for name, x in op.call(fake(a), [x.to("meta") for x in grads]).items()}
    assert {name: x.shape for name, x in found.items()} == shapes


@each(EACH)
def test_bits_do_not_depend_on_threads(variant, op):
    """Gradients of relative_bias are torch's matrix products, whose bits may."""
    rng = generator("threads")
    for form in list(op.forms)[:3]:
        a = op.draw(rng, **op.forms[form] | op.large)
        grads = op.incoming(rng, a)
        outputs = slice(len(op.outputs) if op.name == "relative_bias" else None)
        assert_threads_agree(lambda: list(op.call(a, grads).values())[outputs], 2, 5)  # noqa: B023


@each_case(CASES)
def test_fake_tensors_autocast_and_inference(case):
    op, _, a = draw(case, 4)
    want = op.call(a)
    found = op.call(fake(a))
    for name, x in want.items():
        assert found[name].is_meta
        assert (found[name].shape, found[name].dtype) == (x.shape, x.dtype), name
    with torch.inference_mode():
        assert all(torch.equal(x, want[name]) for name, x in op.call(a).items())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name, x in op.call(a).items() if op.keeps_types else ():
            close(x, want[name], rtol=0, atol=0)


@each(EACH)
def test_calls_keep_no_memory(op):
    """A few bytes would also split the heap, which then grows by megabytes in generation."""
    rng = generator("memory")
    a = op.draw(rng, 3)
    grads = op.incoming(rng, a)
    assert_keeps_no_memory(lambda: op.call(a, grads))


# ---- what must be refused ------------------------------------------------------------------------
def sample(op):
    """Return arguments that a few tests change."""
    return op.draw(generator("sample"), 4)


BAD = [(op, words, change) for op in EACH for words, change in op.bad(sample(op))]


@pytest.mark.parametrize(
    ("op", "words", "change"), BAD, ids=[f"{op.name}: {words}" for op, words, _ in BAD]
)
def test_errors(op, words, change):
    """Fake calls refuse what real ones do, or a compiled model would fail only when run."""
    for args in (sample(op) | change, fake(sample(op) | change)):
        with pytest.raises(RuntimeError, match=words):
            op.function(**args)


TENSORS = [(op, name) for op in EACH for name in tensors_of(sample(op))]


@pytest.mark.parametrize(("op", "name"), TENSORS, ids=[f"{op.name}, {n}" for op, n in TENSORS])
def test_errors_of_types_and_devices(op, name):
    a = sample(op)
    x = a[name]
    wrong = [(r"[Cc]omplex", x.to(torch.complex64)), (r"[Bb]ool", x.bool())]
    wrong += [("[Ff]loat", x.float())] if name in op.integers else [("[Ii]nt|Long", x.long())]
    for words, value in wrong:
        for args in (a | {name: value}, fake(a | {name: value})):
            with pytest.raises(RuntimeError, match=words):
                op.function(**args)
    with pytest.raises(RuntimeError, match="meta"):
        op.function(**a | {name: x.to("meta")})
    for value in (None, "x", 1.5):
        with pytest.raises(RuntimeError, match=f"{name}.* must "):
            op.function(**a | {name: value})
    if op.raw:
        with pytest.raises(RuntimeError, match=r"must be a (torch\.)?Tensor, got None"):
            op.raw(*schema_order(a | {name: None}))
        with pytest.raises(RuntimeError, match=r"takes plain dense tensors, got torch\.sparse"):
            op.function(**a | {name: x.to_sparse()})


@each(RAW)
def test_options_are_keywords_only(op):
    with pytest.raises(TypeError, match="positional argument"):
        getattr(ops, op.name)(*sample(op).values())


@each([op for op in EACH if op.constants])
def test_arguments_without_a_gradient(op):
    """No transform goes on in silence."""
    for name in op.constants:
        a = sample(op)

        def of(value, a=a, name=name):
            out = op.function(**a | {name: value})
            return (out[0] if isinstance(out, tuple) else out).sum()

        with pytest.raises(RuntimeError, match=op.refused):
            torch.autograd.grad(of(leaf := a[name].clone().requires_grad_()), leaf)
        if op.name == "rope_":
            continue  # it refuses every transform
        for transform in (func.grad, func.jacfwd, func.jacrev):
            with pytest.raises(RuntimeError, match=op.refused):
                transform(of)(a[name])
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=op.refused):
            of(forward_ad.make_dual(a[name], a[name]))


# ---- derivatives ---------------------------------------------------------------------------------
@each_case(DERIVED, TWO)
def test_gradcheck(case):
    op, _, a = draw(case, 2, F64)
    function, leaves = op.of_leaves(a)
    leaves = tuple(x.transpose(0, -1).contiguous().transpose(0, -1) for x in leaves)
    leaves = tuple(x.requires_grad_() for x in leaves)
    options = {"check_forward_ad": op.forward, "check_batched_grad": True}
    assert torch.autograd.gradcheck(function, leaves, **options)
    if op.twice:
        assert torch.autograd.gradgradcheck(function, leaves)
        return
    (first,) = torch.autograd.grad(function(*leaves)[0].sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(first.sum(), leaves[0])


@each_case(DERIVED)
def test_gradients_of_some_alone(case):
    """Take that of one argument, by one result, of an incoming gradient that repeats one number."""
    op, _, a = draw(case, 4, F64)
    function, leaves = op.of_leaves(a)
    for count in range(len(op.outputs)):

        def of(*leaves, count=count):
            return function(*leaves)[count].sum()

        def gradients(leaves):
            wanted, out = [x for x in leaves if x.requires_grad], of(*leaves)
            return (
                torch.autograd.grad(out, wanted, allow_unused=True) if out.requires_grad else [None]
            )

        every = [x.clone().requires_grad_() for x in leaves]
        for i, want in enumerate(gradients(every)):
            (got,) = gradients([x.clone().requires_grad_(i == j) for j, x in enumerate(leaves)])
            assert (got is None) == (want is None)
            if want is not None:
                close(got, want, rtol=1e-13, atol=1e-13)
    with torch.no_grad():
        assert not any(x.requires_grad for x in function(*every))


# ---- torch.func ----------------------------------------------------------------------------------
@each_case(DERIVED)
def test_transforms(case):
    """They agree with torch.autograd, or say that there is no formula: never tangents of 0."""
    op, rng, a = draw(case, 2, F64)
    function, leaves = op.of_leaves(a)

    def loss(*leaves):
        return sum((x**3).sum() for x in function(*leaves))

    numbers = tuple(range(len(leaves)))
    inputs = [leaf.clone().requires_grad_() for leaf in leaves]
    want = torch.autograd.grad(loss(*inputs), inputs)
    close(func.grad(loss, numbers)(*leaves), want, rtol=1e-12, atol=1e-12)
    whole = jacobian(function, leaves)
    close(func.jacrev(function, numbers)(*leaves), whole, rtol=1e-12, atol=1e-12)
    tangents = tuple(normal(rng, *x.shape, dtype=F64) for x in leaves)
    if not op.forward:
        for transform in (func.jacfwd, func.hessian):
            with pytest.raises(NotImplementedError, match="jvp"):
                transform(loss)(*leaves)
        with pytest.raises(NotImplementedError, match="jvp"):
            func.jvp(function, leaves, tangents)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            function(forward_ad.make_dual(leaves[0], tangents[0]), *leaves[1:])
        with forward_ad.dual_level():  # nothing to differentiate here
            close(function(*leaves), function(*leaves), rtol=0, atol=0)
        with pytest.raises(RuntimeError, match="second derivative"):
            func.jacrev(func.grad(loss))(*leaves)
        return
    close(func.jacfwd(function, numbers)(*leaves), whole, rtol=1e-12, atol=1e-12)
    second = jacobian(lambda *x: torch.autograd.grad(loss(*x), x, create_graph=True), leaves)
    for i, row in enumerate(func.hessian(loss, numbers)(*leaves)):
        close(tuple(row), tuple(second[i]), rtol=1e-11, atol=1e-11)
    steps = [
        sum(torch.tensordot(j, t, t.dim()) for j, t in zip(row, tangents, strict=True))
        for row in whole
    ]
    value, got = func.jvp(function, leaves, tangents)
    close(value, function(*leaves), rtol=1e-12, atol=1e-12)
    close(got, tuple(steps), rtol=1e-12, atol=1e-12)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaves[0], tangents[0])
        for row, out in zip(whole, function(dual, *leaves[1:]), strict=True):
            tangent = forward_ad.unpack_dual(out).tangent
            step = torch.tensordot(row[0], tangents[0], tangents[0].dim())
            close(torch.zeros_like(step) if tangent is None else tangent, step)


def some_axes(names):
    """Return for each subset of the arguments the axes of vmap: in front, or at the end."""
    chosen = itertools.product((None, 0, -1), repeat=len(names))
    named = (zip(names, axes, strict=True) for axes in chosen if set(axes) != {None})
    return [{name: axis for name, axis in pairs if axis is not None} for pairs in named]


@each_case([case for case in CASES if case[0].name != "rope_"])
def test_vmap(case, capfd):
    """Over any arguments and axes, of the function and of the raw operator."""
    op, rng, a = draw(case, 3, F64)
    rows = [tensors_of(op.draw(rng, 3, F64, **op.forms[case[1]])) for _ in range(3)]
    calls = [op.function, *([lambda **a: op.raw(*schema_order(a))] if op.raw else [])]
    for call, axes in itertools.product(calls, some_axes(tensors_of(a))):

        def of_moving(*moved, call=call, axes=axes):
            out = call(**a | dict(zip(axes, moved, strict=True)))
            return out if isinstance(out, tuple) else (out,)

        want = zip(*(of_moving(*(row[name] for name in axes)) for row in rows), strict=True)
        moved = [torch.stack([row[name] for row in rows], axis) for name, axis in axes.items()]
        got = torch.vmap(of_moving, in_dims=tuple(axes.values()))(*moved)
        for x, y in zip(got, want, strict=True):
            close(x, torch.stack(y), rtol=1e-12, atol=1e-12, msg=f"{axes}".__add__)
    assert "performance drop" not in capfd.readouterr().err  # no loop of torch's own


@each_case(DERIVED)
def test_vmap_of_gradients_and_back(case):
    op, _, a = draw(case, 3, F64)
    function, leaves = op.of_leaves(a)
    several = tuple(torch.stack([x, x / 2, x + 1]) for x in leaves)

    def loss(*leaves):
        return sum((x**3).sum() for x in function(*leaves))

    gradient = func.grad(loss, tuple(range(len(leaves))))
    want = [torch.stack(x) for x in zip(*map(gradient, *several), strict=True)]
    close(list(torch.vmap(gradient)(*several)), want, rtol=1e-12, atol=1e-12)
    whole = func.grad(lambda *x: torch.vmap(loss)(*x).sum(), tuple(range(len(leaves))))
    close(list(whole(*several)), want, rtol=1e-12, atol=1e-12)
    twice = torch.vmap(torch.vmap(function))(*(x[None] for x in several))
    close(twice, tuple(x[None] for x in torch.vmap(function)(*several)), rtol=1e-12, atol=1e-12)


# ---- the raw operator, and compilers -------------------------------------------------------------
@each_case([case for case in CASES if case[0].raw], ONE)
def test_opcheck(case):
    op, _, a = draw(case, 4, length=5)
    first = next(iter(tensors_of(a)))
    if a[first].dim() > 1:
        a[first] = LAYOUTS["columns"](a[first])
    torch.library.opcheck(op.raw, schema_order(a))
    if op.leaves:
        a |= {name: a[name].requires_grad_() for name in op.leaves}
        torch.library.opcheck(op.raw, schema_order(a))


@each([op for op in RAW if op.leaves])
def test_the_raw_operator_has_no_forward_mode(op):
    a = sample(op)
    for name in op.leaves:
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward mode"):
            op.raw(*schema_order(a | {name: forward_ad.make_dual(a[name], a[name])}))

        def of(x, name=name):
            out = op.raw(*schema_order(a | {name: x}))
            return (out[0] if isinstance(out, tuple) else out).sum()

        with pytest.raises(RuntimeError, match="no forward mode"):
            func.jvp(of, (a[name],), (a[name],))
        with pytest.raises(RuntimeError, match="setup_context"):
            func.grad(of)(a[name])


@each_case(CASES, ONE)
def test_compiles_whole_for_any_length(case):
    op, backend = case[0], recording_backend()

    def step(**a):
        out = op.function(**a)
        return [x * 2 for x in (out if isinstance(out, tuple) else (out,))]

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for length in (10, 14, 29):  # sizes that are equal by chance would be taken for one
        _, rng, a = draw(case, 4, length=length)
        grads, results = op.incoming(rng, a), []
        for function in (step, compiled):
            leaves = {name: a[name].clone().requires_grad_() for name in op.leaves}
            out = function(**a | leaves)
            if leaves:
                out += torch.autograd.grad(out, list(leaves.values()), grads)
            results.append(out)
        for got, want in zip(*results, strict=True):
            close(got, want, **op.exact)
    assert compiled_once(backend)


@each_case(CASES, ONE)
@pytest.mark.parametrize(
    "mode", [PROGRAMS[0], *(pytest.param(x, marks=pytest.mark.slow) for x in PROGRAMS[1:])]
)
def test_sizes_that_only_values_tell(case, mode):
    """All axes of one size have an unknown size, one after the other; and so have numbers."""
    op, _, a = draw(case, 5, length=7)
    inputs = tensors_of(a)
    numbers = [name for name in ("keys", "first", "offsets") if isinstance(a.get(name), int)]
    calls = [(a[name], (), name) for name in numbers]
    shapes = [(i, axis, n) for i, x in enumerate(inputs.values()) for axis, n in enumerate(x.shape)]
    if op.name == "merge_attention":  # it counts its parts
        shapes = [(i, axis, n) for i, axis, n in shapes if axis]
    for size in sorted({n for *_, n in shapes if n > 1}):
        calls.append((size, [(i, axis) for i, axis, n in shapes if n == size], None))
    for size, axes, number in calls:

        def call(count, *tensors, number=number):
            values = dict(zip(inputs, tensors, strict=True)) | ({number: count} if number else {})
            return op.function(**a | values)

        module, tensors = of_values(call, axes), tuple(inputs.values())
        program = program_of(module, (torch.tensor(size), *tensors), mode)
        for count in map(torch.tensor, (size, size - 1)):
            try:
                want = module(count, *tensors)
            except RuntimeError:  # it does not fit the sizes of others
                with pytest.raises(RuntimeError):
                    program(count, *tensors)
            else:
                close(program(count, *tensors), want)


@each_case([case for case in ONE if case[0].leaves], FEW)
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_transforms(case, backend):
    """Dynamo, left alone, would trace past a derivative and give zeros."""
    op, _, a = draw(case, 4, F64)
    function, leaves = op.of_leaves(a)
    compiled = functools.partial(torch.compile, backend=backend)
    torch._dynamo.reset()
    several = tuple(torch.stack([x, x + 1]) for x in leaves)
    got = compiled(lambda *x: torch.vmap(function)(*x), fullgraph=True)(*several)
    close(got, torch.vmap(function)(*several))

    def step(*x):
        return func.jvp(function, x, x)[1]

    if op.forward:
        close(compiled(step)(*leaves), step(*leaves))
    torch._dynamo.reset()
