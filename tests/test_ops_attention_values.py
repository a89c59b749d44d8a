"""ops.attention on NaN and Inf, on numbers near the ends of their range, on constant tables."""

import functools
import math

import numpy as np
import pytest
import wavepe
from attention_cases import (
    F32,
    F64,
    FLOATING,
    LOW,
    OPTIONS,
    UNITS,
    Shape,
    attention,
    check,
    compare,
    composed,
    draw,
    each_function,
    incoming,
    judge,
    ops,
    run,
    same,
    tensors,
    torch,
)
from attention_options import largest
from cases import generator

nan, inf = math.nan, math.inf


# ---- NaN and Inf --------------------------------------------------------------------------------
@each_function
@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize(
    "option", ["plain", "edge", "bias", "softcap", "window", "segments", "mask", "sinks"]
)
def test_what_is_hidden_does_not_leak(variant, function, value, where, option):
    """NaN and Inf in k and v of one token: the rows that do not see it keep their bits, forward
    and, where their gradients come in alone, backward; the rows that see it change."""
    for n in (9, 70, 300):
        rng = generator("leak", option)
        arguments = draw(rng, Shape(2, 2, 1, n, n, 16, 8), OPTIONS[option])
        grad_out, grad_lse = incoming(rng, arguments)
        token = 2 * n // 3  # of 300: in the second block of keys
        sees = seen_by(arguments, token)
        blind = ~sees
        grads = grad_out * blind[..., None], grad_lse * blind
        clean = run(function, arguments, *grads)
        broken = arguments | {where: arguments[where].clone()}
        broken[where][:, :, token, 3] = value
        results = run(function, broken, *grads)
        for name in ("out", "lse", "q"):
            assert torch.equal(results[name][blind], clean[name][blind]), f"{n} {name}"
        got, want = (x["out"] if where == "k" else x["out"][..., 3] for x in (results, clean))
        if where == "v" or math.isnan(value):
            assert not (got[sees].isfinite() | (got[sees] == -value)).any()
        else:
            assert not torch.equal(got[sees], want[sees]) or not sees.any()


def seen_by(arguments, token):
    """Return which rows see the token, bool (B, H, m), by a one-hot v."""
    v = torch.zeros_like(arguments["v"])
    v[:, :, token] = 1
    out = composed(**arguments | {"v": v, "p": None, "first": 0, "beyond": "zero", "scale": 0.0})
    return out[..., 0] > 0


@each_function
@pytest.mark.parametrize("dtype", [F32, F64, *LOW])
def test_padding_of_nan(variant, function, dtype):
    """key_mask hides NaN in padding from outputs and gradients, those of the padding are 0."""
    rng = generator("padding")
    arguments = draw(rng, Shape(2, 4, 2, 21, 21, 16, 16), OPTIONS["table"], dtype)
    seen = torch.arange(21) >= torch.tensor([[5], [16]])
    grads = incoming(rng, arguments)
    clean = run(function, arguments | {"key_mask": seen}, *grads)
    for value in (nan, inf):
        broken = {n: arguments[n].masked_fill(~seen[:, None, :, None], value) for n in "qkv"}
        results = run(function, arguments | broken | {"key_mask": seen}, *grads)
        same(results, clean)
    for name in "kv":
        assert not clean[name].mT[~seen[:, None, None].expand(clean[name].mT.shape)].any()


OF_NAN = {
    "table": ("q", "k", "v", "p", "grad_out", "grad_lse"),
    "bias, table": ("p", "bias"),
    "table, q_rel": ("q", "q_rel"),
    "narrow table": ("p", "q_rel"),
    "sinks, segments, dropout": ("q", "k", "v", "p"),
    "segments": ("q", "k", "v"),
    "everything": ("bias",),
}


@functools.cache
def spoilt(option, name, n):
    """Return arguments and gradients with NaN in a row of one of them, and the oracle's results."""
    rng = generator("spoilt", option)
    arguments = draw(rng, Shape(1, 2, 1, n, n, 8, 8), OPTIONS[option])
    args = arguments | dict(zip(("grad_out", "grad_lse"), incoming(rng, arguments), strict=True))
    args[name][(..., 3) if name in ("grad_lse", "bias") else (..., 3, slice(None))] = nan
    grads = args.pop("grad_out"), args.pop("grad_lse")
    return args, grads, judge(args, *grads)


