"""ops.attention in float64, bfloat16 and float16, against the oracle."""

import pytest
from attention_cases import (
    F64,
    FEW,
    LOW,
    OPTIONS,
    SQUARE,
    Shape,
    attention,
    composed,
    draw,
    grid,
    torch,
)
from attention_options import COMBINED
from attention_shapes import SHAPES
from cases import generator

each_option = pytest.mark.parametrize("option", OPTIONS)


@pytest.mark.parametrize("dtype", LOW)
def test_composed_low_precision(dtype):
    for option in OPTIONS:
        grid(composed, option, FEW[2:4], dtype)


@each_option
def test_float64(variant, option):
    grid(attention, option, FEW, F64)


@each_option
@pytest.mark.parametrize("dtype", LOW)
def test_low_precision(variant, option, dtype):
    grid(attention, option, FEW[1:], dtype)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("option", COMBINED)
def test_low_precision_of_every_size(variant, option, dtype):
    grid(attention, option, SHAPES[::2] + SQUARE, dtype)


def test_slopes_of_any_float_type(variant):
    arguments = draw(generator("slopes"), Shape(1, 4, 2, 9, 9, 8, 8), OPTIONS["slopes"])
    want = attention(**arguments)
    for kind in (torch.float64, torch.bfloat16, torch.float16):  # powers of two: exact in all
        assert torch.equal(attention(**arguments | {"slopes": arguments["slopes"].to(kind)}), want)
