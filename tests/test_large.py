"""Strides and sizes above 2^31 elements, in memory that is not touched; and memory that ends."""

import mmap
import os
import sys

import numpy as np
import pytest
import wavepe
from cases import assert_same_bits, generator, load_torch
from processes import output

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.maxsize < 2**32,
    reason="reserves and limits memory as Linux does",
)

FAR = 2**31 + 5  # elements
FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)


def reserved(shape, dtype):
    """Return zeros, which take memory only where they are written."""
    size = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size, flags=FLAGS), dtype).reshape(shape)


def far(values, axis):
    """Return the same values, FAR elements apart along one axis."""
    values = np.moveaxis(values, axis, 0)
    memory = reserved((len(values), FAR), values.dtype)
    strides = np.empty_like(values[:1], order="C").strides[1:]
    spread = np.lib.stride_tricks.as_strided(memory, values.shape, (memory.strides[0], *strides))
    spread[...] = values
    return np.moveaxis(spread, 0, axis)


rng = generator("large")
X, TURN, Q, P, K = (
    rng.normal(size=shape).astype(np.float32)
    for shape in ((3, 8), (3, 4), (2, 5, 4), (6, 4), (2, 5, 4))
)
OFFSETS, SCALE, SHIFT = np.array([3, -2, 9]), np.array([1.0, 2.0]), np.array([0.0, 1.0])
CALLS = {  # a function of arrays, which may take out, and arrays
    "rope": (wavepe.rope, [X, TURN, TURN]),
    "relative_bias": (lambda q, p, **out: wavepe.relative_bias(q, p, 7, first=-1, **out), [Q, P]),
    "wavelet_table": (wavepe.wavelet_table, [OFFSETS, SCALE, SHIFT]),
    "sinusoidal": (lambda positions, **out: wavepe.sinusoidal(positions, 6, **out), [OFFSETS]),
    "ricker": (wavepe.ricker, [X, X + 9, X]),
    "rope_table": (lambda t, f: np.stack(wavepe.rope_table(t, f)), [OFFSETS, SCALE]),
    "attention": (lambda q, k, v, p: wavepe.attention(q, k, v, p=p), [Q, K, K + 1, P]),
}


@pytest.mark.parametrize("name", CALLS)
def test_far_strides(variant, name):
    function, given = CALLS[name]
    want = function(*given)
    for number, x in enumerate(given):
        for axis in range(x.ndim):
            moved = [far(x, axis) if y is x else y for y in given]
            assert_same_bits(function(*moved), want, f"argument {number}, axis {axis}")
    for axis in range(want.ndim if name not in ("attention", "rope_table") else 0):
        out = far(np.zeros_like(want), axis)
        assert function(*given, out=out) is out
        assert_same_bits(out, want, f"out, axis {axis}")


def test_far_strides_of_tensors(variant):
    torch, ops = load_torch()
    functions = {  # and which arguments have gradients
        "rope": (ops.rope, [0]),
        "relative_bias": (lambda q, p: ops.relative_bias(q, p, 7), [0, 1]),
        "wavelet_table": (ops.wavelet_table, [1, 2]),
        "attention": (lambda q, k, v, p: ops.attention(q[None], k[None], v[None], p=p), range(4)),
    }
    for name, (function, leaves) in functions.items():
        given = CALLS[name][1]

        def run(arrays, function=function, leaves=leaves):
            tensors = [
                torch.from_numpy(x).requires_grad_(i in leaves) for i, x in enumerate(arrays)
            ]
            out = function(*tensors)
            return [out, *torch.autograd.grad(out.sum(), [tensors[i] for i in leaves])]

        want = run(given)
        for axis in range(3):
            moved = [far(x, axis) if axis < x.ndim else x for x in given]
            for x, y in zip(run(moved), want, strict=True):  # torch's products round as they like
                assert torch.allclose(x, y, rtol=1e-5, atol=1e-5), f"{name}, axis {axis}"