@each_function
@pytest.mark.parametrize(
    ("option", "name"), [(option, name) for option in OF_NAN for name in OF_NAN[option]]
)
@pytest.mark.parametrize("value", [nan, inf])
def test_nan_and_inf_reach_what_reads_them(variant, function, option, name, value):
    """NaN is where the oracle has it, and nowhere else; where Inf reaches may be anything.

    In backward the composition lets NaN go further.
    """
    for n in (9, 100):
        args, grads, exact = spoilt(option, name, n)
        args = {n: x.nan_to_num(value) if torch.is_tensor(x) else x for n, x in args.items()}
        grads = [x.nan_to_num(value) for x in grads]
        results = run(function, args, *(() if function is composed else grads))
        if value == inf:
            reached = {name: torch.from_numpy(np.isnan(exact.values[name])) for name in results}
            results = {name: x.masked_fill(reached[name], nan) for name, x in results.items()}
        compare(results, exact, F32, f"{n}")


@each_function
def test_what_no_row_reads_may_be_nan(variant, function):
    """Rows of a table and numbers of a bias beyond a window."""
    rng = generator("unread")
    for m, n in ((1, 60), (2, 300), (40, 90)):
        arguments = draw(rng, Shape(1, 4, 2, m, n, 8, 8), {"window": 50})
        arguments |= tensors({"p": rng.normal(size=(400, 8)), "bias": rng.normal(size=400)}, F32)
        grads = incoming(rng, arguments)
        clean = run(function, arguments, *grads)
        for name in ("p", "bias"):
            arguments[name][50:] = nan
        same(run(function, arguments, *grads), clean, f"{m} {n}")


@each_function
@pytest.mark.parametrize("option", ["bias", "bias, slopes, softcap, scale"])
def test_a_bias_of_minus_infinity_hides(variant, function, option):
    """Unless a softcap makes it finite; its own gradient is 0."""
    rng = generator("bias hides")
    for n in (12, 150):
        arguments = draw(rng, Shape(1, 2, 1, n, n, 8, 8), OPTIONS[option])
        grads = incoming(rng, arguments)
        first = arguments.get("bias_first", 0)
        arguments["bias"] = arguments["bias"].clone()
        arguments["bias"][:, 3 - first] = -inf
        results = run(function, arguments, *grads)
        assert not results["bias"][:, 3 - first].any()
        assert all(x.isfinite().all() for x in results.values())
        if "softcap" in arguments:
            continue
        row = torch.arange(n)
        seen = (row[:, None] - row != 3)[None, None]
        arguments["bias"][:, 3 - first] = 0
        want = run(function, arguments | {"mask": seen}, *grads)
        for name, x in results.items():
            torch.testing.assert_close(x, want[name])


# ---- large and small numbers --------------------------------------------------------------------
@each_function
@pytest.mark.parametrize("size", [1e4, 1e8, 1e15])
def test_large_logits(variant, function, size):
    """Scores so far apart that one key has all the weight: its value, no overflow."""
    rng = generator("logits")
    for n in (7, 300):
        arguments = draw(rng, Shape(1, 2, 1, n, n, 16, 8), {"causal": False})
        k = torch.zeros(1, 1, n, 16)
        k[..., 0] = torch.linspace(-size, size, n)
        arguments |= {"q": torch.full((1, 2, n, 16), 4.0), "k": k}
        results = run(function, arguments, *incoming(rng, arguments))
        want = arguments["v"][:, :, -1:].expand(1, 2, n, 8)
        torch.testing.assert_close(results["out"], want, rtol=1e-6, atol=0)
        torch.testing.assert_close(results["lse"], torch.full((1, 2, n), size), rtol=1e-6, atol=0)
        assert all(x.isfinite().all() for x in results.values())


@pytest.mark.parametrize("option", ["plain", "edge", "slopes"])
def test_logits_of_10000_against_the_oracle(variant, option):
    rng = generator("logits judged")
    arguments = draw(rng, Shape(1, 2, 1, 60, 60, 16, 8), OPTIONS[option])
    arguments["q"] = arguments["q"] * 1e4
    grads = incoming(rng, arguments)
    compare(run(attention, arguments, *grads), judge(arguments, *grads), F32)


@each_function
@pytest.mark.parametrize("dtype", LOW)
def test_ends_of_low_precision(variant, function, dtype):
    """Entries at the end of float16's range: products far beyond it, results within."""
    for n in (5, 130):
        q = torch.full((1, 1, n, 64), 6e4, dtype=dtype)
        k = torch.full((1, 1, n, 64), 6e4, dtype=dtype)
        v = torch.full((1, 1, n, 8), 65504.0, dtype=dtype)
        v[..., 4:] = 2.0**-24  # the smallest subnormal of float16
        results = run(function, {"q": q, "k": k, "v": v}, torch.full_like(v, 2.0**-14), None)
        torch.testing.assert_close(results["out"], v, rtol=2.0**-8, atol=0)
        assert all(x.isfinite().all() for x in results.values())


