"""Random calls of the NumPy functions, compared to the oracle.

A target is a class of five functions. `draw` makes the arguments of a call, by name. `judge`
returns the right result, once for all variants. `call` makes the call with the current variant.
`check` compares the result. `spoilt` makes one argument wrong, which must give one of the errors
`refused`.
"""

import math

import cases
import numpy as np
import oracle
import wavepe
from attention_arrays import compare as compare_attention
from attention_arrays import judge as judge_attention
from checks import judge_wavelet_table, rope_bound
from fuzz_draw import (
    NONSENSE,
    chance,
    leading,
    length,
    pick,
    some_layout,
    spoil_rows,
    trailing,
    width,
)

SPECIAL = (math.nan, math.inf, -math.inf)
FAR = 2**24  # positions up to which rope_table promises an ulp


class Function:
    """The base class of the targets of this module."""

    refused = (ValueError, TypeError)
    has_out = True

    def call(self, arguments):
        """Return the result; an `out` of any layout must get the same bits and no other write."""
        args = dict(arguments)
        layout = args.pop("out", None)
        got = self.function(**args)
        if layout:
            guard = cases.Guard(got.shape, got.dtype, layout)
            self.function(**args, out=guard.out)
            guard.check(layout)
            cases.assert_same_bits(guard.out, got, f"out {layout}")
        return got

    def check(self, got, exact, arguments):
        """Assert the dtype, which is asked for or that of the first argument, and the bounds."""
        dtype = arguments["dtype"] if "dtype" in arguments else arguments[self.needed[0]].dtype
        for x, want in zip(got, exact, strict=True) if isinstance(got, tuple) else [(got, exact)]:
            assert x.dtype == dtype, f"{x.dtype}"
            cases.assert_within(x, *want)

    def same(self, one, other, arguments):
        """Assert that AVX2 gives the bits of AVX-512."""
        pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
        for a, b in pairs:
            cases.assert_same_bits(a, b, "another wide variant")

    def spoilt(self, rng, arguments):
        """Replace one argument by nonsense, or by a value that the contract refuses."""
        bad = self.bad(arguments)
        if chance(rng, 0.6):
            name, value = bad[rng.integers(len(bad))]
        else:
            name, value = pick(rng, *self.needed), pick(rng, *NONSENSE)
        return {k: v for k, v in arguments.items() if k != "out"} | {name: value}

    def refuse(self, arguments):
        self.function(**arguments)


def some_out(rng):
    return {"out": pick(rng, *cases.OUT_LAYOUTS)} if chance(rng, 0.5) else {}


