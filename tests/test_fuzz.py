"""Seeded random calls of every NumPy function: a right result, or ValueError or TypeError; never
anything else."""

import numpy as np
import oracle
import pytest
import test_relative_bias
import test_rope
import test_rope_table
import test_wavelet
import test_wavelet_table
import wavepe
from cases import LAYOUTS, Guard, assert_same_bits, generator, lay_out, turn

CASES = 250
REFUSED = (ValueError, TypeError)
# Values no argument takes, whatever it is.
NONSENSE = (None, "x", object(), 1j, {}, b"1", np.array("x"), np.array([None, 1]))


def pick(rng, *choices):
    return choices[rng.integers(len(choices))]


def some_layout(rng, a):
    return lay_out(a, pick(rng, *LAYOUTS)) if a.ndim else a


def shape(rng, *tail, most=3):
    return (*(int(n) for n in rng.integers(0, 4, rng.integers(0, most))), *tail)


def spoil(rng, arguments, keys, extra=()):
    """One argument made nonsense, or one of the given (name, value) pairs: bad by the contract, to
    be refused."""
    if len(extra) and rng.random() < 0.6:
        name, value = extra[rng.integers(len(extra))]
    else:
        name, value = pick(rng, *keys), pick(rng, *NONSENSE)
    return arguments | {name: value}


def relative_bias_case(rng):
    m, keys, w, d = (int(n) for n in rng.integers(0, 40, 4))
    w = max(w, 1)
    lead = shape(rng)
    dtype = pick(rng, np.float32, np.float64)
    q = some_layout(rng, rng.normal(size=(*lead, m, d)).astype(dtype))
    p = some_layout(
        rng, rng.normal(size=(*lead[int(rng.integers(0, len(lead) + 1)) :], w, d)).astype(dtype)
    )
    good = {
        "q": q,
        "p": p,
        "keys": keys,
        "first": int(rng.integers(-50, 50)),
        "beyond": pick(rng, "zero", "edge"),
    }
    bad = [
        ("p", np.ones((w, d + 1), dtype)),
        ("q", np.ones(d, dtype)),
        ("keys", -1),
        ("keys", 2.5),
        ("first", 0.5),
        ("beyond", "both"),
        ("out", np.empty((*lead, m, keys + 1), dtype)),
        ("out", np.empty((*lead, m, keys), np.int32)),
    ]
    return good, bad, ("q", "p", "keys", "first", "beyond", "out")


def call_relative_bias(a):
    a = dict(a)
    return wavepe.relative_bias(a.pop("q"), a.pop("p"), a.pop("keys"), **a)


def check_relative_bias(got, a):
    test_relative_bias.check(got, a["q"], a["p"], a["keys"], a["first"], a["beyond"])


def rope_case(rng):
    n, h, rest = int(rng.integers(0, 9)), int(rng.integers(1, 40)), int(rng.integers(0, 20))
    lead = shape(rng, n)
    x = some_layout(
        rng, rng.normal(size=(*lead, 2 * h + rest)).astype(pick(rng, np.float32, np.float64))
    )
    of_table = lead[int(rng.integers(0, len(lead) + 1)) :]
    cos, sin = (
        some_layout(rng, a) for a in turn(rng, (*of_table, h), pick(rng, np.float32, np.float64))
    )
    good = {
        "x": x,
        "cos": cos,
        "sin": sin,
        "interleaved": bool(rng.integers(2)),
        "inverse": bool(rng.integers(2)),
    }
    wide = np.ones((*of_table, h + rest + 1), np.float32)
    bad = [
        ("cos", wide),
        ("sin", wide),
        ("x", np.ones(2 * h - 1, np.float32)),
        ("x", np.ones((5, 2 * h), np.int64)),
        ("cos", np.ones((7, *lead, h), np.float32)),
        ("out", np.empty((*x.shape[:-1], x.shape[-1] + 1), x.dtype)),
        ("out", np.empty(x.shape, np.int16)),
    ]
    return good, bad, ("x", "cos", "sin")


def call_rope(a):
    a = dict(a)
    return wavepe.rope(a.pop("x"), a.pop("cos"), a.pop("sin"), **a)


def check_rope(got, a):
    test_rope.check(got, a["x"], a["cos"], a["sin"], a["interleaved"], a["inverse"])


def rope_table_case(rng):
    h = int(rng.integers(0, 7))
    sections = [int(n) for n in rng.multinomial(h, [0.3, 0.3, 0.4])] if rng.integers(2) else None
    positions = rng.integers(-(2**24), 2**24, shape(rng, *([3] if sections else []), most=2))
    positions = some_layout(rng, np.asarray(positions))
    good = {
        "positions": positions,
        "inv_freq": some_layout(rng, rng.uniform(0, 1, h)),
        "attention_factor": pick(rng, 1.0, 0.5, 1.25),
        "sections": sections,
    }
    bad = [
        ("inv_freq", np.ones((h, 1))),
        ("sections", [h + 1]),
        ("sections", [h, 0, 0, 0, 0, 0, 0]),
        ("precision", "half"),
        ("dtype", np.int8),
    ]
    return good, bad, ("positions", "inv_freq", "attention_factor", "precision")


