"""Helpers of the tests of wavepe.attention: random arguments, the oracle's results, `check`."""

import functools

import attention_options
import numpy as np
import oracle_attention as oracle
import wavepe
from attention_options import BOUNDS, Shape, rounding
from cases import assert_within, generator, ulp, unit

DECODING = [Shape(2, 4, 2, 1, n, d, dv) for n, d, dv in ((1, 1, 1), (33, 17, 9), (500, 64, 65))]


NAMES = {"p", "first", "beyond", "q_rel", "slopes", "causal", "window", "scale"}
NAMES |= {"bias", "bias_first", "bias_beyond", "sinks"}  # which arrays may have too


OPTIONS = {
    name: option
    for name, option in attention_options.OPTIONS.items()
    if name == "everything" or NAMES.issuperset(option(generator(name), Shape(1, 2, 1, 4, 4, 2, 2)))
}


def wide(dtype):
    """Return the dtype of the computation, which lse and bias have too."""
    return np.float64 if dtype == np.float64 else np.float32


def draw(rng, shape, option="plain", dtype=np.float32):
    """Draw random arguments, by name."""
    s = Shape(*shape)
    q = rng.normal(size=(s.batch, s.heads, s.m, s.d))
    k = rng.normal(size=(s.batch, s.kv_heads, s.n, s.d))
    v = rng.normal(size=(s.batch, s.kv_heads, s.n, s.dv))
    optional = {name: x for name, x in OPTIONS[option](rng, s).items() if name in NAMES}
    given = {"q": q, "k": k, "v": v} | optional
    kinds = dict.fromkeys((*"qkvp", "q_rel"), dtype) | dict.fromkeys(("bias", "sinks"), wide(dtype))
    return given | {name: given[name].astype(of) for name, of in kinds.items() if name in given}


def judge(q, k, v, *, p=None, q_rel=None, slopes=None, bias=None, sinks=None, **options):
    """Return (out, lse) and the sizes of their terms.

    Leading axes broadcast; the last of them is the heads.
    """

    def whole(x, lead):
        return None if x is None else np.broadcast_to(x, (*lead, *x.shape[-2:])).astype(float)

    slopes, sinks = (None if x is None else np.asarray(x)[..., None, None] for x in (slopes, sinks))
    bias = None if bias is None else np.asarray(bias)[..., None, :]
    args = [x for x in (q, p, q_rel, slopes, bias, sinks) if x is not None]
    of_q = np.broadcast_shapes(*(x.shape[:-2] for x in args)) or (1,)
    of_k = np.broadcast_shapes(k.shape[:-2], v.shape[:-2]) or (1,)
    batch = np.broadcast_shapes(of_q[:-1], of_k[:-1])
    heads = of_k[-1] if of_q[-1] == 1 else of_q[-1]
    q, p, q_rel, slopes, bias, sinks = (
        whole(x, (*batch, heads)) for x in (q, p, q_rel, slopes, bias, sinks)
    )
    k, v = (whole(x, (*batch, of_k[-1])) for x in (k, v))
    out, of_out = np.zeros((2, *batch, heads, q.shape[-2], v.shape[-1]))
    lse, of_lse = np.zeros((2, *batch, heads, q.shape[-2]))
    for b in np.ndindex(batch):
        args = {} if p is None else {"p": p[b]}
        args |= {} if q_rel is None else {"q_rel": q_rel[b][None]}
        args |= {} if slopes is None else {"slopes": slopes[b][:, 0, 0]}
        args |= {} if sinks is None else {"sinks": sinks[b][:, 0, 0]}
        args |= {} if bias is None else {"bias": bias[b][:, 0]}
        done = oracle.forward(q[b][None], k[b][None], v[b][None], **args, **options)
        size = oracle.forward_sizes(done, v[b][None])
        out[b], lse[b] = done.out[0], done.lse[0]
        of_out[b], of_lse[b] = size["out"][0], size["lse"][0]
    terms = k.shape[-2]
    return (out, lse), (of_out, of_lse), (terms, terms)


def bound(exact, size, terms, dtype):
    low = np.dtype(dtype).itemsize == 2
    work = np.float32 if low else dtype
    error = rounding(size, unit(work), work, terms)
    if not low:
        return error
    half = ulp(exact, dtype) / 2 if dtype == np.float16 else np.ldexp(0.5, np.frexp(exact)[1] - 8)
    return BOUNDS["low"].units * half + error


def compare(got, exact, dtype, what=""):
    kinds = (dtype, wide(dtype))
    for name, x, value, size, terms, kind in zip(("out", "lse"), got, *exact, kinds, strict=True):
        assert x.dtype == kind, f"{what}: {name} is {x.dtype}"
        whole = x if x.ndim == value.ndim else x[None]  # without axes before the last ones
        found = whole.astype(np.float64)
        assert_within(found, value, bound(value, size, terms, kind), f"{what}: {name}")


def call(args):
    return wavepe.attention(**args, return_lse=True)


def check(args, what=""):
    """Call the function, compare the results to the oracle, and return them."""
    got = call(args)
    compare(got, judge(**args), args["q"].dtype, what)
    return got


@functools.cache
def problem(option, shape, dtype):
    """Return arguments and the oracle's results, which are the same for every variant."""
    args = draw(generator("grid", option), shape, option, dtype)
    return args, judge(**args)
