"""Helpers of the kernel tests: sizes, layouts, error bounds with their reasons, and guards.

A guard is known memory around an output, which no kernel may change.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import math
import os
import shlex
import sysconfig
from typing import NamedTuple

import numpy as np
import pytest
import wavepe
from wavepe.arrays import wavelet_registered
from wavepe.encodings import base, register

# Sizes around every block size of a kernel: 2, 4, 8, 16, 32 and 64 lanes, one less, one more, and
# odd tails.
SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97)

# Memory layouts of an input. "unaligned" is off by one byte.
LAYOUTS = ("contiguous", "sliced", "negative", "zero", "fortran", "offset", "unaligned")
OUT_LAYOUTS = ("contiguous", "sliced", "negative", "fortran", "offset")

INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)


class Bound(NamedTuple):
    """A bound of `units` unit roundoffs (half an ulp of 1), times a size that `reason` explains."""

    units: float
    reason: str


BOUNDS = {
    "ricker": Bound(
        6, "of (1 + u^2)^2 exp(-u^2/2): quotient, square, exp and 1 - u^2 round once each"
    ),
    "gaussian": Bound(
        5, "of (1 + u^2) exp(-u^2): quotient and square round once each, exp to one ulp"
    ),
    "morlet": Bound(8, "of (1 + u^2) exp(-u^2): as gaussian, and a cosine to one ulp"),
    "haar": Bound(0, "jumps only: the value is exact"),
    "relative_bias": Bound(1, "of (d + 1) sum abs(q p): any order of adding d products"),
    "rope": Bound(
        2, "of abs(a cos) + abs(b sin): two products and their difference round once each"
    ),
    "rope_wide_table": Bound(3, "as rope, and cos and sin of more bits than x are rounded first"),
    "rope_table": Bound(2, "of the result: one ulp, near zeros of cos and sin too"),
    "rope_frequencies": Bound(2, "of (1 + abs(log w)) w: the exponent rounds, then the power"),
    "sinusoidal": Bound(4, "of 1 + abs(angle): frequency and angle round, then sine to one ulp"),
    "alibi_slopes": Bound(
        16, "of the slope: the exponent, at most 8 log 2, rounds, then the power"
    ),
}

UNIT = {
    np.dtype(np.float16): 2.0**-11,
    np.dtype(np.float32): 2.0**-24,
    np.dtype(np.float64): 2.0**-53,
}


def unit(dtype):
    """Return the unit roundoff; for float64 twice that, because the oracle rounds as well."""
    dtype = np.dtype(dtype)
    return UNIT[dtype] * (2 if dtype == np.float64 else 1)


def ulp(values, dtype):
    """Return the distance of neighbours in `dtype` at each float64 value, subnormals too."""
    info = np.finfo(dtype)
    values = np.asarray(values, np.float64)
    exponent = np.where(values == 0, info.minexp, np.frexp(values)[1])
    return np.ldexp(1.0, np.maximum(exponent - info.nmant - 1, info.minexp - info.nmant))


def psi_bound(kind, u, dtype):
    """Return the allowed error of psi(u) in `dtype`.

    float16 is computed in float32; then it may have twice the error of one rounding.
    """
    dtype = np.dtype(dtype)
    work = np.dtype(np.float32) if dtype == np.float16 else dtype
    u2 = np.minimum(np.square(np.asarray(u, np.float64)), 1e4)
    if kind == "ricker":
        size = np.square(1 + u2) * np.exp(-u2 / 2)
    elif kind == "haar":
        size = np.zeros_like(u2)
    else:
        size = (1 + u2) * np.exp(-u2)
    bound = BOUNDS[kind].units * unit(work) * size
    if kind != "haar":  # exp drops subnormal and slightly larger results, before the factor
        dropped = math.exp(-708) if work == np.float64 else float(np.finfo(work).tiny)
        bound = bound + dropped * (1 + u2 if kind == "ricker" else 1)
    if dtype == np.float16 and kind != "haar":
        bound = bound + ulp(size, dtype)
    return bound


def assert_within(got, exact, bound, what=""):
    """Assert abs(got - exact) <= bound elementwise; NaN and infinities must be equal."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    assert got.shape == exact.shape, f"{what}: shape {got.shape}, expected {exact.shape}"
    with np.errstate(all="ignore"):
        good = (np.abs(got - exact) <= bound) | (got == exact) | (np.isnan(got) & np.isnan(exact))
    if not good.all():
        at = tuple(int(i) for i in np.argwhere(~good)[0])
        allowed = float(np.broadcast_to(bound, got.shape)[at])
        error = float(abs(got[at] - exact[at]))
        raise AssertionError(
            f"{what}: {int((~good).sum())} of {good.size} wrong, first at {at}: got {got[at]!r}, "
            f"exact {exact[at]!r}, error {error:.3g}, allowed {allowed:.3g}"
        )


