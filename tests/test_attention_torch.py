"""wavepe.attention and wavepe.ops.attention: the same kernels, so the same bits."""

import numpy as np
import pytest
import wavepe
from attention_arrays import DECODING, OPTIONS, call, draw
from attention_shapes import LARGE, SHAPES
from cases import LAYOUTS, assert_same_bits, generator, lay_out, load_torch

torch, ops = load_torch()

DTYPES = {np.float16: torch.float16, np.float32: torch.float32, np.float64: torch.float64}


def of_torch(given):
    tensors = {
        name: torch.from_numpy(np.array(x, order="C"))
        for name, x in given.items()
        if isinstance(x, np.ndarray)
    }
    return ops.attention(**given | tensors, return_lse=True)


@pytest.mark.parametrize("option", OPTIONS)
def test_same_bits(variant, option):
    for dtype in DTYPES:
        for shape in (*SHAPES[::4], DECODING[2], LARGE[0], LARGE[2]):
            given = draw(generator("torch"), shape, option, dtype)
            for x, y in zip(call(given), of_torch(given), strict=True):
                assert_same_bits(x, y.numpy(), f"{dtype.__name__} {shape}")


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "unaligned"])
def test_same_bits_of_any_layout(variant, layout):
    for shape in (SHAPES[5], DECODING[1]):
        given = draw(generator("torch layouts"), shape, "everything")
        laid = {name: lay_out(given[name], layout) for name in (*"qkvp", "bias")}
        for x, y in zip(call(given | laid), of_torch(given | laid), strict=True):
            assert_same_bits(x, y.numpy(), f"{shape}")


def test_same_bits_of_bfloat16(variant):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    for option in ("plain", "everything", "table, both sides"):
        for shape in (*SHAPES[::3], DECODING[2], LARGE[0]):
            given = draw(generator("torch bf16"), shape, option, bfloat16)
            wide = {name: x.astype(np.float32) for name, x in given.items() if name in "qkvp"}
            wide = {name: torch.from_numpy(x).bfloat16() for name, x in wide.items()}
            wide |= {n: torch.from_numpy(given[n]) for n in ("slopes", "bias") if n in given}
            out, lse = call(given)
            of_ops = ops.attention(**given | wide, return_lse=True)
            assert_same_bits(out.view(np.int16), of_ops[0].view(torch.int16).numpy())
            assert_same_bits(lse, of_ops[1].numpy())


def test_a_relative_table_is_torchs():
    q = np.ones((2, 3, 8), np.float32)
    table = ops.relative_table(np.ones((3, 8)))
    with pytest.raises(TypeError, match=r"p must be an array, .* pass table\.p"):
        wavepe.attention(q, q, q, p=table)
    wavepe.attention(q, q, q, p=table.p, first=table.first)
