"""Subnormal numbers: attention and relative_bias count them as zero, and leave the mode of the
caller's arithmetic as it was; tables of wavelets and angles, and rope, are exact.

Subnormal entries meet huge ones here, so that those which are not counted as zero show.
"""

import contextlib
import ctypes
import ctypes.util
import itertools
import platform

import numpy as np
import pytest
import wavepe
from cases import HAS_TORCH, assert_same_bits, generator, load_torch, not_emulated, using
from processes import forked, output
from variants import all_of_them

pytestmark = not_emulated
each_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@pytest.fixture(params=all_of_them())
def each_variant(request):
    with using(request.param):
        yield request.param


# A subnormal number, and what makes 1/32 of it.
SUBNORMAL = {np.float32: 2.0**-127, np.float64: 2.0**-1023}
HUGE = {np.float32: 2.0**122, np.float64: 2.0**1018}


M, N, D = 100, 210, 15  # beside one column more: blocks of queries and of keys are crossed
MEETS = {"q": "kp", "k": "q", "p": "q", "v": "g", "g": "v", "qkvpg": ""}


def inputs(dtype, where, m=M):
    """q, k, v, p and the gradient of the result, with subnormal numbers in `where`; and with zeros
    in their place. In one column they are subnormal throughout, and huge what it is multiplied
    with."""
    rng, given, zero = generator("flush"), {}, {}
    shapes = {"q": (2, 4, m, D), "k": (2, 2, N, D), "v": (2, 2, N, 8), "p": (N, D)}
    for name, shape in (shapes | {"g": (2, 4, m, 8)}).items():
        x, tiny = rng.normal(size=shape).astype(dtype), rng.random(shape) < 0.3
        of_sign = (rng.choice([-1, 1], shape) * SUBNORMAL[dtype]).astype(dtype)
        column = HUGE[dtype] if name in MEETS[where] else 0.0
        zero[name] = with_column(np.where(tiny, dtype(0), x), column)
        subnormal = SUBNORMAL[dtype] if name == where else column
        spoilt = with_column(np.where(tiny, of_sign, x), subnormal)
        given[name] = spoilt if name in where else zero[name]
    return given, zero


def with_column(x, value):
    """Append a column of one value to x."""
    return np.concatenate([x, np.full((*x.shape[:-1], 1), value, x.dtype)], -1)


def same(got, want):
    for x, y in zip(map(np.asarray, got), map(np.asarray, want), strict=True):
        assert_same_bits(x, y)
        assert not ((np.abs(x) < np.finfo(x.dtype).tiny) & (x != 0)).any()


def of_numpy(x):
    yield from wavepe.attention(x["q"], x["k"], x["v"], p=x["p"], return_lse=True)
    yield wavepe.relative_bias(x["q"], x["p"], N)


def of_torch(x):
    torch, ops = load_torch()
    q, k, v, p = (torch.from_numpy(x[name]) for name in "qkvp")
    yield from ops.attention(q, k, v, p=p, return_lse=True)
    yield ops.attention(q, k, v, p=ops.relative_table(p))  # of constants: zones of their own
    yield torch.ops.wavepe.relative_bias(q, p, N)


def of_gradients(x):
    torch, ops = load_torch()
    leaves = [torch.from_numpy(x[name]).requires_grad_() for name in "qkvp"]
    out = ops.attention(*leaves[:3], p=leaves[3])
    return torch.autograd.grad(out, leaves, torch.from_numpy(x["g"]))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("results", "where"),
    [
        *((f, where) for f in (of_numpy, of_torch) for where in ("q", "k", "v", "p", "qkvpg")),
        *((of_gradients, where) for where in MEETS),
    ],
)
@each_dtype
def test_they_count_as_zero(each_variant, small_pieces, dtype, results, where, threads):
    if results is of_numpy:
        wavepe.set_num_threads(threads)
        limited = contextlib.nullcontext()
    else:
        load_torch()
        from tensors import threads as torch_threads

        limited = torch_threads(threads)
    with limited:
        for m in (M,) if results is of_gradients else (M, 1):
            same(*(list(results(x)) for x in inputs(dtype, where, m)))


