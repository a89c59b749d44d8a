"""rope_frequencies: every rope type's formula, its parameters, and transformers' own numbers."""

import math
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import oracle
import oracle_rope
import pytest
import wavepe
from cases import BOUNDS, SIZES, assert_same_bits, assert_within, unit
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_cases import LONG, MINIMAL, ORIGINAL, SHORT, frequencies, minimal
from wavepe.arrays import rope_frequencies as rules

ROOT = Path(__file__).parent.parent
DIMS = (4, 6, 32, 80, 128)
THETAS = (50.0, 1e4, 1e6)
LENGTHS = {"length": 300, "max_length": 100}
each_kind = pytest.mark.parametrize("kind", MINIMAL)


def same(got, want):
    """Assert equal frequencies, to the bit, and equal factors."""
    assert_same_bits(got[0], want[0])
    assert got[1] == want[1]


def check(got, want, dim, theta, what):
    """Assert small errors, relative to the unscaled frequency. A ramp may scale it to almost 0."""
    plain = oracle_rope.default(dim, theta)[0]
    size = np.maximum(np.abs(want[0]), plain[: want[0].size])
    units = BOUNDS["rope_frequencies"].units + 8  # a division, a ramp and its two products
    bound = units * unit(float) * size * (1 + np.abs(np.log(plain)))
    assert got[0].dtype == np.float64
    assert_within(got[0], want[0], bound, what)
    assert type(got[1]) is float
    assert_within(got[1], want[1], 4 * unit(float) * want[1], f"factor {what}")


# ------------------------------------------------------------------ formulas
@pytest.mark.parametrize("theta", [None, 1, 128, 500.0, 10000.0, 5e5, 1e6, 2**31])
def test_without_scaling(theta):
    for dim in (*(2 * n for n in SIZES), 24, 96, 128, 256):
        got, factor = wavepe.rope_frequencies(dim, theta)
        want = oracle.rope_frequencies(dim, theta or 10000.0)
        assert type(factor) is float
        assert factor == 1.0
        assert got.dtype == np.float64
        assert got[0] == 1
        bound = BOUNDS["rope_frequencies"].units * unit(float) * want * (1 + np.abs(np.log(want)))
        assert_within(got, want, bound, f"dim={dim} theta={theta}")


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("dim", DIMS)
def test_linear_and_default(dim, theta):
    check(frequencies("default", dim, theta), oracle_rope.default(dim, theta), dim, theta, "")
    for factor in (1, 2.5, 32):
        got = frequencies("linear", dim, theta, factor=factor)
        check(got, oracle_rope.linear(dim, theta, factor), dim, theta, factor)


@pytest.mark.parametrize("length", [1, 99, 100, 101, 250, 10**6])
@pytest.mark.parametrize("factor", [1.0, 2.0, 7.5])
def test_dynamic(length, factor):
    for dim in DIMS:
        got = frequencies("dynamic", dim, 500.0, factor=factor, length=length, max_length=100)
        want = oracle_rope.dynamic(dim, 500.0, factor, length, 100)
        plain = oracle_rope.default(dim, 500.0)[0]
        base = np.abs(np.log(want[0])) + np.abs(np.log(plain))
        assert_within(got[0], want[0], 16 * unit(float) * want[0] * (1 + base), f"dim={dim}")
        assert got[1] == 1.0
    if length <= 100:
        assert_same_bits(got[0], wavepe.rope_frequencies(dim, 500.0)[0])


@pytest.mark.parametrize("truncate", [None, True, False])
@pytest.mark.parametrize("betas", [{}, {"beta_fast": 20.5, "beta_slow": 0.5}, {"beta_fast": 64}])
@pytest.mark.parametrize("factor", [1.0, 4, 40.0])
def test_yarn(factor, betas, truncate):
    options = {"fast": betas.get("beta_fast", 32), "slow": betas.get("beta_slow", 1)}
    for dim in DIMS[2:]:
        for theta in THETAS:
            keys = {"factor": factor, ORIGINAL: 4096, "truncate": truncate, **betas}
            want = oracle_rope.yarn(
                dim, theta, factor, 4096, truncate=truncate is not False, **options
            )
            check(frequencies("yarn", dim, theta, **keys), want, dim, theta, f"{dim} {theta}")


