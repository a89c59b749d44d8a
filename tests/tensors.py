"""Helpers of the tests of torch's operators: random tensors, layouts, threads, `check_rope`."""

import contextlib
import itertools

import numpy as np
import oracle
import pytest
from cases import assert_within, load_torch, turn
from checks import rope_bound

torch, _ = load_torch()

FORMS = list(itertools.product((False, True), repeat=2))
each_form = pytest.mark.parametrize(("interleaved", "inverse"), FORMS)
LOW = {torch.bfloat16: 8, torch.float16: 11}


def table(rng, *shape, dtype=torch.float32):
    return tuple(torch.from_numpy(a).to(dtype) for a in turn(rng, shape, np.float64))


def normal(rng, *shape, dtype=torch.float32):
    return torch.from_numpy(rng.normal(size=shape)).to(dtype)


def numbers(*tensors):
    return tuple(t.detach().double().numpy() for t in tensors)


def check_rope(got, x, cos, sin, interleaved=False, inverse=False, what=""):
    """cos and sin are read as float32 (float64 for float64 x); (B, L, h) tables serve every
    head."""
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = numbers(cos.to(wide), sin.to(wide))
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    got, x64 = numbers(got, x)
    exact = oracle.rope(x64, cos, sin, interleaved, inverse)
    kind = np.float64 if wide == torch.float64 else np.float32
    bound = rope_bound(x64, cos.astype(kind), sin.astype(kind), interleaved, kind)
    if x.dtype in LOW:
        smallest = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}[x.dtype]
        spacing = np.maximum(np.ldexp(1.0, np.frexp(exact)[1] - LOW[x.dtype]), smallest)
        bound = bound + spacing * (bound > 0)  # twice the error of rounding the exact result
    assert_within(got, exact, bound, f"{x.dtype}{tuple(x.shape)} {what}")


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


def laid_out(x, tables=(LAYOUTS, REPEATED)):
    """Yield (name, x) in every layout."""
    for table in tables:
        for name, lay in table.items():
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


def assert_threads_agree(call, *counts):
    """Assert that `call` returns the same bits with one thread and with several."""
    with threads(1):
        want = call()
    for count in counts:
        with threads(count):
            for number, (a, b) in enumerate(zip(call(), want, strict=True)):
                assert torch.equal(a, b), f"{count} threads, result {number}"
