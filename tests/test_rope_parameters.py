"""The parameters of the rope types: those that are needed, their precedence, and errors."""

import math
import types
import warnings

import numpy as np
import pytest
import wavepe
from cases import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_cases import LONG, MINIMAL, ORIGINAL, SHORT, frequencies, minimal
from wavepe import _rope_frequencies

# ------------------------------------------------------------------ keys and their precedence


REQUIRED = [
    ("linear", "factor"),
    ("dynamic", "factor"),
    ("yarn", "factor"),
    ("yarn", ORIGINAL),
    ("longrope", "short_factor"),
    ("longrope", "long_factor"),
    ("longrope", ORIGINAL),
    ("longrope", "factor"),
    ("llama3", "factor"),
    ("llama3", "low_freq_factor"),
    ("llama3", "high_freq_factor"),
    ("llama3", ORIGINAL),
]


@pytest.mark.parametrize(("kind", "key"), REQUIRED)
@pytest.mark.parametrize("missing", [..., None])
def test_missing_key_is_named(kind, key, missing):
    with pytest.raises(ValueError, match=rf"'{kind}' needs .*\b{key}\b"):
        wavepe.rope_frequencies(8, scaling=minimal(kind, **{key: missing}), length=9)


def test_dynamic_needs_the_trained_length():
    with pytest.raises(ValueError, match="'dynamic' needs max_length"):
        frequencies("dynamic", factor=2.0, length=100)


@pytest.mark.parametrize("kind", ["yarn", "longrope", "llama3"])
def test_max_length_stands_in_for_the_original_one(kind):
    got = wavepe.rope_frequencies(8, scaling=minimal(kind, **{ORIGINAL: ...}), max_length=64)
    want = wavepe.rope_frequencies(8, scaling=minimal(kind))
    assert_same_bits(got[0], want[0])
    assert got[1] == want[1]
    own = wavepe.rope_frequencies(8, scaling=minimal(kind), max_length=4096)  # goes first
    assert_same_bits(own[0], want[0])
    assert own[1] == want[1]


def test_factor_from_the_lengths():
    """longrope without the key, yarn (as DeepSeek-V3 writes it) with None."""
    for kind, missing in (("longrope", ...), ("longrope", None), ("yarn", None)):
        got = wavepe.rope_frequencies(8, scaling=minimal(kind, factor=missing), max_length=1024)
        want = wavepe.rope_frequencies(8, scaling=minimal(kind, factor=16))
        assert_same_bits(got[0], want[0])
        assert got[1] == want[1] > 1
    with pytest.raises(ValueError, match="'yarn' needs factor"):
        wavepe.rope_frequencies(8, scaling=minimal("yarn", factor=...), max_length=1024)
    short = minimal("longrope", factor=None)
    assert wavepe.rope_frequencies(8, scaling=short, max_length=32)[1] == 1.0


def test_attention_factor_goes_first():
    for kind in ("yarn", "longrope"):
        for keys in ({}, {"mscale": 0.7, "mscale_all_dim": 1} if kind == "yarn" else {}):
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


def test_rope_type_goes_before_type():
    want = frequencies("linear", factor=4.0)[0]
    for names in (
        {"type": "linear"},
        {"rope_type": "linear", "type": "linear"},
        {"rope_type": "linear", "type": "yarn"},
        {"rope_type": None, "type": "linear"},
    ):
        assert_same_bits(wavepe.rope_frequencies(8, scaling={**names, "factor": 4.0})[0], want)
    none = {"rope_type": None, "rope_theta": None, "partial_rotary_factor": None}
    assert_same_bits(
        wavepe.rope_frequencies(8, scaling=none)[0], wavepe.rope_frequencies(8, 1e4)[0]
    )


@pytest.mark.parametrize("kind", MINIMAL)
def test_one_base(kind):
    options = {"length": 300, "max_length": 100}
    want, _ = wavepe.rope_frequencies(8, 500.0, scaling=minimal(kind), **options)
    for theta in (None, 500, np.float32(500)):
        got, _ = wavepe.rope_frequencies(
            8, theta, scaling=minimal(kind, rope_theta=500.0), **options
        )
        assert_same_bits(got, want)
    with pytest.raises(ValueError, match=r"theta=400\.0 and rope_theta=500\.0"):
        wavepe.rope_frequencies(8, 400, scaling=minimal(kind, rope_theta=500), **options)
    plain, _ = wavepe.rope_frequencies(8, scaling=minimal(kind), **options)
    assert_same_bits(plain, wavepe.rope_frequencies(8, 1e4, scaling=minimal(kind), **options)[0])


@pytest.mark.parametrize("kind", MINIMAL)
def test_keys_of_other_types_warn(kind):
    keys = set().union(*MINIMAL.values()) | {"beta_fast", "truncate", "attention_factor", "wobble"}
    own = {*MINIMAL[kind], *_rope_frequencies.known_keys(kind)}
    assert len(keys - own) >= 3
    want = wavepe.rope_frequencies(8, scaling=minimal(kind), length=200, max_length=100)
    for key in keys - own:
        scaling = minimal(kind, **{key: "whatever"})
        with pytest.warns(UserWarning, match=rf"unknown keys .*'{kind}': {key}$") as caught:
            got = wavepe.rope_frequencies(8, scaling=scaling, length=200, max_length=100)
        assert caught[0].filename == __file__
        assert_same_bits(got[0], want[0])
        assert got[1] == want[1]


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


@pytest.mark.parametrize("kind", MINIMAL)
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-2.0, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        ("4", TypeError),
        (True, TypeError),
        ([4.0], TypeError),
        (4j, TypeError),
    ],
    ids=str,
)
def test_bad_numbers(kind, value, error):
    """Of every key that is a number above 0."""
    numbers = set(_rope_frequencies.known_keys(kind)) & {
        "rope_theta",
        "factor",
        ORIGINAL,
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "low_freq_factor",
        "high_freq_factor",
    }
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
        (ValueError, "must be above low", "llama3", {"low_freq_factor": 5.0}),
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


@pytest.mark.parametrize("kind", MINIMAL)
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
keys = sorted(set(_rope_frequencies.PARAMETERS) - {"short_factor", "long_factor"})


@given(
    kind=st.sampled_from(sorted(MINIMAL)),
    changes=st.dictionaries(st.sampled_from(keys), extreme | anything, max_size=4),
    dim=st.integers(1, 40),
    lengths=st.tuples(*2 * [st.none() | st.integers(1, 2**62 - 1)]),
)
@settings(derandomize=True, deadline=None, max_examples=600)
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