def test_yarn_with_an_empty_ramp_jumps():
    keys = {"factor": 8.0, ORIGINAL: 4096, "beta_fast": 8, "beta_slow": 8, "truncate": False}
    plain, got = wavepe.rope_frequencies(64)[0], frequencies("yarn", 64, **keys)[0]
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(got, np.where(turns > 8, plain, plain / 8), rtol=1e-15)


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0, 40.0])
@pytest.mark.parametrize("mscales", [(0.707, 1.0), (1.0, 1.0), (1, 0.5), (-0.5, 2)])
def test_yarn_mscale(factor, mscales):
    keys = {**MINIMAL["yarn"], "mscale": mscales[0], "mscale_all_dim": mscales[1]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a factor of 0.5
        _, got = frequencies("yarn", **{**keys, "factor": factor})
    one, other = (oracle_rope.yarn_factor(factor, x) for x in mscales)
    assert got == pytest.approx(one / other, rel=1e-15)


@pytest.mark.parametrize("length", [None, 1, 64, 65, 1000])
def test_longrope(length):
    for factor in (1.0, 4, 16.0):
        got = frequencies("longrope", **{**MINIMAL["longrope"], "factor": factor}, length=length)
        divisors = LONG if (length or 0) > 64 else SHORT
        check(got, oracle_rope.longrope(8, 1e4, divisors, factor, 64), 8, 1e4, factor)


@pytest.mark.parametrize("bands", [(1, 4), (1.0, 4.0), (0.25, 32.0)])
@pytest.mark.parametrize("factor", [2.0, 8.0, 32])
def test_llama3(factor, bands):
    for dim in DIMS:
        for theta in THETAS:
            keys = {"low_freq_factor": bands[0], "high_freq_factor": bands[1], ORIGINAL: 8192}
            got = frequencies("llama3", dim, theta, factor=factor, **keys)
            want = oracle_rope.llama3(dim, theta, factor, 8192, *bands)
            check(got, want, dim, theta, f"{dim} {theta}")


@pytest.mark.parametrize("partial", [0, 0.1, 0.25, 0.5, 0.9, 1])
def test_proportional(partial):
    for dim in DIMS:
        for keys in ({}, {"factor": 8.0}):
            got = frequencies("proportional", dim, partial_rotary_factor=partial, **keys)
            want = oracle_rope.proportional(dim, 1e4, partial, **keys)
            check(got, want, dim, 1e4, f"{dim} {keys}")
            assert not got[0][int(partial * dim // 2) :].any()


@pytest.mark.parametrize("kind", sorted(set(MINIMAL) - {"proportional"}))
def test_partial_rotary_factor_is_a_smaller_head(kind):
    """Also where it is odd: 13 of 50 dims, 7 pairs."""
    lengths = {"length": 300, "max_length": 100}
    keys = MINIMAL[kind]
    whole = frequencies(kind, 8, **keys, **lengths)
    part = frequencies(kind, 16, partial_rotary_factor=0.5, **keys, **lengths)
    assert_same_bits(part[0], whole[0])
    assert part[1] == whole[1]
    if kind == "longrope":
        keys = {**keys, "short_factor": [1.0] * 7, "long_factor": [2.0] * 7}
    odd, _ = frequencies(kind, 50, partial_rotary_factor=0.26, **keys, **lengths)
    assert odd.shape == (7,)
    if kind == "default":
        np.testing.assert_allclose(odd, 1e4 ** (-2 * np.arange(7) / 13), rtol=1e-14)
    if kind != "longrope":
        empty, _ = frequencies(kind, 8, partial_rotary_factor=1, **keys, **lengths)
        assert_same_bits(empty, whole[0])


def test_nothing_is_rotated_by_partial_rotary_factor_0():
    for kind in ("default", "linear", "yarn", "llama3"):
        assert frequencies(kind, partial_rotary_factor=0, **MINIMAL[kind])[0].shape == (0,)


# ------------------------------------------------------------------ keys and their precedence
@pytest.mark.parametrize("missing", [..., None])
@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, keys in MINIMAL.items() for key in keys]
)
def test_missing_key_is_named(kind, key, missing):
    with pytest.raises(ValueError, match=rf"'{kind}' needs .*\b{key}\b"):
        wavepe.rope_frequencies(8, scaling=minimal(kind, **{key: missing}), length=9)


def test_dynamic_needs_the_trained_length():
    with pytest.raises(ValueError, match="'dynamic' needs max_length"):
        frequencies("dynamic", factor=2.0, length=100)


@pytest.mark.parametrize("kind", ["yarn", "longrope", "llama3"])
def test_max_length_stands_in_for_the_original_one(kind):
    want = wavepe.rope_frequencies(8, scaling=minimal(kind))
    same(wavepe.rope_frequencies(8, scaling=minimal(kind, **{ORIGINAL: ...}), max_length=64), want)
    same(wavepe.rope_frequencies(8, scaling=minimal(kind), max_length=4096), want)  # its own first


def test_factor_from_the_lengths():
    """longrope without the key, yarn (as DeepSeek-V3 writes it) with None."""
    for kind, missing in (("longrope", ...), ("longrope", None), ("yarn", None)):
        got = wavepe.rope_frequencies(8, scaling=minimal(kind, factor=missing), max_length=1024)
        same(got, wavepe.rope_frequencies(8, scaling=minimal(kind, factor=16)))
        assert got[1] > 1
    with pytest.raises(ValueError, match="'yarn' needs factor"):
        wavepe.rope_frequencies(8, scaling=minimal("yarn", factor=...), max_length=1024)
    short = minimal("longrope", factor=None)
    assert wavepe.rope_frequencies(8, scaling=short, max_length=32)[1] == 1.0


def test_attention_factor_goes_first():
    mscales = {"mscale": 0.7, "mscale_all_dim": 1}
    for kind, keys in (("yarn", {}), ("yarn", mscales), ("longrope", {})):
        got = wavepe.rope_frequencies(8, scaling=minimal(kind, attention_factor=1.5, **keys))
        assert got[1] == 1.5
        assert type(got[1]) is float
    alone = minimal("longrope", attention_factor=2, factor=...)
    assert wavepe.rope_frequencies(8, scaling=alone)[1] == 2.0


def test_mscale_needs_both_and_no_0():
    usual = frequencies("yarn", **MINIMAL["yarn"])[1]
    assert usual == pytest.approx(0.1 * math.log(4) + 1, rel=1e-15)
    for keys in ({"mscale": 0.5}, {"mscale_all_dim": 2.0}, {"mscale": 1, "mscale_all_dim": 0}):
        assert frequencies("yarn", **MINIMAL["yarn"], **keys)[1] == usual


def test_names_of_the_type():
    """rope_type goes before type, and None does not count."""
    want = frequencies("linear", factor=4.0)
    for names in (
        {"type": "linear"},
        {"rope_type": "linear", "type": "linear"},
        {"rope_type": "linear", "type": "yarn"},
        {"rope_type": None, "type": "linear"},
    ):
        same(wavepe.rope_frequencies(8, scaling={**names, "factor": 4.0}), want)
    none = {"rope_type": None, "rope_theta": None, "partial_rotary_factor": None}
    same(wavepe.rope_frequencies(8, scaling=none), wavepe.rope_frequencies(8, 1e4))


@each_kind
def test_one_base(kind):
    """theta and rope_theta may both be given where they agree."""
    want = wavepe.rope_frequencies(8, 500.0, scaling=minimal(kind), **LENGTHS)
    for theta in (None, 500, np.float32(500)):
        for base in (500, 500.0):
            scaling = minimal(kind, rope_theta=base)
            same(wavepe.rope_frequencies(8, theta, scaling=scaling, **LENGTHS), want)
    for theta in (400, 1e4):
        with pytest.raises(ValueError, match=rf"theta={theta:.1f} and rope_theta=500\.0"):
            wavepe.rope_frequencies(8, theta, scaling=minimal(kind, rope_theta=500), **LENGTHS)
    plain = wavepe.rope_frequencies(8, scaling=minimal(kind), **LENGTHS)
    same(plain, wavepe.rope_frequencies(8, 1e4, scaling=minimal(kind), **LENGTHS))
    if kind == "default":
        same(plain, wavepe.rope_frequencies(8))
        without_a_type = {"rope_theta": 500.0}
        same(wavepe.rope_frequencies(8, scaling=without_a_type), want)
        with pytest.raises(ValueError, match=r"theta=400\.0 and rope_theta=500\.0"):
            wavepe.rope_frequencies(8, 400, scaling=without_a_type)


@each_kind
def test_keys_of_other_types_warn(kind):
    known = set().union(*MINIMAL.values())
    known |= {"beta_fast", "truncate", "attention_factor", "wobble", "theta"}
    others = known - {*MINIMAL[kind], *rules.known_keys(kind)}
    assert len(others) >= 4
    want = wavepe.rope_frequencies(8, scaling=minimal(kind), **LENGTHS)
    for key in others:
        scaling = minimal(kind, **{key: "whatever"})
        with pytest.warns(UserWarning, match=rf"unknown keys .*'{kind}': {key}$") as caught:
            got = wavepe.rope_frequencies(8, scaling=scaling, **LENGTHS)
        assert caught[0].filename == __file__
        same(got, want)


@pytest.mark.parametrize("keys", [{"factor": 0.5}, {"beta_fast": 1, "beta_slow": 2}])
def test_doubtful_values_warn(keys):
    with pytest.warns(UserWarning, match=next(iter(keys))):
        got, factor = wavepe.rope_frequencies(8, scaling=minimal("yarn", **keys))
    assert np.isfinite(got).all()
    assert math.isfinite(factor)


def test_scaling_is_read_only():
    scaling = types.MappingProxyType(minimal("longrope"))
    before = {key: list(v) if isinstance(v, list) else v for key, v in scaling.items()}
    got = wavepe.rope_frequencies(8, scaling=scaling, max_length=4096)
    assert dict(scaling) == before
    arrays = minimal("longrope", short_factor=np.array(SHORT), long_factor=tuple(LONG))
    assert_same_bits(wavepe.rope_frequencies(8, scaling=arrays)[0], got[0])


# ------------------------------------------------------------------ what is refused

ABOVE_0 = {"rope_theta", "factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow",
           "low_freq_factor", "high_freq_factor"}  # fmt: skip


@each_kind
@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, ValueError) for value in (0, -2.0, math.nan, math.inf)),
        *((value, TypeError) for value in ("4", True, [4.0], 4j)),
    ],
    ids=str,
)
def test_bad_numbers(kind, value, error):
    """Try every key that is a number above 0."""
    numbers = set(rules.known_keys(kind)) & ABOVE_0
    assert numbers
    for key in numbers:
        with pytest.raises(error, match=key):
            wavepe.rope_frequencies(8, scaling=minimal(kind, **{key: value}), max_length=64)


