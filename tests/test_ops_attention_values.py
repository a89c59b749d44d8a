"""ops.attention on NaN and Inf, on numbers near the ends of their range, on constant tables."""

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
    compare,
    composed,
    draw,
    each_function,
    incoming,
    judge,
    ops,
    run,
    same,
    torch,
)
from attention_shapes import largest
from cases import generator

nan, inf = math.nan, math.inf


# ---- NaN and Inf --------------------------------------------------------------------------------


@each_function
@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize(
    "option", ["plain", "edge", "bias", "softcap", "window", "segments", "mask"]
)
def test_what_is_hidden_does_not_leak(variant, function, value, where, option):
    """NaN and Inf in k and v of one token: the rows that do not see it keep their bits, forward
    and, where their gradients come in alone, backward; the rows that do see a NaN are NaN."""
    for n in (9, 70, 300):
        rng = generator("leak", option)
        arguments = draw(rng, Shape(2, 2, 1, n, n, 16, 8), OPTIONS[option])
        grad_out, grad_lse = incoming(rng, arguments)
        token = n // 2
        sees = seen_by(arguments, token)
        blind = ~sees
        grads = grad_out * blind[..., None], grad_lse * blind
        clean = run(function, arguments, *grads)
        broken = arguments | {where: arguments[where].clone()}
        broken[where][:, :, token, 3] = value
        found = run(function, broken, *grads)
        for name in ("out", "lse", "q"):
            assert torch.equal(found[name][blind], clean[name][blind]), f"{n} {name}"
        if math.isnan(value):
            got = found["out"] if where == "k" else found["out"][..., 3:4]
            assert got[sees].isnan().all()
            other = found["out"][..., [0, 1, 2, 4, 5, 6, 7]]
            assert where == "k" or other.isfinite().all()
            assert (found["lse"].isnan() == (sees if where == "k" else False)).all()
        else:
            got = found["out"] if where == "k" else found["out"][..., 3]
            want = clean["out"] if where == "k" else clean["out"][..., 3]
            assert where == "k" or not torch.isfinite(got[sees]).any()
            assert where == "v" or not torch.equal(got[sees], want[sees]) or not sees.any()


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
        found = run(function, arguments | broken | {"key_mask": seen}, *grads)
        same(found, clean)
    for name in "kv":
        assert not clean[name].mT[~seen[:, None, None].expand(clean[name].mT.shape)].any()


@each_function
def test_nan_of_a_query_stays_in_its_row(variant, function):
    rng = generator("query")
    for m, row in ((9, 4), (150, 77)):
        arguments = draw(rng, Shape(1, 2, 1, m, m, 16, 8), OPTIONS["edge"])
        clean = function(**arguments)
        arguments["q"][0, 1, row, 2] = nan
        found = function(**arguments)
        assert found[0, 1, row].isnan().all()
        found[0, 1, row] = clean[0, 1, row]
        assert torch.equal(found, clean)


@each_function
def test_nan_of_a_table_row_reaches_its_deltas(variant, function):
    rng = generator("table row")
    for n in (12, 150):
        arguments = draw(rng, Shape(1, 2, 1, n, n, 8, 8), OPTIONS["table"])
        clean = function(**arguments)
        arguments["p"][5] = nan
        found = function(**arguments)
        assert torch.equal(found[:, :, :5], clean[:, :, :5])
        assert found[:, :, 5:].isnan().all()


@each_function
@pytest.mark.parametrize("value", [nan, inf])
def test_nan_of_a_bias_reaches_its_deltas(variant, function, value):
    """NaN reaches the rows that see a key at its distance, forward and backward.

    A number of the bias that no row reads has no effect.
    """
    rng = generator("bias number")
    for n in (12, 150):
        arguments = draw(rng, Shape(1, 2, 1, n, n, 8, 8), OPTIONS["bias"])
        grad_out, grad_lse = incoming(rng, arguments)
        grad_out[:, 0, 5:] = grad_lse[:, 0, 5:] = 0
        clean = run(function, arguments, grad_out, grad_lse)
        arguments["bias"] = arguments["bias"].clone()
        arguments["bias"][0, 5] = value
        found = run(function, arguments, grad_out, grad_lse)
        assert torch.equal(found["out"][:, 1], clean["out"][:, 1])
        assert torch.equal(found["out"][:, :, :5], clean["out"][:, :, :5])
        assert torch.equal(found["q"][:, :, :5], clean["q"][:, :, :5])
        assert torch.equal(found["bias"][1], clean["bias"][1])
        assert found["out"][:, 0, 5:].isnan().all()
        assert found["bias"][0].isnan().all()
        short = {name: arguments[name][:, :, :5] for name in "qkv"} | {"bias": arguments["bias"]}
        grads = (grad_out[:, :, :5], grad_lse[:, :, :5])
        found = run(function, short, *grads)
        assert all(x.isfinite().all() for x in found.values())


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
        found = run(function, arguments, *grads)
        assert not found["bias"][:, 3 - first].any()
        assert all(x.isfinite().all() for x in found.values())
        if "softcap" in arguments:
            continue
        row = torch.arange(n)
        seen = (row[:, None] - row != 3)[None, None]
        arguments["bias"][:, 3 - first] = 0
        want = run(function, arguments | {"mask": seen}, *grads)
        for name, x in found.items():
            torch.testing.assert_close(x, want[name])