def assert_same_bits(a, b, what=""):
    """Assert equal dtype, shape and bits; all NaNs are equal."""
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape), what
    bits = np.dtype(f"u{a.dtype.itemsize}")
    same = (np.ascontiguousarray(a).view(bits) == np.ascontiguousarray(b).view(bits)) | (
        np.isnan(a) & np.isnan(b)
    )
    assert same.all(), f"{what}: {int((~same).sum())} of {same.size} differ in their bits"


EMULATED = bool(os.environ.get("WAVEPE_TEST_EMULATED"))
HAS_TORCH = bool(wavepe.build_info()["torch"]) and importlib.util.find_spec("torch") is not None
not_emulated = pytest.mark.skipif(EMULATED, reason="holds of the CPU's own kernels only")


def assert_agrees(got, want, what=""):
    """Assert that a tensor agrees with an array, to the bit if one kernel makes both."""
    if not EMULATED:
        return assert_same_bits(got, want, what)
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    largest = np.abs(want[np.isfinite(want)]).max(initial=0)
    tolerance = 16 * np.finfo(want.dtype).eps * largest  # sums of 97 products in another order
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance, err_msg=what)


def lay_out(values, layout):
    """Return the same values in another memory layout.

    "zero" repeats the first entry of axis 0 with stride 0.
    """
    values = np.asarray(values)
    if layout == "contiguous" or values.ndim == 0:
        return np.ascontiguousarray(values)
    if layout == "fortran":
        return np.asfortranarray(values)
    if layout == "zero":
        return np.broadcast_to(values[:1].copy(), values.shape) if len(values) else values.copy()
    if layout == "sliced":
        wide = np.full(tuple(2 * n + 1 for n in values.shape), 1, values.dtype)
        view = wide[tuple(slice(1, 1 + 2 * n, 2) for n in values.shape)]
    elif layout == "negative":
        view = np.empty_like(values, order="C")[(slice(None, None, -1),) * values.ndim]
    else:
        byte = 1 if layout == "unaligned" else values.dtype.itemsize
        raw = np.zeros(values.nbytes + byte, np.uint8)
        view = raw[byte:].view(values.dtype).reshape(values.shape)
    view[...] = values
    return view


class Guard:
    """An array `out` inside a larger buffer of a known byte.

    `check` finds any write outside the elements of `out`.
    """

    BYTE = 0xA5
    MARGIN = 512

    def __init__(self, shape, dtype, layout="contiguous"):
        dtype = np.dtype(dtype)
        step = 2 if layout == "sliced" else 1
        axes = range(len(shape)) if layout == "fortran" else reversed(range(len(shape)))
        strides, size = [0] * len(shape), dtype.itemsize
        for axis in axes:
            strides[axis] = size * step
            size *= max(1, shape[axis] * step)
        start = self.MARGIN + (dtype.itemsize if layout == "offset" else 0)
        self._bytes = np.full(size + start + self.MARGIN, self.BYTE, np.uint8)
        free = np.ones(self._bytes.shape, bool)
        as_strided = np.lib.stride_tricks.as_strided
        as_strided(free[start:], (*shape, dtype.itemsize), (*strides, 1))[...] = False
        self._free = free
        out = np.ndarray(shape, dtype, self._bytes, start, strides)
        self.out = out[(slice(None, None, -1),) * len(shape)] if layout == "negative" else out

    def check(self, what=""):
        hit = np.flatnonzero(self._free & (self._bytes != self.BYTE))
        assert not len(hit), (
            f"{what}: {len(hit)} bytes beside the output were written, first {hit[0]}"
        )