@pytest.mark.parametrize(
    ("error", "match", "kind", "changes"),
    [
        (ValueError, "partial_rotary_factor", "default", {"partial_rotary_factor": -0.5}),
        (ValueError, "partial_rotary_factor", "linear", {"partial_rotary_factor": 1.5}),
        (ValueError, "partial_rotary_factor", "yarn", {"partial_rotary_factor": math.nan}),
        (TypeError, "partial_rotary_factor", "llama3", {"partial_rotary_factor": True}),
        (TypeError, "truncate", "yarn", {"truncate": "false"}),
        (TypeError, "mscale", "yarn", {"mscale": "1"}),
        (ValueError, "mscale", "yarn", {"mscale": math.inf}),
        (ValueError, "mscale_all_dim", "yarn", {"mscale": 1, "mscale_all_dim": -10 / math.log(4)}),
        (ValueError, "base other than 1", "yarn", {"rope_theta": 1.0}),
        (ValueError, "must be above low", "llama3", {"low_freq_factor": 4.0}),
        (ValueError, "short_factor must .* 4 for head size .* 3", "longrope",
         {"short_factor": SHORT[:3], "long_factor": LONG[:3]}),
        (ValueError, "one value per pair", "longrope", {"short_factor": [1.0]}),
        (ValueError, "one value per pair", "longrope", {"short_factor": [], "long_factor": LONG}),
        (ValueError, r"long_factor\[1\]", "longrope", {"long_factor": [1.0, 0.0, 1, 1]}),
        (ValueError, r"long_factor\[0\]", "longrope", {"long_factor": [math.nan, 1, 1, 1]}),
        (TypeError, r"short_factor\[2\]", "longrope", {"short_factor": [1, 1, "1", 1]}),
        (TypeError, "short_factor", "longrope", {"short_factor": 1.0}),
        (TypeError, "short_factor", "longrope", {"short_factor": "1111"}),
        (ValueError, ORIGINAL, "longrope", {ORIGINAL: 1}),
        (ValueError, "unknown rope_type", "default", {"rope_type": "axial"}),
        (TypeError, "rope_type", "default", {"rope_type": 3}),
    ],
)  # fmt: skip
def test_refused(error, match, kind, changes):
    with pytest.raises(error, match=match):
        wavepe.rope_frequencies(8, scaling=minimal(kind, **changes), max_length=64)


