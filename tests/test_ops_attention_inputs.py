"""ops.attention on inputs of any strides, of empty sizes, and with rows that see nothing."""

import math

import numpy as np
import pytest
from attention_cases import (
    F32,
    F64,
    LOW,
    OPTIONS,
    Shape,
    attention,
    check,
    compare,
    draw,
    each_function,
    incoming,
    judge,
    run,
    same,
    torch,
)
from cases import generator
from tensors import LAYOUTS, REPEATED

nan, inf = math.nan, math.inf


# ---- strides ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*LAYOUTS, *REPEATED])
def test_any_strides(variant, layout):
    rng = generator("strides")
    lay = (LAYOUTS | REPEATED)[layout]
    for shape in (Shape(2, 4, 2, 19, 37, 24, 20), Shape(2, 2, 1, 1, 40, 16, 16)):
        arguments = draw(rng, shape, OPTIONS["everything"])
        grad_out, grad_lse = incoming(rng, arguments)
        for names in (
            ["q"],
            ["k"],
            ["v"],
            ["p"],
            ["q_rel"],
            ["key_mask"],
            ["mask"],
            ["bias"],
            [*"qkv", "p"],
        ):
            laid = arguments | {name: lay(arguments[name]) for name in names}
            plain = {n: x.contiguous() if torch.is_tensor(x) else x for n, x in laid.items()}
            want = run(attention, plain, grad_out, grad_lse)
            same(run(attention, laid, grad_out, grad_lse), want, f"{layout} {names}")
        # of the gradients that come in; q, k and v of one projection
        if layout in LAYOUTS:
            want = run(attention, arguments, grad_out, grad_lse)
            same(run(attention, arguments, lay(grad_out), grad_lse.mT.contiguous().mT), want)


def test_gradients_of_one_packed_projection(variant):
    """q, k and v as slices of one tensor, as models make them; a sum's gradient has stride 0."""
    rng = generator("packed")
    packed = torch.from_numpy(rng.normal(size=(2, 21, 3, 4, 16))).float()
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    arguments = {"q": q, "k": k, "v": v}
    ones = torch.ones(()).expand(2, 4, 21, 16), torch.ones(()).expand(2, 4, 21)
    compare(run(attention, arguments, *ones), judge(arguments, *ones), F32)


def test_inputs_are_not_changed(variant):
    rng = generator("unchanged")
    arguments = draw(rng, Shape(2, 4, 2, 19, 37, 24, 20), OPTIONS["everything"])
    grads = incoming(rng, arguments)
    before = [x.clone() for x in (*arguments.values(), *grads) if torch.is_tensor(x)]
    run(attention, arguments, *grads)
    after = [x for x in (*arguments.values(), *grads) if torch.is_tensor(x)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ---- empty --------------------------------------------------------------------------------------

EMPTY = [
    Shape(0, 2, 1, 5, 6, 4, 3),
    Shape(2, 0, 0, 5, 6, 4, 3),
    Shape(2, 0, 2, 5, 6, 4, 3),
    Shape(2, 2, 1, 0, 6, 4, 3),
    Shape(2, 2, 1, 5, 0, 4, 3),
    Shape(2, 2, 1, 5, 6, 0, 3),
    Shape(2, 2, 1, 5, 6, 4, 0),
    Shape(2, 2, 1, 5, 6, 0, 0),
    Shape(0, 0, 0, 0, 0, 0, 0),
]


@pytest.mark.parametrize("shape", EMPTY)
@each_function
def test_empty(variant, function, shape):
    rng = generator("empty")
    names = ("plain", "every key", "table", "table, q_rel, per head", "edge", "offset of rows")
    names += ("bias", "bias of all heads", "bias, both sides, edge")
    for name in (*names, "key_mask", "mask", "dropout", "softcap"):
        for dtype in (F32, torch.bfloat16, F64):
            check(function, rng, shape, OPTIONS[name], dtype, f"{name} {shape}")


@each_function
def test_table_without_rows(variant, function):
    rng = generator("rows")
    shape = Shape(2, 2, 1, 5, 6, 4, 3)
    for p in (np.zeros((0, 4)), np.zeros((2, 0, 4))):
        arguments, found = check(function, rng, shape, {"p": p})
        assert found["p"].shape == p.shape
        arguments.pop("p")
        assert torch.equal(found["out"], function(**arguments))


@each_function
def test_bias_without_numbers(variant, function):
    rng = generator("numbers")
    for bias in (np.zeros(0), np.zeros((2, 0))):
        arguments, found = check(function, rng, Shape(2, 2, 1, 5, 6, 4, 3), {"bias": bias})
        assert found["bias"].shape == bias.shape
        arguments.pop("bias")
        assert torch.equal(found["out"], function(**arguments))


# ---- rows that see nothing ----------------------------------------------------------------------


@each_function
@pytest.mark.parametrize("dtype", [F32, F64, *LOW])
def test_a_row_that_sees_nothing(variant, function, dtype):
    """0, lse -inf, gradient 0, also where k and v are NaN and where lse has a gradient."""
    rng = generator("blind")
    shape = Shape(2, 2, 1, 12, 5, 8, 8)  # seven queries stand before the first key
    names = ("plain", "edge", "everything", "softcap", "slopes", "table, q_rel", "dropout")
    for name in (*names, "bias, edge"):
        arguments = draw(rng, shape, OPTIONS[name], dtype) | {"offset": None, "causal": True}
        found = run(function, arguments, *incoming(rng, arguments))
        assert not found["out"][:, :, :7].any()
        assert found["lse"][:, :, :7].eq(-inf).all()
        assert not found["q"][:, :, :7].any()
        assert "q_rel" not in found or not found["q_rel"][:, :, :7].any()
    for hidden in (
        {"window": 0},
        {"key_mask": torch.zeros(2, 5, dtype=torch.bool)},
        {"mask": torch.zeros(1, 1, 12, 5, dtype=torch.bool)},
        {"offset": -20},
        {"offset": torch.tensor([-(2**52), -(2**40)])},
    ):
        arguments = draw(rng, shape, OPTIONS["table per head"], dtype)
        arguments["bias"] = draw(rng, shape, OPTIONS["bias"], dtype)["bias"]
        arguments["k"], arguments["v"] = arguments["k"] * nan, arguments["v"] * inf
        found = run(function, arguments | hidden, *incoming(rng, arguments))
        assert found.pop("lse").eq(-inf).all()
        for tensor in ("out", "q", "k", "v", "p", "bias"):
            assert not found[tensor].any(), f"{hidden}: {tensor}"


@each_function
@pytest.mark.parametrize("name", ["plain", "softcap", "segments"])
def test_a_row_of_nan_reaches_no_gradient_of_what_it_does_not_see(variant, function, name):
    rng = generator("row of NaN")
    arguments = draw(rng, Shape(1, 2, 1, 9, 9, 8, 8), OPTIONS[name])
    arguments["segments"] = torch.tensor([[0] * 4 + [1] * 5])
    grads = incoming(rng, arguments)
    clean = run(function, arguments, *grads)
    arguments["q"] = arguments["q"].clone()
    arguments["q"][:, :, 6] = nan
    found = run(function, arguments, *grads)
    assert found["out"][:, :, 6].isnan().all()
    for tensor in ("k", "v"):
        torch.testing.assert_close(found[tensor][:, :, :4], clean[tensor][:, :, :4])
        torch.testing.assert_close(found[tensor][:, :, 7:], clean[tensor][:, :, 7:])
        assert found[tensor][:, :, 4:7].isnan().any()
