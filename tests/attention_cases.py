"""Helpers of the tests of ops.attention. `check` compares outputs and gradients to the oracle."""

import functools
from typing import NamedTuple

import numpy as np
import oracle_attention as oracle
import pytest
from attention_options import BOUNDS, LEADS, OPTIONS, Shape, rounding
from cases import assert_same_bits, assert_within, generator, load_torch
from variants import all_of_them, usual

torch, ops = load_torch()
from wavepe.ops._attention_checks import Arguments
from wavepe.ops._attention_composed import composed as dense

F32, F64 = torch.float32, torch.float64
LOW = (torch.bfloat16, torch.float16)
FLOATING = ("q", "k", "v", "p", "q_rel", "bias", "sinks")
WIDE = ("bias", "sinks")  # they have the dtype of the computation

UNITS = {F32: 2.0**-24, F64: 2.0**-53, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TESTED = usual(all_of_them())

SQUARE = [
    Shape(*lead, n, n, d, d)
    for lead, n, d in zip(LEADS, (9, 16, 31, 33, 64, 97), (97, 63, 32, 17, 8, 3), strict=True)
]
FEW = [  # the second decodes; the fourth has queries before the first key
    Shape(1, 1, 1, 1, 1, 1, 1), Shape(2, 2, 1, 1, 33, 17, 9), Shape(1, 4, 2, 9, 9, 16, 16),
    Shape(2, 3, 3, 17, 5, 8, 3), Shape(1, 2, 2, 5, 70, 3, 31), Shape(2, 6, 2, 37, 41, 24, 20),
]  # fmt: skip


def wide(dtype):
    """Return the dtype of the computation, which lse and bias have too."""
    return F64 if dtype == F64 else F32


def tensors(values, dtype):
    """Convert arguments from NumPy to torch. Only floating values get `dtype`."""
    return {n: tensor(x, wide(dtype) if n in WIDE else dtype) for n, x in values.items()}


def tensor(value, dtype):
    if not isinstance(value, np.ndarray):
        return value
    results = torch.from_numpy(np.ascontiguousarray(value))
    return results.to(dtype) if results.is_floating_point() else results


def draw(rng, shape, options, dtype=F32):
    """Draw random arguments of ops.attention, by name. With segments n = m."""
    s = Shape(*shape)
    if callable(options):
        results = options(rng, s)
        if "segments" in results:
            s = s._replace(n=s.m)
            results = options(rng, s)
    else:
        results = dict(options)
    q = rng.normal(size=(s.batch, s.heads, s.m, s.d))
    k = rng.normal(size=(s.batch, s.kv_heads, s.n, s.d))
    v = rng.normal(size=(s.batch, s.kv_heads, s.n, s.dv))
    return tensors({"q": q, "k": k, "v": v} | results, dtype)


def array(x):
    """Convert a tensor to float64 NumPy, which the oracle takes."""
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach()
    return (x.double() if x.is_floating_point() else x).numpy()


SEED = 1234


def drawn_seed():
    """Return the seed that an op draws from torch's generator after it is seeded with SEED.

    torch.manual_seed is not used, because it takes a millisecond for devices that are missing.
    """
    torch.default_generator.manual_seed(SEED)
    return torch.randint(2**62, ())


def composed(q, k, v, *, return_lse=False, **options):
    """Call the composition of torch operators with the arguments of ops.attention."""
    seed = torch.randint(2**62, ()) if options.get("dropout_p", 0) > 0 else None
    out, lse, _ = dense(Arguments(q, k, v, seed=seed, **options))
    return (out, lse) if return_lse else out


attention = ops.attention


def attention_on(variant):
    """A function for each variant: what thins products of parameters then tells them apart."""
    return lambda *qkv, **options: attention(*qkv, **options)


# The kernels in each variant; the composition, which has none, once.
each_function = pytest.mark.parametrize(
    ("variant", "function"),
    [*((name, attention_on(name)) for name in TESTED), (TESTED[0], composed)],
    ids=[*TESTED, "composed"],
    indirect=["variant"],
)


def run(function, arguments, grad_out=None, grad_lse=None, wanted=FLOATING):
    """Return out and lse by name, and with incoming gradients also those of `wanted`."""
    arguments = dict(arguments)
    backward = grad_out is not None or grad_lse is not None
    leaves = {}
    for name in wanted if backward else ():
        if arguments.get(name) is not None:
            leaves[name] = arguments[name] = arguments[name].detach().requires_grad_()
    torch.default_generator.manual_seed(SEED)
    out, lse = function(**arguments, return_lse=True)
    results = {"out": out.detach(), "lse": lse.detach()}
    if backward:
        pairs = ((out, grad_out), (lse, grad_lse))
        pairs = [(o, g) for o, g in pairs if g is not None and o.requires_grad]
        grads = [torch.zeros_like(x) for x in leaves.values()]  # lse alone gives v no gradient
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            grads = torch.autograd.grad(outputs, leaves.values(), given, materialize_grads=True)
        results |= dict(zip(leaves, grads, strict=True))
    return results


class Exact(NamedTuple):
    values: dict  # out, lse and gradients by name
    sizes: dict  # sizes of their terms
    of_out: dict  # what the rounding of out adds to the gradients
    terms: dict  # number of terms in each sum


def judge(arguments, grad_out=None, grad_lse=None):
    args = {name: array(x) for name, x in arguments.items()}
    if args.get("dropout_p"):
        args["seed"] = int(drawn_seed())
    done = oracle.forward(**args)
    exact = {"out": done.out, "lse": done.lse}
    sizes, of_out = oracle.forward_sizes(done, args["v"]), {}
    if grad_out is not None or grad_lse is not None:
        grad_out = np.zeros(done.out.shape) if grad_out is None else array(grad_out)
        grad_lse = np.zeros(done.lse.shape) if grad_lse is None else array(grad_lse)
        args.pop("seed", None)
        grads, of = oracle.backward(grad_out, grad_lse, done, **args)
        exact, sizes = exact | grads, sizes | of
        dtype = arguments["q"].dtype
        if dtype in LOW:
            error = UNITS[dtype] * abs(done.out) + torch.finfo(dtype).smallest_normal * UNITS[dtype]
            of_out = oracle.of_out(grad_out, error, done, **args)
    batch, heads, m, n = done.weights.shape
    of_key = m * heads // max(arguments["k"].shape[1], 1)
    terms = dict.fromkeys(exact, n)  # a weight's sum, and then those over queries
    terms |= {"k": n + of_key, "v": n + of_key, "p": n + batch * heads * m}
    terms["bias"] = n + batch * heads * (m + n)  # a tile's pairs by delta, then deltas and tiles
    terms["sinks"] = n + batch * m + done.out.shape[-1]
    return Exact(exact, sizes, of_out, terms)


def incoming(rng, arguments):
    """Draw random gradients of out and lse."""
    q, v = arguments["q"], arguments["v"]
    grad_out = tensor(rng.normal(size=(*q.shape[:-1], v.shape[-1])), q.dtype)
    return grad_out, tensor(rng.normal(size=q.shape[:-1]), wide(q.dtype))


def bound(exact, size, dtype, of_out, terms):
    """Return the allowed error of every entry."""
    kind = np.float64 if dtype == F64 else np.float32
    error = rounding(size, UNITS[wide(dtype)], kind, terms) + BOUNDS["out"].units * of_out
    if dtype not in LOW:
        return error
    tiny = torch.finfo(dtype).smallest_normal * 2 * UNITS[dtype]
    half = np.maximum(2.0 ** np.floor(np.log2(np.abs(exact) + 1e-300)) * UNITS[dtype], tiny)
    return BOUNDS["low"].units * half + error


def compare(results, exact, dtype, what="", rounds_out=True):
    for name, got in results.items():
        kind = wide(dtype) if name in ("lse", *WIDE) else dtype
        assert got.dtype == kind, f"{what}: {name} is {got.dtype}"
        of_out = exact.of_out.get(name, 0.0) if rounds_out else 0.0
        allowed = bound(exact.values[name], exact.sizes[name], kind, of_out, exact.terms[name])
        assert_within(got.double().numpy(), exact.values[name], allowed, f"{what}: {name}")


@functools.cache
def problem(option, shape, dtype):
    """Return arguments, incoming gradients and the oracle's results, for all variants."""
    rng = generator("grid", option)
    arguments = draw(rng, shape, OPTIONS[option], dtype)
    grads = incoming(rng, arguments)
    return arguments, grads, judge(arguments, *grads)


def grid(function, option, shapes, dtype=F32):
    for shape in shapes:
        arguments, grads, exact = problem(option, shape, dtype)
        results = run(function, arguments, *grads)
        compare(results, exact, dtype, f"{option} {shape} {dtype}", function is not composed)


def check(function, rng, shape, options, dtype=F32, what="", backward=True):
    """Draw arguments, run, and compare outputs and all gradients to the oracle."""
    arguments = draw(rng, shape, options, dtype)
    grads = incoming(rng, arguments) if backward else ()
    results = run(function, arguments, *grads)
    compare(results, judge(arguments, *grads), dtype, what or f"{shape}", function is not composed)
    return arguments, results


def same(a, b, what=""):
    """Assert that tensors of the same name have the same bits; all NaNs are equal."""
    assert a.keys() == b.keys()
    for name in a:
        x, y = (t[name].contiguous() for t in (a, b))
        x, y = (t.view(torch.int16) if t.dtype in LOW else t for t in (x, y))
        assert_same_bits(x.numpy(), y.numpy(), f"{what}: {name}")