@each_dtype
@pytest.mark.parametrize("where", "qkpvg")
def test_the_inputs_tell(dtype, where):
    """NumPy does not flush, so in its products the subnormal numbers count."""
    given, zero = inputs(dtype, where)
    for other in MEETS[where]:
        product = given[where][..., -1].max() * given[other][..., -1].max()
        assert product == 1 / 32
        assert not zero[where][..., -1].any()


@pytest.mark.parametrize("m", [1, 3])
@each_dtype
def test_results_of_normal_numbers(each_variant, dtype, m):
    """The smallest normal number times a weight below 1, or 1/2."""
    tiny = np.finfo(dtype).tiny
    q, k, v = np.ones((m, 1), dtype), np.array([[0], [-1]], dtype), np.array([[0], [tiny]], dtype)
    assert not wavepe.attention(q, k, v, causal=False).any()
    assert wavepe.attention(q, -60 * k, v, causal=False).all()  # weight 1
    assert not wavepe.relative_bias(tiny * q, q / 2, 1).any()
    assert wavepe.relative_bias(2 * tiny * q, q / 2, 1).any()
    if not HAS_TORCH:
        return
    torch, ops = load_torch()
    q, k, v = (torch.from_numpy(x)[None, None] for x in (q, k, v))
    assert not ops.attention(q, k, v, causal=False).any()
    assert not torch.ops.wavepe.relative_bias(tiny * q, q[0, 0] / 2, 1).any()
    v.requires_grad_()
    ops.attention(q[:, :, :1], k, v, causal=False).sum().mul(tiny).backward()
    assert not v.grad.any()


@pytest.mark.parametrize("m", [1, 3])
@each_dtype
def test_bias(each_variant, dtype, m):
    """The lse of a single key is its score; the bias's gradient by it is what comes in."""
    tiny = np.finfo(dtype).tiny
    q, k = np.zeros((m, 1), dtype), np.zeros((1, 1), dtype)
    options = {"bias_beyond": "edge", "causal": False, "return_lse": True}
    for value, want in ((tiny, tiny), (tiny / 2, 0), (-tiny / 4, 0)):
        _, lse = wavepe.attention(q, k, k, bias=np.array([value], dtype), **options)
        assert (lse == want).all()
    if not HAS_TORCH:
        return
    torch, ops = load_torch()
    q, k, bias = (torch.from_numpy(x) for x in (q[None, None], k[None, None], np.ones(1, dtype)))
    _, lse = ops.attention(q, k, k, bias=bias.requires_grad_(), **options)
    for value, want in ((tiny, m * tiny), (tiny / 2, 0)):
        (grad,) = torch.autograd.grad(lse, bias, torch.full_like(lse, value), retain_graph=True)
        assert grad == want


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
@pytest.mark.parametrize("m", [1, 3])
def test_sixteen_bits(each_variant, storage, m):
    """Subnormal float16 are normal in float32, where they are computed with: they stay. Those of
    bfloat16 are subnormal in float32, too: zero."""
    torch, ops = load_torch()
    dtype = getattr(torch, storage)
    bits = torch.arange(1, 128, dtype=torch.int16)  # subnormal numbers of either type
    v = torch.stack([bits, bits + -(2**15)]).view(dtype)
    assert (v != 0).all()
    assert (v.abs() < torch.finfo(dtype).tiny).all()
    q, k = torch.ones(1, 1, m, 4, dtype=dtype), torch.ones(1, 1, 1, 4, dtype=dtype)
    out = ops.attention(q, k, v.reshape(1, 1, 1, -1), causal=False)
    want = v if storage == "float16" else torch.zeros_like(v)
    assert (out == want.reshape(1, 1, 1, -1)).all()
    q = v.reshape(1, 1, -1, 1).expand(1, 1, 2 * 127, 4)
    _, lse = ops.attention(q, q[:, :, :1] * 0 + 1, q[:, :, :1], causal=False, return_lse=True)
    want = q.float().sum(-1) / 2 if storage == "float16" else torch.zeros(1, 1, 2 * 127)
    assert torch.equal(lse, want)


