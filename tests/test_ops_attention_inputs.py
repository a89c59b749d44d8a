"""ops.attention on inputs of any strides, of empty sizes, of any type that fits, and with rows that
see nothing."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from attention_cases import (
    F32,
    F64,
    LOW,
    Shape,
    attention,
    check,
    draw,
    each_function,
    incoming,
    judge,
    ops,
    run,
    same,
    torch,
)
from attention_options import EMPTY, OPTIONS
from cases import generator
from tensors import LAYOUTS, REPEATED

nan, inf = math.nan, math.inf


STRIDED = ("q", "k", "v", "p", "q_rel", "key_mask", "mask", "bias")


@pytest.mark.parametrize("layout", [*LAYOUTS, *REPEATED])
def test_any_strides(variant, layout):
    rng = generator("strides")
    lay = (LAYOUTS | REPEATED)[layout]
    for shape in (Shape(2, 4, 2, 19, 37, 24, 20), Shape(2, 2, 1, 1, 40, 16, 16)):
        arguments = draw(rng, shape, OPTIONS["everything"])
        grad_out, grad_lse = incoming(rng, arguments)
        for names in (*((name,) for name in STRIDED), "qkvp"):
            laid = arguments | {name: lay(arguments[name]) for name in names}
            plain = {n: x.contiguous() if torch.is_tensor(x) else x for n, x in laid.items()}
            want = run(attention, plain, grad_out, grad_lse)
            same(run(attention, laid, grad_out, grad_lse), want, f"{layout} {names}")
        # of the gradients that come in; q, k and v of one projection
        if layout in LAYOUTS:
            want = run(attention, arguments, grad_out, grad_lse)
            same(run(attention, arguments, lay(grad_out), grad_lse.mT.contiguous().mT), want)


def test_inputs_are_not_changed(variant):
    rng = generator("unchanged")
    arguments = draw(rng, Shape(2, 4, 2, 19, 37, 24, 20), OPTIONS["everything"])
    grads = incoming(rng, arguments)
    before = [x.clone() for x in (*arguments.values(), *grads) if torch.is_tensor(x)]
    run(attention, arguments, *grads)
    after = [x for x in (*arguments.values(), *grads) if torch.is_tensor(x)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, F64])
@each_function
def test_empty(variant, function, shape, dtype):
    rng = generator("empty")
    names = ("plain", "every key", "table", "table, q_rel, per head", "edge", "offset of rows")
    names += ("bias", "bias of all heads", "bias, both sides, edge")
    for name in (*names, "key_mask", "mask", "dropout", "softcap"):
        check(function, rng, shape, OPTIONS[name], dtype, f"{name} {shape}")


@each_function
@pytest.mark.parametrize("name", ["p", "bias"])
def test_table_without_rows_and_bias_without_numbers(variant, function, name):
    rows = (0, 4) if name == "p" else (0,)
    for x in (np.zeros(rows), np.zeros((2, *rows))):
        arguments, found = check(function, generator("rows"), Shape(2, 2, 1, 5, 6, 4, 3), {name: x})
        assert found[name].shape == x.shape
        arguments.pop(name)
        assert torch.equal(found["out"], function(**arguments))


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
        alone = arguments.get("sinks", torch.full((2,), -inf, dtype=torch.float64))
        assert (found["lse"][:, :, :7] == alone[:, None].to(found["lse"].dtype)).all()
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


def test_an_int_for_offset_is_a_tensor_for_every_row(variant):
    rng = generator("offsets")
    arguments = draw(rng, Shape(3, 2, 1, 9, 12, 8, 8), OPTIONS["edge"])
    grads = incoming(rng, arguments)
    for offset in (-4, 0, 3, 7):
        given = (offset, torch.tensor(offset), torch.tensor([offset]), torch.full((3,), offset))
        results = [run(attention, arguments | {"offset": o}, *grads) for o in given]
        for other in results[1:]:
            assert all(torch.equal(results[0][name], other[name]) for name in other)
    for kind in (torch.uint8, torch.int16, torch.int32, torch.uint64):
        got = run(attention, arguments | {"offset": torch.tensor([0, 3, 1]).to(kind)}, *grads)
        want = run(attention, arguments | {"offset": torch.tensor([0, 3, 1])}, *grads)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_segments_of_any_integer_type(variant):
    rng = generator("segments")
    arguments = draw(rng, Shape(2, 2, 1, 12, 12, 8, 8), {})
    ids = torch.tensor([[3, 3, 3, 0, 0, 200, 200, 200, 200, 7, 7, 7], [1] * 12])
    exact = judge(arguments | {"segments": ids}).values
    want = attention(**arguments, segments=ids)
    np.testing.assert_allclose(want.numpy(), exact["out"], rtol=1e-4, atol=1e-5)
    for kind in (torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64):
        assert torch.equal(attention(**arguments, segments=ids.to(kind)), want)
    far = torch.tensor([2**40, 0])[ids % 2]  # equal in their low 32 bits
    assert torch.equal(
        attention(**arguments, segments=far), attention(**arguments, segments=ids % 2)
    )


def test_slopes_of_any_float_type(variant):
    arguments = draw(generator("slopes"), Shape(1, 4, 2, 9, 9, 8, 8), OPTIONS["slopes"])
    want = attention(**arguments)
    for kind in (torch.float64, torch.bfloat16, torch.float16):  # powers of two: exact in all
        assert torch.equal(attention(**arguments | {"slopes": arguments["slopes"].to(kind)}), want)


def test_a_call_without_gradients_takes_few_calls_in_python():
    """A decoding step makes such a call in each layer, and asks nothing that never changes."""
    q, k, v = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 8)
    table = ops.relative_table(torch.randn(300, 8))
    package, names = str(Path(ops.__file__).parents[1]), []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            names.append(frame.f_code.co_name)

    for _ in range(2):
        names.clear()
        sys.setprofile(note)
        try:
            with torch.no_grad():
                ops.attention(q, k, v, p=table, q_rel=2 * q, bias=torch.zeros(4, 300))
        finally:
            sys.setprofile(None)
    assert names == ["attention", "is_compiling", "under_transforms"]