@contextlib.contextmanager
def using(name):
    """Use the named variant in a block, and then the earlier one again."""
    before = wavepe.variant()
    wavepe.use_variant(name)
    try:
        yield name
    finally:
        wavepe.use_variant(before)


def forget_registrations(monkeypatch):
    """Forget wavelets and encodings that are registered from now on, when the test ends."""
    monkeypatch.setattr(wavelet_registered, "_known", {})
    kept = dict(base.known)
    for module in (base, register):
        monkeypatch.setattr(module, "known", kept)


def generator(*key):
    """Return a random generator that depends on the arguments alone.

    It does not use Python's hash, which changes from run to run.
    """
    text = repr([str(k) for k in key])
    return np.random.default_rng(list(hashlib.sha256(text.encode()).digest()))


def wavelets(d=128, w=2048, scales=8, first=0, dtype=np.float64, **options):
    offsets = np.arange(first, first + w)
    return wavepe.wavelet_table(offsets, *wavepe.wavelet_grid(d, scales), dtype=dtype, **options)


def turn(rng, shape, dtype=np.float32):
    """Return cos and sin of random angles: a rotary table of any shape."""
    angle = rng.uniform(-math.pi, math.pi, shape)
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


def load_torch():
    """Return (torch, wavepe.ops), or skip the module without torch or its operators."""
    torch = pytest.importorskip("torch")
    if not HAS_TORCH:
        pytest.skip("wavepe was built without torch", allow_module_level=True)
    return torch, importlib.import_module("wavepe.ops")


def compiler(variable="CC"):
    """Return the command that compiles C, or C++ (CXX), as a list."""
    known = {"CC": "cc", "CXX": "c++"}[variable]
    return shlex.split(os.environ.get(variable) or sysconfig.get_config_var(variable) or known)


def recording_backend():
    """Return a backend of torch.compile that traces autograd and keeps the `.graphs`.

    It runs the graphs eagerly.
    """
    testing = importlib.import_module("torch._dynamo.testing")
    importlib.import_module("torch._dynamo").reset()
    return testing.CompileCounterWithBackend("aot_eager")


def compiled_once(backend):
    """Return whether one graph served all lengths; empty graphs of Dynamo do not count."""
    return sum(any(n.op == "call_function" for n in g.graph.nodes) for g in backend.graphs) == 1


def soon(values, *chosen):
    """Parameters of a test; without --all those chosen alone. A tuple has the values of several."""
    slow = pytest.mark.slow
    return [
        x if x in chosen else pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=slow)
        for x in values
    ]


def every(step, values, turn=0):
    """The same; without --all every `step`-th one alone, from number `turn` on.

    Tests of one file have other turns, so that each value is in some of them.
    """
    return soon(values, *list(values)[turn % step :: step])


def by_turns(options, values, step=None):
    """Parameters: each option with one of the values, by turns, or with every `step`-th one; with
    the others for --all."""
    return [
        each
        for i, option in enumerate(options)
        for each in every(step or len(values), [(option, value) for value in values], i)
    ]


def needs(name):
    """Import a package that `make test` alone does not bring, or skip."""
    return pytest.importorskip(name, reason=f"needs {name.partition('.')[0]}: make extras")
