"""The formulas of rope_frequencies, every rope type."""

import math
import warnings

import numpy as np
import oracle_rope
import pytest
import wavepe
from cases import BOUNDS, assert_same_bits, assert_within, unit
from rope_cases import LONG, MINIMAL, ORIGINAL, SHORT, frequencies

DIMS = (4, 6, 32, 80, 128)
THETAS = (50.0, 1e4, 1e6)


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
    assert got == pytest.approx(oracle_rope.yarn_mscale(factor, *mscales)[1], rel=1e-15)


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