# ---- wavelets ------------------------------------------------------------------------------------
class Psi(Function):
    """ricker, gaussian, morlet and haar."""

    needed = ("t", "scale", "shift")

    def function(self, kind, t, scale, shift, **out):
        return getattr(wavepe, kind)(t, scale, shift, **out)

    def draw(self, rng):
        dtype, n = pick(rng, np.float16, np.float32, np.float64), max(length(rng, 300), 1)
        scale = rng.choice([-2.0, 0.3, 1.0, 1.5, 8.0, 128.0], n)
        shift = rng.integers(-20, 20, n) / 2
        t = rng.uniform(-8, 8, n) * scale + shift
        if chance(rng, 0.2):
            pick(rng, t, scale, shift)[rng.integers(n)] = pick(rng, *SPECIAL, 0.0)
        if chance(rng, 0.2):  # a table of its own
            t, shift = t[: max(1, 300 // n), None], shift[:1]
        arrays = {"t": t, "scale": scale, "shift": shift}
        arrays = {name: some_layout(rng, x.astype(dtype)) for name, x in arrays.items()}
        return {"kind": pick(rng, *oracle.KINDS), **arrays, **some_out(rng)}

    def judge(self, a):
        dtype = a["t"].dtype
        with np.errstate(all="ignore"):
            u = (a["t"] - a["shift"]).astype(np.float64) / a["scale"].astype(np.float64)
        exact = oracle.psi(a["kind"], a["t"], a["scale"], a["shift"], dtype)
        return exact, cases.psi_bound(a["kind"], u, dtype)

    def call(self, arguments):
        with np.errstate(all="ignore"):  # as NumPy's own ufuncs warn of NaN
            return super().call(arguments)

    def refuse(self, arguments):
        with np.errstate(all="ignore"):
            super().refuse(arguments)

    def bad(self, a):
        shape = np.broadcast_shapes(a["t"].shape, a["scale"].shape)
        wrong = np.ones((2, shape[-1] + 2))
        return [("out", np.empty(shape, np.int8)), ("out", np.empty(shape[-1] + 2)), ("t", wrong)][
            : 3 if min(shape) > 1 else 1
        ]


class WaveletTable(Function):
    needed = ("offsets", "scale", "shift", "kind")
    function = staticmethod(wavepe.wavelet_table)

    def draw(self, rng):
        dim, w = width(rng), length(rng)
        w = min(w, 4000 // max(dim, 1))
        offsets = w if chance(rng, 0.5) else some_layout(rng, rng.integers(-300, 300, w))
        return {
            "offsets": offsets, "scale": some_layout(rng, rng.uniform(0.5, 99, dim)),
            "shift": some_layout(rng, rng.uniform(-9, 9, dim)), "kind": pick(rng, *oracle.KINDS),
            "mirrored": pick(rng, None, False, True), "dtype": pick(rng, np.float32, np.float64),
            **some_out(rng),
        }  # fmt: skip

    def judge(self, a):
        return judge_wavelet_table(*(a[k] for k in (*self.needed, "mirrored", "dtype")))

    def bad(self, a):
        dim = len(a["scale"])
        return [
            ("offsets", -1),
            ("offsets", 1.5),
            ("offsets", np.ones(3)),
            ("offsets", np.ones((2, 2), int)),
            ("scale", np.ones(dim + 2)),
            ("shift", np.ones((dim, 1))),
            ("kind", "daubechies"),
            ("dtype", np.uint8),
            ("out", np.empty((3, dim + 1), np.float32)),
        ]


# ---- relative bias -------------------------------------------------------------------------------
class RelativeBias(Function):
    needed = ("q", "p", "keys", "first", "beyond")
    function = staticmethod(wavepe.relative_bias)

    def draw(self, rng):
        m, keys, w = length(rng), length(rng), max(length(rng), 1)
        d, dtype = width(rng), pick(rng, np.float32, np.float64)
        lead = leading(rng, 200_000, m * max(keys, w))
        q, p = rng.normal(size=(*lead, m, d)), rng.normal(size=(*trailing(rng, lead), w, d))
        if chance(rng, 0.1):
            spoil_rows(rng, pick(rng, q, p), pick(rng, *SPECIAL))
        return {
            "q": some_layout(rng, q.astype(dtype)),
            "p": some_layout(rng, p.astype(dtype)),
            "keys": keys,
            "first": pick(rng, 0, -w // 2, int(rng.integers(-m - 9, keys + 9))),
            "beyond": pick(rng, "zero", "edge"),
            **some_out(rng),
        }

    def judge(self, a):
        return judge_bias(*(a[name] for name in self.needed), a["q"].dtype)

    def bad(self, a):
        (*lead, m, d), (w, _), dtype = a["q"].shape, a["p"].shape[-2:], a["q"].dtype
        return [
            ("p", np.ones((w, d + 1), dtype)),
            ("q", np.ones(d, dtype)),
            ("keys", -1),
            ("keys", 2.5),
            ("first", 0.5),
            ("beyond", "both"),
            ("out", np.empty((*lead, m, a["keys"] + 1), dtype)),
            ("out", np.empty((*lead, m, a["keys"]), np.int32)),
        ]


def judge_bias(q, p, keys, first, beyond, dtype):
    exact = oracle.relative_bias(q, p, keys, first, beyond)
    terms = oracle.relative_bias(np.abs(q), np.abs(p), keys, first, beyond)
    d = q.shape[-1]
    bound = cases.BOUNDS["relative_bias"].units * (d + 1) * cases.unit(dtype) * terms
    return exact, bound + d * float(np.finfo(dtype).smallest_subnormal)


# ---- rotary --------------------------------------------------------------------------------------
class Rope(Function):
    needed = ("x", "cos", "sin")
    function = staticmethod(wavepe.rope)

    def draw(self, rng):
        n, h, rest = length(rng), max(width(rng), 1), pick(rng, 0, 0, int(rng.integers(0, 20)))
        lead = (*leading(rng, 40_000, n * (2 * h + rest)), n)
        x = rng.normal(size=(*lead, 2 * h + rest))
        if chance(rng, 0.1):
            spoil_rows(rng, x, pick(rng, *SPECIAL))
        tables = cases.turn(rng, (*trailing(rng, lead), h), pick(rng, np.float32, np.float64))
        return {
            "x": some_layout(rng, x.astype(pick(rng, np.float16, np.float32, np.float64))),
            **{name: some_layout(rng, t) for name, t in zip(("cos", "sin"), tables, strict=True)},
            "interleaved": chance(rng, 0.5),
            "inverse": chance(rng, 0.5),
            **some_out(rng),
        }

    def judge(self, a):
        x, cos, sin = (a[name] for name in self.needed)
        return judge_rope(x, cos, sin, a["interleaved"], a["inverse"], x.dtype)

    def bad(self, a):
        (*lead, d), h = a["x"].shape, a["cos"].shape[-1]
        wide = np.ones((d // 2 + 1), np.float32)
        return [
            ("cos", wide),
            ("sin", wide),
            ("x", np.ones(2 * h - 1, np.float32)),
            ("x", np.ones((5, 2 * h), np.int64)),
            ("cos", np.ones((7, *lead, h), np.float32)),
            ("out", np.empty((*lead, d + 1), a["x"].dtype)),
            ("out", np.empty((*lead, d), np.int16)),
        ]


def judge_rope(x, cos, sin, interleaved, inverse, dtype):
    """Judge rope of x and tables as read. `dtype` is x's, or float32 if the caller rounds."""
    exact = oracle.rope(x, cos, sin, interleaved, inverse)
    sign = np.negative(sin) if inverse else sin
    with np.errstate(invalid="ignore"):
        return exact, rope_bound(x, cos, sign, interleaved, dtype)


class RopeTable(Function):
    needed = ("positions", "inv_freq", "attention_factor", "precision")
    function = staticmethod(wavepe.rope_table)

    def draw(self, rng):
        h = pick(rng, int(rng.integers(0, 7)), min(width(rng), 40))
        sections = (
            [int(n) for n in rng.multinomial(h, [0.3, 0.3, 0.4])] if chance(rng, 0.5) else None
        )
        shape = (*leading(rng, 60, h), *([3] if sections else []))
        if not sections and chance(rng, 0.3):
            shape = (min(length(rng), 300 // max(h, 1)),)
        positions = np.asarray(rng.integers(-FAR, FAR, shape))
        return {
            "positions": some_layout(rng, positions),
            "inv_freq": some_layout(rng, rng.uniform(0, 1, h)),
            "attention_factor": pick(rng, 1.0, 0.5, 1.25),
            "precision": pick(rng, "exact", "exact", "hf"),
            "sections": sections,
            "dtype": pick(rng, np.float16, np.float32, np.float32, np.float64),
        }

    def judge(self, a):
        return judge_rope_table(a["positions"], a["inv_freq"], a, a["dtype"])

    def bad(self, a):
        h, axes = len(a["inv_freq"]), a["positions"].shape[-1] if a["positions"].ndim else 0
        return [
            ("inv_freq", np.ones((h, 1))), ("sections", [h + 1]), ("sections", [h] + [0] * axes),
            ("precision", "half"), ("dtype", np.int8),
        ]  # fmt: skip


def judge_rope_table(positions, inv_freq, options, dtype):
    """Judge rope_table. Exact: one ulp, or two units of 1 in float64. hf: float32, then dtype."""
    function = oracle.rope_table if options["precision"] == "exact" else oracle.rope_table_hf
    tables = function(positions, inv_freq, options["attention_factor"], options["sections"])
    narrow = np.result_type(dtype, np.float16)
    if options["precision"] == "hf" and narrow != np.float16:
        narrow = np.dtype(np.float32)
    if narrow == np.float64:
        return [(x, 4 * cases.unit(float)) for x in tables]
    ulps = cases.BOUNDS["rope_table"].units / 2
    return [(x, ulps * cases.ulp(x, narrow)) for x in tables]


# ---- attention -----------------------------------------------------------------------------------
class Attention(Function):
    """Calls of wavepe.attention: out and lse, with any leading axes."""

    needed = ("q", "k", "v", "first", "beyond", "causal")
    function = staticmethod(wavepe.attention)

    def draw(self, rng):
        dtype = pick(rng, np.float32, np.float32, np.float64, np.float16)
        m, n, d, dv = length(rng), length(rng), width(rng), width(rng)
        m, n = pick(rng, (m, n), (m, m), (1, n))
        kv_heads, group = (int(x) for x in rng.integers(1, (3, 4)))
        lead = leading(rng, 60_000, m * n * kv_heads * group)
        if m * n * kv_heads * group > 150_000:
            kv_heads = group = 1
        given = {
            "q": rng.normal(size=(*lead, kv_heads * group, m, d)),
            "k": rng.normal(size=(*trailing(rng, lead), kv_heads, n, d)),
            "v": rng.normal(size=(*trailing(rng, lead), kv_heads, n, dv)),
        }
        if chance(rng, 0.5):
            w = max(length(rng), 1)
            own = pick(rng, (), (kv_heads * group,), (*lead, kv_heads * group))
            c = pick(rng, d, d, width(rng))
            given["p"] = rng.normal(size=(*own, w, c))
            if c != d or chance(rng, 0.2):
                given["q_rel"] = rng.normal(size=(*own, m, c))
        given = {name: some_layout(rng, x.astype(dtype)) for name, x in given.items()}
        if chance(rng, 0.3):
            own = pick(rng, (), (kv_heads * group,), (*lead, kv_heads * group))
            bias = rng.normal(size=(*own, max(length(rng), 1)))
            given["bias"] = some_layout(rng, bias.astype(pick(rng, "f2", "f4", "f4")))
            given["bias_first"] = pick(rng, 0, 0, int(rng.integers(-m - 9, n + 9)))
            given["bias_beyond"] = pick(rng, "zero", "edge")
        if chance(rng, 0.3):
            given["slopes"] = rng.uniform(-0.5, 0.5, kv_heads * group)
        if chance(rng, 0.3):
            given["sinks"] = rng.normal(size=kv_heads * group)
        return given | {
            "first": pick(rng, 0, 0, int(rng.integers(-m - 9, n + 9))),
            "beyond": pick(rng, "zero", "edge"),
            "causal": chance(rng, 0.6),
            "window": pick(rng, None, int(rng.integers(0, 40)), length(rng)),
            "scale": pick(rng, None, float(rng.normal())),
        }

    def call(self, arguments):
        return wavepe.attention(**arguments, return_lse=True)

    def judge(self, a):
        return judge_attention(**a)

    def check(self, got, exact, a):
        compare_attention(got, exact, a["q"].dtype)

    def bad(self, a):
        d = a["q"].shape[-1]
        return [
            ("q", np.ones(d, np.float32)),
            ("k", np.ones((3, d + 1), np.float32)),
            ("p", np.ones((3, d + 200), np.float32)),
            ("q_rel", np.ones((3, d + 201), np.float32)),
            ("bias", np.ones(())),
            ("bias_beyond", "both"),
            ("window", -1),
            ("window", 1.5),
            ("beyond", "both"),
            ("scale", math.nan),
        ]


TARGETS = {
    "psi": Psi(), "wavelet_table": WaveletTable(), "relative_bias": RelativeBias(), "rope": Rope(),
    "rope_table": RopeTable(), "attention": Attention(),
}  # fmt: skip