def call_rope_table(a):
    a = dict(a)
    return wavepe.rope_table(a.pop("positions"), a.pop("inv_freq"), **a)


def check_rope_table(got, a):
    want = oracle.rope_table(a["positions"], a["inv_freq"], a["attention_factor"], a["sections"])
    test_rope_table.check(got, want)


def wavelet_table_case(rng):
    dim, w = int(rng.integers(0, 20)), int(rng.integers(0, 20))
    offsets = w if rng.integers(2) else some_layout(rng, rng.integers(-300, 300, w))
    good = {
        "offsets": offsets,
        "scale": some_layout(rng, rng.uniform(0.5, 99, dim)),
        "shift": some_layout(rng, rng.uniform(-9, 9, dim)),
        "kind": pick(rng, *oracle.KINDS),
        "mirrored": pick(rng, None, False, True),
        "dtype": pick(rng, np.float32, np.float64),
    }
    bad = [
        ("offsets", -1),
        ("offsets", 1.5),
        ("offsets", np.ones(3)),
        ("offsets", np.ones((2, 2), int)),
        ("scale", np.ones(dim + 2)),
        ("shift", np.ones((dim, 1))),
        ("kind", "daubechies"),
        ("dtype", np.uint8),
        ("out", np.empty((w, dim + 1), np.float32)),
    ]
    return good, bad, ("offsets", "scale", "shift", "kind")


def call_wavelet_table(a):
    a = dict(a)
    return wavepe.wavelet_table(a.pop("offsets"), a.pop("scale"), a.pop("shift"), **a)


def check_wavelet_table(got, a):
    test_wavelet_table.check(
        got, *(a[k] for k in ("offsets", "scale", "shift", "kind", "mirrored", "dtype"))
    )


def psi_case(rng):
    dtype = pick(rng, np.float16, np.float32, np.float64)
    n = int(rng.integers(1, 80))
    t, scale, shift = (some_layout(rng, a) for a in test_wavelet.inputs(rng, n, dtype))
    good = {"kind": pick(rng, *oracle.KINDS), "t": t, "scale": scale, "shift": shift}
    bad = [
        ("t", np.ones(n + 1)[: n + 1 if n > 1 else 0]),
        ("out", np.empty(n + 1)),
        ("out", np.empty(n, np.int8)),
    ]
    bad = [
        (name, value) for name, value in bad if n > 1 or (name == "out" and value.dtype == np.int8)
    ]
    return good, bad, ("t", "scale", "shift")


def call_psi(a):
    a = dict(a)
    return getattr(wavepe, a.pop("kind"))(a.pop("t"), a.pop("scale"), a.pop("shift"), **a)


def check_psi(got, a):
    test_wavelet.check(a["kind"], got, a["t"], a["scale"], a["shift"], a["t"].dtype)


FUNCTIONS = {
    "psi": (psi_case, call_psi, check_psi),
    "relative_bias": (relative_bias_case, call_relative_bias, check_relative_bias),
    "rope": (rope_case, call_rope, check_rope),
    "rope_table": (rope_table_case, call_rope_table, check_rope_table),
    "wavelet_table": (wavelet_table_case, call_wavelet_table, check_wavelet_table),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_good_and_bad_input(variant, name):
    case, call, check = FUNCTIONS[name]
    rng = generator("fuzz", name)
    for number in range(CASES):
        good, bad, keys = case(rng)
        got = call(good)
        check(got, good)
        if not isinstance(got, tuple):
            guard = Guard(
                got.shape,
                got.dtype,
                pick(rng, "contiguous", "sliced", "negative", "fortran", "offset"),
            )
            if name != "rope_table":
                call(good | {"out": guard.out})
                guard.check(f"{name} {number}")
                assert_same_bits(guard.out, got)
        spoilt = spoil(rng, good, keys, bad)
        with np.errstate(all="ignore"), pytest.raises(REFUSED):
            call(spoilt)


@pytest.mark.parametrize("name", ["alibi_slopes", "rope_frequencies", "wavelet_grid", "sinusoidal"])
def test_random_arguments_of_the_small_functions(name):
    """Whatever comes in, nothing but a result, ValueError or TypeError comes out."""
    rng = generator("small", name)
    values = (
        *NONSENSE,
        0,
        1,
        2,
        8,
        24,
        -1,
        2.5,
        np.nan,
        np.inf,
        True,
        [1, 2],
        np.arange(4),
        np.ones((2, 2)),
    )
    kept = 0
    for _ in range(CASES):
        args = [pick(rng, *values) for _ in range(rng.integers(1, 4))]
        try:
            getattr(wavepe, name)(*args)
        except REFUSED:
            continue
        kept += 1
    assert kept < CASES
