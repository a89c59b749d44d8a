"""ops.attention in the framework: opcheck, torch.compile, autocast, fake tensors, torch.func."""

import numpy as np
import pytest
import wavepe
from attention_cases import (
    F32,
    F64,
    FLOATING,
    OPTIONS,
    SEED,
    Shape,
    attention,
    composed,
    draw,
    incoming,
    ops,
    torch,
)
from cases import by_turns, compiled_once, generator, recording_backend, soon
from op_cases import PROGRAMS, of_values, program_of
from torch.autograd import forward_ad
from wavepe.ops._attention_checks import Arguments
from wavepe.ops._attention_in_graph import attention_of_encoding
from wavepe.ops._common import has_autocast
from wavepe.positions import tables
from wavepe.positions.scores import Scores

func = torch.func
# torch's own: when it first loads the decompositions of forward mode, and when Dynamo tries
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
]
SMALL = Shape(2, 4, 2, 5, 6, 8, 4)
SAMPLES = ["plain", "every key", "edge", "table, q_rel, per head", "dropout", "segments"]
SAMPLES += ["everything", "batched decoding", "bias of all heads", "bias, both sides, edge"]


def raw_arguments(option, dtype=F32, grad=False, shape=SMALL):
    """Return the arguments of torch.ops.wavepe.attention_forward, in its order."""
    args = draw(generator("raw", option), shape, OPTIONS[option], dtype)
    if isinstance(args.get("offset"), int):
        args["offset"] = torch.tensor(args["offset"])
    for name in FLOATING:
        if grad and name in args:
            args[name].requires_grad_()
    seed = torch.tensor(11) if args.get("dropout_p") else None
    return tuple(Arguments(**args, seed=seed, zones=[]))


@pytest.mark.parametrize("option", soon(SAMPLES, "plain", "everything", "bias, both sides, edge"))
@pytest.mark.parametrize("grad", soon([False, True], True))
def test_opcheck_forward(option, grad):
    torch.library.opcheck(
        torch.ops.wavepe.attention_forward.default, raw_arguments(option, grad=grad)
    )


def test_opcheck_of_zones():
    arguments = list(raw_arguments("table"))
    c, u = torch.ones(arguments[3].shape[0], 2), torch.ones(8, 2)
    arguments[3], arguments[-5] = c @ u.T, [c, u]
    torch.library.opcheck(torch.ops.wavepe.attention_forward.default, tuple(arguments))


@pytest.mark.parametrize("option", soon(SAMPLES, "edge", "everything"))
@pytest.mark.parametrize("dtype", soon([F32, torch.bfloat16], torch.bfloat16))
def test_opcheck_backward(option, dtype):
    arguments = raw_arguments(option, dtype)
    out, lse = torch.ops.wavepe.attention_forward(*arguments)
    grads = incoming(generator("opcheck"), {"q": arguments[0], "v": arguments[2]})
    op = torch.ops.wavepe.attention_backward.default
    wanted = (arguments[3] is not None, arguments[-4] is not None)  # of p and bias
    for grad_lse, flags in ((grads[1], wanted), (None, ())):
        torch.library.opcheck(op, (grads[0], grad_lse, out, lse, *arguments, *flags))


# ---- torch.compile ------------------------------------------------------------------------------
def step(function, arguments):
    """Outputs, and gradients of every floating argument; the same dropout every time."""
    torch.manual_seed(SEED)
    leaves = {n: arguments[n] for n in FLOATING if torch.is_tensor(arguments.get(n))}
    leaves = {n: x.detach().clone().requires_grad_() for n, x in leaves.items()}
    out, lse = function(**arguments | leaves, return_lse=True)
    (out.pow(2).sum() + lse.pow(2).where(lse > -torch.inf, 0.0).sum()).backward()
    return [out, lse, *(leaf.grad for leaf in leaves.values())]


def zoned():
    """A constant table, which brings its own range."""
    scale, shift = wavepe.wavelet_grid(8, 4)
    return {"p": ops.relative_table(wavepe.wavelet_table(200, scale, shift, dtype=np.float64))}


OF_CACHE = ["dropout, table", "edge from 2, per head", "plain", "slopes"]  # more keys than queries
OF_SELF = ["segments", "key_mask", "offset of rows, table", "mask"]
COMPILED = [  # a name, (queries, keys) of each length, options
    *((o, lambda n: (n, n + 3), OPTIONS[o]) for o in OF_CACHE),
    *((o, lambda n: (n, n), OPTIONS[o]) for o in OF_SELF),
    ("bias, edge", lambda n: (n, n + 3), OPTIONS["bias, edge"]),
    ("decoding with a growing cache", lambda n: (1, n), OPTIONS["edge"]),
    ("a relative table", lambda n: (n, n), lambda rng, s: zoned()),
]