@each_function
def test_scores_of_minus_infinity_and_far_below(variant, function):
    """Weights that underflow are 0, and a whole row of very low scores is still normalised."""
    rng = generator("low")
    arguments = draw(rng, Shape(1, 1, 1, 8, 8, 4, 4), {"causal": False, "scale": 1.0})
    arguments["q"] = torch.full((1, 1, 8, 4), -1e18)
    arguments["k"] = torch.ones(1, 1, 8, 4) * 1e18
    results = run(function, arguments, *incoming(rng, arguments))
    torch.testing.assert_close(results["out"], arguments["v"].mean(2, True).expand(1, 1, 8, 4))
    torch.testing.assert_close(results["lse"], torch.full((1, 1, 8), -4e36))


def test_slopes_of_far_positions(variant):
    """slope |delta| of a long context; the weights of near keys keep their digits."""
    check(attention, generator("far"), Shape(1, 2, 1, 3, 5000, 8, 8), OPTIONS["slopes"])


# ---- constant tables ----------------------------------------------------------------------------
def zones_of(rng, dtype, d):
    """Two zones of small rank and one of plain rows, as the raw operator takes them."""
    kinds = ((7, 3), (20, 2), (4, None))
    zones, rows = [], []
    for count, rank in kinds:
        c = torch.from_numpy(rng.normal(size=(count, rank or d))).to(dtype)
        u = torch.from_numpy(rng.normal(size=(d, rank or 0))).to(dtype)
        zones += [c, u]
        rows.append(c.double() @ u.double().T if rank else c.double())
    return zones, torch.cat(rows)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("beyond", ["zero", "edge"])
@pytest.mark.parametrize("first", [0, -9, 4])
def test_zones(variant, dtype, beyond, first):
    rng = generator("zones")
    forward = torch.ops.wavepe.attention_forward
    for shape in (
        Shape(2, 2, 1, 9, 9, 8, 8),
        Shape(1, 2, 2, 50, 81, 16, 24),
        Shape(2, 4, 2, 1, 90, 17, 5),
        Shape(1, 2, 1, 30, 240, 24, 8),  # with fewer keys the kernels use the rows
        Shape(2, 4, 2, 3, 240, 17, 5),
    ):
        for causal, rel in ((True, False), (False, True)):
            arguments = draw(rng, shape, {"causal": causal}, dtype)
            zones, rows = zones_of(rng, dtype, shape.d)
            p, options = rows.to(dtype), {"first": first, "beyond": beyond}
            if rel:
                options["q_rel"] = draw(rng, shape, {}, dtype)["q"]

            def with_zones(q, k, v, *, q_rel=None, causal, return_lse, zones=zones, p=p, **_):
                rest = (causal, *[None] * 7, 0.0, None, zones)
                return forward(q, k, v, p, first, beyond, q_rel, None, *rest)

            grads = incoming(rng, arguments)
            wanted = [name for name in FLOATING if name != "p"]
            results = run(with_zones, arguments | options, *grads, wanted=wanted)
            exact = judge(arguments | options | {"p": rows}, *grads)
            compare(results, exact, dtype, f"{shape} {first} {beyond}")


@pytest.mark.parametrize("dtype", [F32, F64, *LOW])
def test_relative_table_of_wavelets(variant, dtype):
    rng = generator("wavelets")
    d = 32
    for causal, first, count in ((True, 0, 300), (False, -299, 599)):
        scale, shift = wavepe.wavelet_grid(d, 8)
        deltas = np.arange(first, first + count)
        p = wavepe.wavelet_table(deltas, scale, shift, dtype=np.float64)
        constant = ops.relative_table(p, first=first)
        for shape in (Shape(1, 2, 1, 200, 300, d, d), Shape(2, 2, 1, 1, 300, d, d)):
            arguments = draw(rng, shape, {"causal": causal}, dtype)
            grads = incoming(rng, arguments)
            results = run(attention, arguments | {"p": constant}, *grads, wanted=("q", "k", "v"))
            table = torch.from_numpy(p) if dtype == F64 else torch.from_numpy(p).to(dtype)
            exact = judge(arguments | {"p": table, "first": first}, *grads)
            if dtype in LOW:  # zones round C and U, the table its rows: a rounding of the largest
                for name, got in results.items():
                    error = largest(got.double().numpy() - exact.values[name])
                    assert error <= 2 * UNITS[dtype] * largest(exact.values[name]), name
                continue
            compare(results, exact, dtype)