def test_a_table_of_many_rows(variant):
    """Only its last six are in memory; the rows before are zeros, as what lies before `first`."""
    rows = reserved((FAR, 4), np.float32)
    rows[-6:] = P
    want = wavepe.attention(Q, K, K, p=P, first=1)
    assert_same_bits(wavepe.attention(Q, K, K, p=rows, first=7 - FAR), want)
    bias = wavepe.relative_bias(Q, P, 5, first=1)
    assert_same_bits(wavepe.relative_bias(Q, rows, 5, first=7 - FAR), bias)
    torch, ops = load_torch()
    q, k, p = (torch.from_numpy(x) for x in (Q[None], K[None], rows))
    assert_same_bits(ops.attention(q, k, k, p=p, first=7 - FAR)[0].numpy(), want)
    assert_same_bits(ops.relative_bias(q, p, 5, first=7 - FAR)[0].numpy(), bias)


# Each call with a little more memory each time, until it succeeds.
SWEEP = """
import resource, sys
import numpy as np, wavepe

x = np.random.default_rng(0).normal(size=(16000, 64)).astype(np.float32)
cos = x[:, :32].copy()
half, scale = x.astype(np.float16), np.ones(64)
if sys.argv[1] == "numpy":
    calls = {
        "rope": lambda: wavepe.rope(x, cos, cos),
        "rope of itself": lambda: wavepe.rope(x[1:], cos[1:], cos[1:], out=x[:-1]),
        "rope_table": lambda: wavepe.rope_table(np.arange(40000), scale),
        "relative_bias": lambda: wavepe.relative_bias(x[:1500], x[::-1], 1500),
        "wavelet_table": lambda: wavepe.wavelet_table(40000, scale, scale),
        "sinusoidal": lambda: wavepe.sinusoidal(np.arange(40000), 64),
        "attention": lambda: wavepe.attention(x[:200], x, x, p=x),
        "attention float16": lambda: wavepe.attention(half[:200], half, half, p=half),
    }
else:
    import torch
    from wavepe import ops

    torch.set_num_threads(1)
    t, p, of_half, table = (torch.from_numpy(a) for a in (x, x, half, cos))
    q, k, scale = t[None, None, :200], t[None, None], torch.from_numpy(scale)

    def gradients(function, *leaves):
        leaves = [x.clone().requires_grad_() for x in leaves]
        return torch.autograd.grad(function(*leaves).sum(), leaves)

    calls = {
        "rope": lambda: ops.rope(t, table, table),
        "rope_table": lambda: ops.rope_table(torch.arange(40000), scale),
        "relative_bias": lambda: ops.relative_bias(t[:1500], p, 1500),
        "relative_bias'": lambda: gradients(lambda *a: ops.relative_bias(*a, 1500), t[:1500], p),
        "wavelet_table": lambda: ops.wavelet_table(40000, scale, scale),
        "wavelet_table'": lambda: gradients(lambda *a: ops.wavelet_table(40000, *a), scale, scale),
        "attention": lambda: ops.attention(q, k, k, p=p),
        "attention'": lambda: gradients(lambda *a: ops.attention(*a[:3], p=a[3]), q, k, k, p),
        "bias'": lambda: gradients(lambda *a: ops.attention(*a[:3], bias=a[3]), q, k, k, p[:, 0]),
    }
for name, call in calls.items():
    ends = []
    for more in range(16, 30):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**more, resource.RLIM_INFINITY))
        try:
            call()
            ends.append("right")
        except {"numpy": MemoryError, "torch": RuntimeError}[sys.argv[1]]:
            ends.append("refused")
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    print(name, ends[0], ends[-1], sep=": ")
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="ASan maps terabytes")
@pytest.mark.parametrize("side", ["numpy", pytest.param("torch", marks=pytest.mark.slow)])
def test_the_end_of_memory_is_an_error(side):
    if side == "torch":
        load_torch()
    # glibc then keeps no memory of a call for the next one
    lines = output("-c", SWEEP, side, MALLOC_MMAP_THRESHOLD_="65536").splitlines()
    assert len(lines) == {"numpy": 8, "torch": 9}[side]
    assert [line for line in lines if not line.endswith(": refused: right")] == []
