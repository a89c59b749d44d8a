"""Compare the arrays of an operator to the oracle, within bounds."""

import numpy as np
import oracle
from cases import BOUNDS, assert_within, psi_bound, ulp, unit


def rope_bound(x, cos, sin, interleaved, dtype):
    """Return the allowed error, which is 0 for elements that are only copied.

    float16 is computed in float32; then it may have twice the error of one rounding.
    """
    dtype = np.dtype(dtype)
    wide = np.result_type(cos, sin).itemsize > max(dtype.itemsize, 4)
    bound = BOUNDS["rope_wide_table" if wide else "rope"]
    terms = oracle.rope_terms(x, cos, sin, interleaved)
    size = bound.units * unit(np.float32 if dtype == np.float16 else dtype) * terms
    tiny = 3 * float(np.finfo(dtype).smallest_subnormal) * (terms > 0)
    if dtype == np.float16:
        size = size + ulp(oracle.rope(x, cos, sin, interleaved), dtype) * (terms > 0)
    return size + tiny


def check_rope(got, x, cos, sin, interleaved=False, inverse=False, what=""):
    exact = oracle.rope(x, cos, sin, interleaved, inverse)
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    bound = rope_bound(x, cos, np.negative(sin) if inverse else sin, interleaved, x.dtype)
    assert_within(got, exact, bound, f"{x.dtype}{x.shape} table {cos.dtype}{cos.shape} {what}")


def check_rope_table(got, want, dtype=np.float32, ulps=BOUNDS["rope_table"].units / 2, what=""):
    assert isinstance(got, tuple)
    assert len(got) == 2
    for name, a, b in zip(("cos", "sin"), got, want, strict=True):
        assert a.dtype == dtype
        assert_within(a, b, ulps * ulp(b, dtype), f"{name} {what}")


def flushed(x):
    """Replace subnormals by zero, as the kernel does."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, 0, x)


def check_relative_bias(got, q, p, keys, first=0, beyond="zero", what=""):
    q, p = flushed(np.asarray(q)), flushed(np.asarray(p))
    exact = oracle.relative_bias(q, p, keys, first, beyond)
    terms = oracle.relative_bias(np.abs(q), np.abs(p), keys, first, beyond)
    assert got.dtype == q.dtype
    bound = BOUNDS["relative_bias"].units * (q.shape[-1] + 1) * unit(q.dtype) * terms
    bound = bound + q.shape[-1] * float(np.finfo(q.dtype).tiny)  # each sum may be flushed too
    what = f"q {q.dtype}{q.shape} p {p.shape} keys={keys} first={first} {beyond} {what}"
    assert_within(got, exact, bound, what)


def judge_wavelet_table(offsets, scale, shift, kind, mirrored, dtype):
    """Return the exact table and the bound of one that is computed in float64 and rounded once."""
    exact = oracle.wavelet_table(offsets, scale, shift, kind, mirrored)
    t = np.array(range(offsets) if isinstance(offsets, int) else [int(o) for o in offsets], float)
    flip = (kind == "haar") if mirrored is None else mirrored
    bound = psi_bound(kind, ((-t if flip else t)[:, None] - shift) / scale, np.float64)
    return exact, bound if dtype == np.float64 else bound + ulp(exact, dtype) / 2


def check_wavelet_table(got, *table):
    assert got.dtype == table[-1]
    assert_within(got, *judge_wavelet_table(*table), f"{table[3:]}")