# ---- what stays exact ----------------------------------------------------------------------------
@each_dtype
def test_tables_and_rope_keep_subnormals(each_variant, dtype):
    tiny = np.finfo(dtype).tiny
    table = wavepe.wavelet_table(2000, *wavepe.wavelet_grid(32), kind="gaussian", dtype=dtype)
    assert ((table != 0) & (np.abs(table) < tiny)).any() or dtype == np.float64  # exp ends before
    x = np.arange(-64, 64, dtype=dtype)[:, None] * np.finfo(dtype).smallest_subnormal * np.ones(64)
    x = x.astype(dtype)
    half, zero = np.full((128, 32), 0.5, dtype), np.zeros((128, 32), dtype)
    assert np.array_equal(wavepe.rope(2 * x, half, zero), x)
    turned = np.concatenate([-x[:, 32:], x[:, :32]], -1)
    assert np.array_equal(wavepe.rope(x, zero, 2 * half), turned)
    factor = float(tiny) / 8
    cos, _ = wavepe.rope_table(np.arange(9), np.zeros(5), attention_factor=factor, dtype=dtype)
    assert (cos == dtype(factor)).all()
    if HAS_TORCH:
        torch, ops = load_torch()
        scale, shift = map(torch.from_numpy, wavepe.wavelet_grid(32))
        kind = torch.from_numpy(x).dtype
        got = ops.wavelet_table(2000, scale.to(kind), shift.to(kind), kind="gaussian")
        assert_same_bits(got, table)
        tensors = (torch.from_numpy(y) for y in (2 * x, half, zero))
        assert np.array_equal(ops.rope(*tensors), x)


# ---- the caller's mode ---------------------------------------------------------------------------

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads glibc's fenv_t")
LIBM = ctypes.CDLL(ctypes.util.find_library("m"))
X86 = platform.machine() in ("x86_64", "AMD64")
UPWARD, DIVISION, INEXACT = (0x800, 4, 32) if X86 else (0x400000, 2, 16)


def control():
    """Return the rounding mode, the traps and the flush mode of this thread."""
    words = (ctypes.c_uint32 * 16)()
    assert LIBM.fegetenv(words) == 0
    return words[7] & ~0x3F if X86 else words[0]  # x86: of SSE, without the flags


@contextlib.contextmanager
def mode(rounding, flush):
    """Use a mode of arithmetic in a block, and then the earlier one again."""
    before, words = (ctypes.c_uint32 * 16)(), (ctypes.c_uint32 * 16)()
    assert LIBM.fegetenv(before) == LIBM.fegetenv(words) == 0
    if X86:
        words[7] = words[7] & ~0x8040 | (0x8040 if flush else 0)
    else:
        words[0] = words[0] & ~(1 << 24) | (flush << 24)
    try:
        LIBM.fesetenv(words)
        LIBM.fesetround(rounding)
        yield
    finally:
        LIBM.fesetenv(before)


def flags():
    """The exceptions raised, but for inexact: Python's own arithmetic raises it."""
    return LIBM.fetestexcept(0x1F if X86 else 0x0F)