@pytest.mark.parametrize(("name", "sizes", "options"), soon(COMPILED, COMPILED[0], *COMPILED[-4:]))
def test_compiles_whole_for_any_length(name, sizes, options):
    backend = recording_backend()
    constant = options(generator("compile", name), Shape(2, 4, 2, 9, 9, 8, 8))
    constant = {n: x for n, x in constant.items() if n in ("p", "bias")}

    def scaled(**arguments):
        out, lse = attention(**arguments)
        return out * 2, lse

    compiled = torch.compile(scaled, backend=backend, fullgraph=True, dynamic=True)
    for length in (7, 11, 130):  # sizes that are equal by chance would be taken for one
        rng = generator("compile", name)
        shape = Shape(2, 4, 2, *sizes(length), 8, 8)
        arguments = draw(rng, shape, lambda rng, s: options(rng, s) | constant)
        for got, want in zip(step(compiled, arguments), step(scaled, arguments), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert compiled_once(backend)


CHANGING = {"scale": (0.1, 0.7, 0.3, 0.2), "softcap": (1.0, 5.0, 2.0, 3.0)}
CHANGING |= {"dropout_p": (0.5, 0.25, 0.75, 0.125)}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("backend", soon(["eager", "aot_eager", "inductor"], "eager"))
def test_a_number_that_changes_compiles_twice(name, backend):
    """First as a constant, then for all values, with the same results and gradients."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    given = draw(generator("number", name), Shape(2, 4, 2, 5, 6, 8, 8), OPTIONS["edge"])
    given |= {"scale": 0.4, "softcap": 3.0}  # beside the one that changes

    def function(number, **arguments):
        return attention(**arguments | {name: number})

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for number in CHANGING[name]:
        both = (step(lambda **a: f(number, **a), given) for f in (compiled, function))  # noqa: B023
        if name != "dropout_p" or backend != "inductor":  # which draws its own seeds
            for got, want in zip(*both, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        else:
            next(both)
    assert counter.frame_count == 2


@pytest.mark.parametrize("mode", soon(PROGRAMS, PROGRAMS[0]))
@pytest.mark.parametrize("name", CHANGING)
def test_a_number_that_only_values_tell(name, mode):
    x = torch.randn(2, 2, 5, 8)
    module = of_values(lambda number, x: attention(x, x, x, **{name: number}), ())
    numbers = [torch.tensor(x) for x in ((0.0, 1.0) if name == "dropout_p" else CHANGING[name])]
    program = program_of(module, (numbers[0], x), mode)
    for number in numbers:
        torch.testing.assert_close(program(number, x), module(number, x))
    with pytest.raises(RuntimeError, match=f"wavepe: {name} must"):
        program(torch.tensor(torch.inf), x)


def test_compiled_dropout_follows_the_generator():
    recording_backend()
    arguments = draw(generator("dropout"), Shape(1, 2, 1, 20, 20, 8, 8), {"dropout_p": 0.5})
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch.manual_seed(5)
    first, second = compiled(**arguments), compiled(**arguments)
    torch.manual_seed(5)
    assert torch.equal(compiled(**arguments), first)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(attention(**arguments), first)


# ---- autocast, fake tensors ---------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu", "mps", "meta", "privateuseone"])
def test_has_autocast_is_torch_s_answer(kind):
    assert has_autocast(kind) == torch.amp.is_autocast_available(kind)


def test_autocast_casts_as_scaled_dot_product_attention():
    arguments = draw(generator("autocast"), Shape(1, 2, 1, 9, 9, 8, 8), OPTIONS["transformer_xl"])
    q, k, v = (arguments[name] for name in "qkv")
    for low in (torch.bfloat16, torch.float16):
        cast = {n: x.to(low) if n in FLOATING else x for n, x in arguments.items()}
        want = attention(**cast)
        with torch.autocast("cpu", dtype=low):
            like = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            got, lse = attention(**arguments, return_lse=True)
            assert got.dtype == like.dtype == low
            assert lse.dtype == F32
            assert torch.equal(got, want)
            mixed = arguments | {"k": k.to(low), "v": v.half()}
            assert attention(**mixed).dtype == low
            wide = {n: x.double() if n in FLOATING else x for n, x in arguments.items()}
            assert attention(**wide).dtype == F64
    leaf = q.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attention(**arguments | {"q": leaf}).float().sum().backward()
    assert leaf.grad.dtype == F32


def test_autocast_leaves_bias_wide():
    arguments = draw(generator("autocast"), Shape(1, 2, 1, 9, 9, 8, 8), OPTIONS["bias"])
    qkv = {name: arguments[name].bfloat16() for name in "qkv"}
    want = attention(**arguments | qkv)
    leaf = arguments["bias"].bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(**arguments), want)
        low = attention(**arguments | {"bias": leaf})
        assert torch.equal(low, attention(**arguments | {"bias": leaf.detach().float()}))
        for dtype in (torch.int64, torch.float8_e4m3fn):
            with pytest.raises(RuntimeError, match=r"bias must be (torch\.)?float32"):
                attention(**arguments | {"bias": leaf.detach().to(dtype)})
    low.float().sum().backward()
    assert leaf.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(("option", "dtype"), by_turns(OPTIONS, [F32, torch.bfloat16, F64]))
def test_meta_tensors_give_shapes(option, dtype):
    arguments = draw(generator("meta"), SMALL, OPTIONS[option], dtype)
    meta = {n: x.to("meta") if torch.is_tensor(x) else x for n, x in arguments.items()}
    leaves = {n: meta[n].requires_grad_() for n in FLOATING if n in meta}
    out, lse = attention(**meta, return_lse=True)
    assert out.is_meta
    assert out.shape == (*arguments["q"].shape[:3], arguments["v"].shape[3])
    assert out.dtype == dtype
    assert lse.shape == arguments["q"].shape[:3]
    assert lse.dtype == (F64 if dtype == F64 else F32)
    grads = torch.autograd.grad((out, lse), leaves.values(), (out.detach(), lse.detach()))
    assert [g.shape for g in grads] == [x.shape for x in leaves.values()]


# ---- torch.func, forward mode -------------------------------------------------------------------

TRANSFORMED = ["plain", "edge", "table, q_rel, per head", "key_mask", "everything"]
TRANSFORMED += ["bias of all heads", "bias, offset of rows"]


def differentiable(function, option, shape=(2, 2, 1, 3, 4, 3, 2), output=0):
    """A function of the floating tensors alone, and the tensors; dropout is torch.func's own
    business (vmap's `randomness`)."""
    arguments = draw(generator("func", option), Shape(*shape), OPTIONS[option], F64)
    arguments.pop("dropout_p", None)
    names = [name for name in FLOATING if name in arguments]

    def call(*leaves):
        args = arguments | dict(zip(names, leaves, strict=True))
        found = function(**args, return_lse=True)[output]
        return torch.where(found == -torch.inf, 0.0, found)

    return call, [arguments[name] for name in names]


def assert_close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("option", TRANSFORMED)
@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd"])
@pytest.mark.parametrize("output", [0, 1])
def test_derivatives(option, name, output):
    call, leaves = differentiable(attention, option, output=output)

    def cubes(*leaves):
        return (call(*leaves) ** 3).sum()

    again = [leaf.clone().requires_grad_() for leaf in leaves]
    wants = torch.autograd.grad(cubes(*again), again)
    for i, want in enumerate(wants):
        assert_close(getattr(func, name)(cubes, i)(*leaves), want)


@pytest.mark.parametrize("option", TRANSFORMED)
def test_jvp_and_forward_mode(option):
    call, leaves = differentiable(attention, option)
    tangents = [torch.sin(leaf + 1) for leaf in leaves]
    again, _ = differentiable(composed, option)
    want = torch.autograd.functional.jvp(again, tuple(leaves), tuple(tangents))[1]
    assert_close(func.jvp(call, tuple(leaves), tuple(tangents))[1], want)
    with forward_ad.dual_level():
        pairs = zip(leaves, tangents, strict=True)
        out = call(*(forward_ad.make_dual(*pair) for pair in pairs))
        assert_close(forward_ad.unpack_dual(out).tangent, want)


@pytest.mark.parametrize("option", TRANSFORMED)
def test_hessian(option):
    """Derivatives of derivatives, which the operator itself may refuse."""
    call, leaves = differentiable(attention, option, (1, 2, 1, 2, 3, 2, 1))

    def of_q(call):
        return lambda q: (call(q, *leaves[1:]) ** 2).sum()

    again, _ = differentiable(composed, option, (1, 2, 1, 2, 3, 2, 1))
    want = torch.autograd.functional.hessian(of_q(again), leaves[0])
    assert_close(func.hessian(of_q(call))(leaves[0]), want)


@pytest.mark.parametrize("option", TRANSFORMED)
@pytest.mark.parametrize("function", [attention, composed])
def test_vmap(function, option):
    """Over each floating argument alone, and over all of them."""
    call, leaves = differentiable(function, option)
    many = [torch.stack([leaf, leaf * 0.5, leaf + 1], 1) for leaf in leaves]
    for axes in ((0,), (1, 2), tuple(range(len(leaves)))):
        given = [many[i] if i in axes else leaf for i, leaf in enumerate(leaves)]
        dims = tuple(1 if i in axes else None for i in range(len(leaves)))
        want = [
            call(*(x.select(1, row) if i in axes else x for i, x in enumerate(given)))
            for row in range(3)
        ]
        assert_close(func.vmap(call, dims)(*given), torch.stack(want))


def test_a_compiled_gradient_with_a_constant_table():
    scores, q = Scores(wavepe.encoding("wavelet"), 8, 2, True), torch.randn(1, 2, 9, 8)
    gradient = func.grad(lambda q: scores.attend(q, q, q, {}).pow(2).sum())
    compiled = torch.compile(gradient, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), gradient(q))


def test_a_table_given_by_name_has_the_size_of_q_rel():
    encoding = wavepe.encoding("wavelet:scales=4")
    arguments = draw(generator("named"), Shape(1, 2, 1, 5, 9, 32, 4), {}, F32)
    arguments["q_rel"] = torch.randn(1, 2, 5, 16)
    name = tables.name_of(encoding)
    found = attention_of_encoding(**arguments, name=name, one_sided=True)
    want = attention(**arguments, p=encoding.table(9, 16))
    assert_close(found, want)
