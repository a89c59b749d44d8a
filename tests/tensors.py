"""Helpers of the tests of torch's operators: random tensors, layouts, threads, `check_rope`."""

import contextlib
import ctypes
import gc

import numpy as np
import oracle
import pytest
from cases import assert_within, load_torch, turn
from checks import rope_bound

torch, _ = load_torch()

WIDE = {torch.float32: np.float32, torch.float64: np.float64}
LOW = {torch.bfloat16: (8, 2.0**-133), torch.float16: (11, 2.0**-24)}  # bits, smallest number
FLOATS = (*WIDE, *LOW)

# torch's own: when it first loads the decompositions of forward mode, and when Dynamo tries
of_transforms = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),  # 2.10
]


def table(rng, *shape, dtype=torch.float32):
    return tuple(torch.from_numpy(a).to(dtype) for a in turn(rng, shape, np.float64))


def normal(rng, *shape, dtype=torch.float32):
    values = torch.from_numpy(np.asarray(rng.normal(size=shape))).to(dtype)
    return values if values.numel() else torch.empty(shape, dtype=dtype)  # NumPy's strides are 0


def arrays(*tensors):
    """Return the values in float64."""
    return tuple(t.detach().double().numpy() for t in tensors)


def wide(dtype):
    """Return the NumPy dtype of the computation."""
    return WIDE.get(dtype, np.float32)


def rounded(exact, bound, dtype):
    """Return the bound; for low precision, add twice the error of rounding the exact result."""
    if dtype not in LOW:
        return exact, bound
    bits, smallest = LOW[dtype]
    step = np.maximum(np.ldexp(1.0, np.frexp(np.nan_to_num(exact))[1] - bits), smallest)
    return exact, bound + step * (bound != 0)


def judge_rope(x, cos, sin, interleaved=False, inverse=False):
    """Return the rotated x and its bound.

    cos and sin are read as float32 (float64 for float64 x); (B, L, h) tables serve every head.
    """
    kind = wide(x.dtype)
    (x64,) = arrays(x)
    cos, sin = (t.astype(kind) for t in arrays(cos, sin))
    cos, sin = (t[:, None] if t.ndim == 3 else t for t in (cos, sin))
    exact = oracle.rope(x64, cos, sin, interleaved, inverse)
    with np.errstate(invalid="ignore"):
        bound = rope_bound(x64, cos, np.negative(sin) if inverse else sin, interleaved, kind)
    return rounded(exact, bound, x.dtype)


def check_rope(got, x, cos, sin, interleaved=False, inverse=False, what=""):
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    exact = judge_rope(x, cos, sin, interleaved, inverse)
    assert_within(*arrays(got), *exact, f"{x.dtype}{tuple(x.shape)} {what}")


# Functions that return the same values in another memory layout; the tensor needs two axes or more.
# Those of the second table repeat values with stride 0.
LAYOUTS = {
    "first axes swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "heads last": lambda x: (
        x.transpose(-2, -3).contiguous().transpose(-2, -3) if x.dim() > 2 else x
    ),
    "columns": lambda x: x.mT.contiguous().mT,
    "first axis inside": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "last axis outside": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "rows apart": lambda x: x.repeat_interleave(3, -2)[..., ::3, :],
    "offset": lambda x: torch.cat([x.new_ones(1), x.flatten()])[1:].view(x.shape),
    "part of a wider": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}
REPEATED = {
    "expanded": lambda x: x[:1].expand(x.shape),
    "one number": lambda x: x[(slice(1),) * x.dim()].expand(x.shape),
}
OF_ONE_AXIS = ("every second", "offset", "part of a wider", *REPEATED)


def laid_out(x, tables=(LAYOUTS, REPEATED)):
    """Yield (name, x) in every layout."""
    for table in tables:
        for name, lay in table.items():
            if x.dim() > 1 or (x.dim() == 1 and name in OF_ONE_AXIS):
                yield name, lay(x)


@contextlib.contextmanager
def threads(count):
    """Use this number of torch's threads in a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Heap(ctypes.Structure):
    """`mallinfo2` of the GNU C library."""

    _fields_ = [(f"unused{i}", ctypes.c_size_t) for i in range(7)]
    _fields_ += [(name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")]


def assert_keeps_no_memory(call, count=100):
    """Assert that calls leave nothing on the heap; skip without the GNU C library."""
    heap = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if heap is None:
        pytest.skip("needs mallinfo2 of glibc 2.33")
    heap.restype = _Heap
    kept = []
    with threads(1):
        for _ in range(20):  # the first calls fill caches, here and in torch
            call()
        for _ in range(3):
            before = heap().uordblks
            for _ in range(count):
                call()
            gc.collect()
            kept.append((heap().uordblks - before) / count)
            if kept[-1] < 16:
                break
    assert min(kept) < 16, f"each call keeps {min(kept):.0f} bytes"  # the least allocation: 24


def assert_threads_agree(call, *counts):
    """Assert that `call` returns the same bits with one thread and with several."""
    with threads(1):
        want = call()
    for count in counts:
        with threads(count):
            for number, (a, b) in enumerate(zip(call(), want, strict=True)):
                assert torch.equal(a, b), f"{count} threads, result {number}"