def calls():
    """Calls that run with subnormals flushed: those that end well, those that compute gradients,
    and calls that end with an error."""
    x = np.full((2, 3, 40), 1e38, np.float32)  # whose products overflow: flags would be raised
    k = np.where(np.arange(40) % 3, x, np.float32(np.inf))
    many = np.broadcast_to(np.float32(1), (1, 2**44))
    good = [
        lambda: wavepe.attention(x, k, k, p=x[0]),
        lambda: wavepe.attention(x[:, :1], k, k, p=x[0]),
        lambda: wavepe.relative_bias(x, k[0], 5),
    ]
    bad = [
        lambda: wavepe.attention(x, x[..., :3], x),
        lambda: wavepe.attention(many, many, many),
        lambda: wavepe.relative_bias(many, many, 3),
    ]
    if not HAS_TORCH:
        return good, [], bad
    torch, ops = load_torch()
    q, k_ = torch.from_numpy(x)[None], torch.from_numpy(k)[None]
    wide = torch.ones(()).expand(many.shape)
    table = ops.relative_table(x[0])

    def gradients():
        leaf = q.clone().requires_grad_()
        ops.attention(leaf, k_, k_, p=leaf[0, 0]).sum().backward()

    good += [
        lambda: ops.attention(q, k_, k_, p=q[0, 0]),
        lambda: ops.attention(q[:, :, :1], k_, k_, p=table),
        lambda: ops.relative_bias(q, k_[0, 0], 5),
    ]
    bad += [
        lambda: ops.attention(q, k_[..., :3], k_),
        lambda: ops.attention(wide[None, None], wide[None, None], wide[None, None]),
        lambda: ops.relative_bias(wide, wide, 3),
    ]
    return good, [gradients], bad


@glibc
def test_the_mode_is_left_alone(each_variant):
    """Rounding, traps and flushing, by a caller who rounds upward or flushes, and after errors."""
    good, gradients, bad = calls()
    for rounding, flush in itertools.product((0, UPWARD), (False, True)):
        for call in (*good, *gradients, *bad):
            with mode(rounding, flush):
                before = control()
                with contextlib.suppress(ValueError, MemoryError, RuntimeError):
                    call()
                after = control()
            assert after == before
    for call in bad:
        with pytest.raises((ValueError, MemoryError, RuntimeError)):
            call()


@glibc
def test_flags_of_exceptions_are_left_alone(each_variant):
    good, _, _ = calls()
    for call in good:
        LIBM.feclearexcept(flags() | INEXACT)
        call()
        assert flags() == 0
        LIBM.feraiseexcept(DIVISION)
        call()
        assert flags() == DIVISION
        LIBM.feclearexcept(DIVISION)


OF_THE_CALLER = """
import sys
import torch, wavepe
from wavepe import ops

flush = sys.argv[1] == "True"
numbers = torch.full((1 << 18,), 1e-40)
x = torch.ones(8, 4, 200, 16)
leaf = x.clone().requires_grad_()

def lost():  # which products of subnormal numbers are zero: of this thread, and of all of torch's
    return (numbers[:4] * 1 == 0).tolist(), (numbers * 1 == 0).numpy().tobytes()

def run():
    ops.attention(leaf, x, x, p=x[0, 0]).sum().backward()
    ops.attention(x[:, :, :1], x, x, p=x[0, 0])
    ops.attention(x, x, x, p=ops.relative_table(x[0, 0]))
    ops.relative_bias(x, x[0], 200)
    wavepe.attention(x.numpy(), x.numpy(), x.numpy(), p=x[0, 0].numpy())
    wavepe.relative_bias(x.numpy(), x[0, 0].numpy(), 200)
    for bad in (lambda: ops.attention(x, x[..., :3], x), lambda: wavepe.relative_bias(x, x[0], -1)):
        try:
            bad()
        except (RuntimeError, ValueError):
            continue
        raise AssertionError

for threads in (1, 3):
    torch.set_num_threads(threads)
    wavepe.set_num_threads(threads)
    numbers * 1  # starts the threads
    assert torch.set_flush_denormal(flush)
    before = lost()
    assert before[0] == [flush] * 4, before[0]
    for name in wavepe.variants():
        wavepe.use_variant(name)
        run()
        assert lost() == before, (threads, name)
print("as before")
"""


@pytest.mark.parametrize("flush", [False, True])
def test_a_caller_who_flushes_or_not(flush, torch):
    """And torch's own threads."""
    assert output("-c", OF_THE_CALLER, flush, start=forked) == "as before\n"