def test_a_dict_per_layer_type_is_refused():
    nested = {"full_attention": minimal("linear"), "sliding_attention": minimal("default")}
    with pytest.raises(
        ValueError, match=r"one layer type, got .* full_attention, sliding_attention"
    ):
        wavepe.rope_frequencies(8, scaling=nested)


@each_kind
def test_odd_and_small_heads(kind):
    with pytest.raises(ValueError, match=r"7|one value per pair"):
        wavepe.rope_frequencies(7, scaling=minimal(kind), max_length=64)
    if kind == "dynamic":
        with pytest.raises(ValueError, match="more than 2 rotated dims, got 2"):
            frequencies(kind, 2, factor=2.0, max_length=64)
    with pytest.raises(ValueError, match="dim must be at least 1"):
        wavepe.rope_frequencies(0, scaling=minimal(kind), max_length=64)


@pytest.mark.parametrize("name", ["length", "max_length"])
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_bad_lengths(name, value, error):
    for kind in ("default", "dynamic", "longrope"):
        lengths = {"length": 64, "max_length": 64, name: value}
        with pytest.raises(error, match=name):
            wavepe.rope_frequencies(8, scaling=minimal(kind), **lengths)


extreme = st.floats(1e-300, 1e300) | st.floats(0.1, 100) | st.integers(1, 10**9)
anything = st.none() | st.floats() | st.integers() | st.text(max_size=3) | st.booleans() | extreme
keys = sorted(set(rules.PARAMETERS) - {"short_factor", "long_factor"})


