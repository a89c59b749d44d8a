"""wavepe.attention of NumPy arrays: values against the oracle, and bits: those of torch's operator,
for any number of threads.

What NaN reaches, low precision, other heads and later tokens are tested of the operator, in
test_ops_attention*.py; what inputs may be is in test_attention_inputs.py.
"""

import itertools
import math
import sys
import threading
import time

import numpy as np
import pytest
import wavepe
from attention_arrays import DECODING, OPTIONS, call, compare, draw, problem
from attention_options import COMBINED, LARGE, SHAPES, Shape
from cases import assert_same_bits, by_turns, generator

nan, inf = math.nan, math.inf
BFLOAT16 = "bfloat16"  # of ml_dtypes, which may not be there


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_size(variant, option, dtype):
    for shape in (*SHAPES, *DECODING):
        args, exact = problem(option, shape, dtype)
        compare(call(args), exact, dtype, f"{option} {shape}")


@pytest.mark.parametrize("option", [o for o in COMBINED if o in OPTIONS] + ["slopes", "window"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_many_blocks(variant, option, shape):
    args, exact = problem(option, shape, np.float32)
    compare(call(args), exact, np.float32, f"{option} {shape}")


def test_written_out(variant):
    """Two queries, three keys: the second query stands on the last key."""
    q = np.array([[1.0], [2.0]])
    k, v = np.array([[1.0], [0.0], [-1.0]]), np.array([[1.0, 0], [0, 1], [4, 4]])
    p = np.array([[0.5], [0.25]])  # of delta 0 and 1
    out, lse = wavepe.attention(q, k, v, p=p, slopes=0.1, scale=3.0, return_lse=True)
    e = math.exp
    first = e(3 * (1 + 0.25) - 0.1), e(3 * 0.5)  # deltas 1, 0
    second = e(3 * 2 - 0.2), e(3 * 2 * 0.25 - 0.1), e(3 * 2 * (-1 + 0.5))  # deltas 2, 1, 0
    want = [
        [first[0] / sum(first), first[1] / sum(first)],
        [(second[0] + 4 * second[2]) / sum(second), (second[1] + 4 * second[2]) / sum(second)],
    ]
    np.testing.assert_allclose(out, want, rtol=1e-14)
    np.testing.assert_allclose(lse, np.log([sum(first), sum(second)]), rtol=1e-14)


@pytest.mark.parametrize("number", [2**40, 2**60, 2**63 - 1, -(2**63), 2**64, 2**70, -(2**70)])
def test_huge_numbers(variant, number):
    """delta - first must not wrap around into the table, delta - window not into the keys."""
    for shape in (Shape(1, 2, 2, 3, 5, 4, 4), Shape(1, 1, 1, 1, 40, 8, 8)):
        for causal in (True, False):
            args = draw(generator("huge"), shape) | {"causal": causal}
            p = generator("huge table").normal(size=(6, shape.d)).astype(np.float32)
            plain = wavepe.attention(**args)
            assert_same_bits(wavepe.attention(**args, p=p, first=number), plain)
            got = wavepe.attention(**args, p=p, first=number, beyond="edge")
            near = wavepe.attention(
                **args, p=p, first=(10**6 if number > 0 else -(10**6)), beyond="edge"
            )
            assert_same_bits(got, near)
            bias = p[:, 0]
            assert_same_bits(wavepe.attention(**args, bias=bias, bias_first=number), plain)
            got, near = (
                wavepe.attention(**args, bias=bias, bias_first=first, bias_beyond="edge")
                for first in (number, 10**6 if number > 0 else -(10**6))
            )
            assert_same_bits(got, near)
            if number > 0:
                assert_same_bits(wavepe.attention(**args, window=number), plain)


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("option", ["plain", "table", "everything", "bias, both sides"])
def test_same_bits_for_any_number_of_threads(variant, pools, threads, option):
    for shape in (
        Shape(2, 6, 2, 50, 60, 16, 16),  # heads to share out
        Shape(1, 1, 1, 700, 700, 16, 8),  # blocks of one head
        Shape(1, 2, 1, 200, 450, 8, 8),
        Shape(2, 4, 4, 1, 90, 8, 8),  # one query a head
        Shape(1, 24, 2, 1, 300, 8, 8),  # one for many heads, which threads share
    ):
        args = draw(generator("threads"), shape, option)
        wavepe.set_num_threads(1)
        alone = call(args)
        assert not pools
        wavepe.set_num_threads(threads)
        for x, y in zip(call(args), alone, strict=True):
            assert_same_bits(x, y, f"{shape}")
        assert 2 <= max(pools) <= threads
        pools.clear()


def test_other_threads_go_on_meanwhile():
    """A thread that never has to hand over the lock of the interpreter does so in the kernel."""
    x = np.ones((2000, 64), np.float32)
    calls, seen = itertools.count(), threading.Event()
    state = {"within": False}

    def work():
        while not seen.is_set() and next(calls) < 100:
            state["within"] = True
            wavepe.attention(x, x, x)
            state["within"] = False

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e9)
    try:
        worker = threading.Thread(target=work)
        worker.start()
        while worker.is_alive() and not seen.is_set():
            if state["within"]:
                seen.set()
            else:
                time.sleep(0)
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen.is_set()


def in_torch(torch, args):
    """Call the operator with the same arguments."""

    def tensor(x):
        if x.dtype.name == BFLOAT16:
            return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(np.array(x, order="C"))

    tensors = {name: tensor(x) for name, x in args.items() if isinstance(x, np.ndarray)}
    found = sys.modules["wavepe.ops"].attention(**args | tensors, return_lse=True)
    return tuple((x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy() for x in found)


def assert_torch_agrees(torch, args, what):
    """One kernel makes both: arrays have the bits of tensors."""
    for x, y in zip(call(args), in_torch(torch, args), strict=True):
        assert_same_bits(x.view(y.dtype), y, what)


@pytest.mark.parametrize(
    ("option", "dtype"), by_turns(OPTIONS, ["float16", "float32", "float64", BFLOAT16])
)
def test_torch_has_the_same_bits(torch, option, dtype):
    """In one variant: the kernels are those of both, and only the way to them differs."""
    for shape in (*SHAPES[::4], DECODING[2], LARGE[0], LARGE[2]):
        ml_dtypes = dtype == BFLOAT16 and pytest.importorskip("ml_dtypes")
        of_dtype = ml_dtypes.bfloat16 if ml_dtypes else np.dtype(dtype)
        args = draw(generator("torch"), shape, option, of_dtype)
        assert_torch_agrees(torch, args, f"{dtype} {shape}")


@pytest.mark.parametrize("option", ["plain", "everything", "window of nothing"])
@pytest.mark.parametrize("value", [nan, inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "p", "bias"])
def test_torch_has_the_same_bits_where_nan_reaches(variant, torch, option, value, name):
    for shape in (Shape(2, 2, 1, 12, 5, 8, 8), DECODING[1], LARGE[0]):
        args = draw(generator("torch nan"), shape, option)
        if name in args:
            args[name][..., args[name].shape[-2] // 2, :] = value
        assert_torch_agrees(torch, args, f"{shape}")


def test_a_relative_table_is_torchs(torch):
    q = np.ones((2, 3, 8), np.float32)
    table = sys.modules["wavepe.ops"].relative_table(np.ones((3, 8)))
    with pytest.raises(TypeError, match=r"p must be an array, .* pass table\.p"):
        wavepe.attention(q, q, q, p=table)
    wavepe.attention(q, q, q, p=table.p, first=table.first)