def test_gradient_of_nan_is_nan(variant):
    """A NaN that comes in reaches the gradients of its own query and of the keys that it sees."""
    rng = generator("grad of nan")
    arguments = draw(rng, Shape(1, 2, 1, 40, 40, 8, 8), OPTIONS["plain"])
    grad_out, grad_lse = incoming(rng, arguments)
    clean = run(attention, arguments, grad_out, grad_lse)
    for g in (grad_out.clone(), grad_lse.clone()):
        g[0, 1, 20] = nan
        found = run(
            attention, arguments, g if g.dim() == 4 else grad_out, g if g.dim() == 3 else grad_lse
        )
        assert found["q"][0, 1, 20].isnan().all()
        found["q"][0, 1, 20] = clean["q"][0, 1, 20]
        assert torch.equal(found["q"], clean["q"])
        assert found["k"][0, 0, :21].isnan().all()


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
        grads = incoming(rng, arguments)
        found = run(function, arguments, *grads)
        want = arguments["v"][:, :, -1:].expand(1, 2, n, 8)
        torch.testing.assert_close(found["out"], want, rtol=1e-6, atol=0)
        torch.testing.assert_close(found["lse"], torch.full((1, 2, n), size), rtol=1e-6, atol=0)
        assert all(x.isfinite().all() for x in found.values())


def test_logits_of_10000_against_the_oracle(variant):
    rng = generator("logits judged")
    for options in ({}, OPTIONS["edge"], OPTIONS["slopes"]):
        arguments = draw(rng, Shape(1, 2, 1, 60, 60, 16, 8), options)
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
        found = run(function, {"q": q, "k": k, "v": v}, torch.full_like(v, 2.0**-14), None)
        torch.testing.assert_close(found["out"], v, rtol=2.0**-8, atol=0)
        assert all(x.isfinite().all() for x in found.values())


@each_function
def test_scores_of_minus_infinity_and_far_below(variant, function):
    """Weights that underflow are 0, and a whole row of very low scores is still normalised."""
    rng = generator("low")
    arguments = draw(rng, Shape(1, 1, 1, 8, 8, 4, 4), {"causal": False, "scale": 1.0})
    arguments["q"] = torch.full((1, 1, 8, 4), -1e18)
    arguments["k"] = torch.ones(1, 1, 8, 4) * 1e18
    found = run(function, arguments, *incoming(rng, arguments))
    torch.testing.assert_close(found["out"], arguments["v"].mean(2, True).expand(1, 1, 8, 4))
    torch.testing.assert_close(found["lse"], torch.full((1, 1, 8), -4e36))


def test_slopes_of_far_positions(variant):
    """slope |delta| of a long context; the weights of near keys keep their digits."""
    rng = generator("far")
    arguments = draw(rng, Shape(1, 2, 1, 3, 5000, 8, 8), OPTIONS["slopes"])
    grads = incoming(rng, arguments)
    compare(run(attention, arguments, *grads), judge(arguments, *grads), F32)


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
            found = run(with_zones, arguments | options, *grads, wanted=wanted)
            exact = judge(arguments | options | {"p": rows}, *grads)
            compare(found, exact, dtype, f"{shape} {first} {beyond}")


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
            found = run(attention, arguments | {"p": constant}, *grads, wanted=("q", "k", "v"))
            table = torch.from_numpy(p) if dtype == F64 else torch.from_numpy(p).to(dtype)
            exact = judge(arguments | {"p": table, "first": first}, *grads)
            if dtype in LOW:  # zones round C and U, the table its rows: a rounding of the largest
                for name, got in found.items():
                    error = largest(got.double().numpy() - exact.values[name])
                    assert error <= 2 * UNITS[dtype] * largest(exact.values[name]), name
                continue
            compare(found, exact, dtype)