@given(
    kind=st.sampled_from(sorted(MINIMAL)),
    changes=st.dictionaries(st.sampled_from(keys), extreme | anything, max_size=4),
    dim=st.integers(1, 40),
    lengths=st.tuples(*2 * [st.none() | st.integers(1, 2**62 - 1)]),
)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_finite_or_refused(kind, changes, dim, lengths):
    scaling = {**minimal(kind), **changes}
    if kind == "longrope":
        scaling |= {"short_factor": [1.5] * (dim // 2), "long_factor": [2.5] * (dim // 2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            inv_freq, factor = wavepe.rope_frequencies(
                dim, scaling=scaling, length=lengths[0], max_length=lengths[1]
            )
        except (ValueError, TypeError):
            return
    assert np.isfinite(inv_freq).all()
    assert (inv_freq >= 0).all()
    assert math.isfinite(factor)
    assert 2 * inv_freq.size <= dim


# ------------------------------------------------------------------ transformers' own functions
@pytest.mark.slow
def test_every_type_agrees_with_transformers():
    for name in ("torch", "transformers", "rich"):  # rich: the page is written with README's tools
        pytest.importorskip(name)
    sys.path.insert(0, str(ROOT))  # the benchmarks are not in the package
    from benchmarks import rope_parity

    rows = rope_parity.compare()
    assert {row["type"] for row in rows} == set(rules.ROPE_TYPES)
    assert sum(row["configurations"] for row in rows) >= 1000
    for row in rows:
        assert row["ok"], row
        assert row["float64"] <= 1e-13, row
        assert row["factor"] <= 1e-15, row
    # excused are those whose ramp has lost bits in float32
    assert {row["type"] for row in rows if row["excused"]} <= {"yarn", "llama3"}
    assert sum(row["excused"] for row in rows) <= 5
