"""The theorems of METHODS 5, for positions, sizes and bases that hypothesis picks."""

import math

import numpy as np
import oracle
import pytest
import wavepe
import wavepe.analysis as analysis
from cases import assert_same_bits, assert_within
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_cases import MINIMAL, minimal

steady = settings(max_examples=40, deadline=None, derandomize=True, database=None)

positions = st.integers(0, 100_000)
dims = st.integers(1, 64).map(lambda pairs: 2 * pairs)
bases = st.sampled_from([1.0, 2.0, 128.0, 1e4, 5e5, 1e6]) | st.floats(1.0, 1e7)
seeds = st.integers(0, 2**32 - 1)


SCALINGS = [*map(minimal, MINIMAL), {"partial_rotary_factor": 0.5}]


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def rotated(x, places, inv_freq, factor=1.0, **form):
    cos, sin = wavepe.rope_table(places, inv_freq, attention_factor=factor, dtype=np.float64)
    return wavepe.rope(x, cos, sin, **form)


@given(positions, dims, bases)
@steady
def test_rope_is_a_wavelet_transform(m, dim, theta):
    """psi in the even rows, psi' in the odd ones, is the rotation of position m."""
    angles = m * theta ** (-np.arange(0, dim, 2) / dim)
    even, odd = np.zeros((2, dim // 2, dim))
    pair = np.arange(dim // 2)
    even[pair, 2 * pair], even[pair, 2 * pair + 1] = np.cos(angles), -np.sin(angles)
    odd[pair, 2 * pair], odd[pair, 2 * pair + 1] = np.sin(angles), np.cos(angles)
    got = analysis.rope_wavelet_matrix(m, dim, theta)
    assert_within(got[0::2], even, 1e-9)
    assert_within(got[1::2], odd, 1e-9)


@given(positions)
@steady
def test_the_integrals_of_both_wavelets_are_zero(m):
    """The midpoint rule is exact for a period that no multiple of the points divides."""
    points = 20011  # a prime above k, which is at most 15916
    middles = (np.arange(2 * points) + 0.5) / points
    for wavelet in analysis.rope_wavelet(middles, m):
        assert abs(wavelet.sum() / points) < 1e-9
        assert wavelet.std() > 0.5


@given(seeds, st.integers(1, 16))
@steady
def test_discrete_haar_is_the_block_at_a_quarter_of_pi(seed, pairs):
    x = normal(seed, 2 * pairs)
    got = rotated(x, 1, np.full(pairs, math.pi / 4), interleaved=True)
    haar = np.array([[1.0, -1.0], [1.0, 1.0]]) / math.sqrt(2)
    assert_within(got, (x.reshape(pairs, 2) @ haar.T).ravel(), 1e-15)
    # its first row is the wavelet at scale 2, whose support ends before the shift
    shifts = 2 * np.arange(pairs) + 2
    assert_within(got[0::2], -analysis.wavelet_transform(x, 2, shifts, "haar"), 1e-15)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.get("rope_type", "partial"))
@given(seeds, positions, positions, positions)
@steady
def test_rotary_scores_depend_on_the_difference_alone(scaling, seed, m, n, shift):
    inv_freq, factor = wavepe.rope_frequencies(8, 500, scaling=scaling, length=100, max_length=64)
    q, k = normal(seed, 2, 8)

    def score(m, n):
        return rotated(q, m, inv_freq, factor) @ rotated(k, n, inv_freq, factor)

    size = factor**2 * np.linalg.norm(q) * np.linalg.norm(k)
    assert abs(score(m + shift, n + shift) - score(m, n)) <= 1e-13 * size


@given(seeds, positions, dims, bases, st.booleans())
@steady
def test_a_rotation_keeps_norms_and_its_inverse_returns(seed, m, dim, theta, interleaved):
    x = normal(seed, 3, dim)
    cos, sin = wavepe.rope_table(m, wavepe.rope_frequencies(dim, theta)[0], dtype=np.float64)
    y = wavepe.rope(x, cos, sin, interleaved=interleaved)
    pairs = (3, -1, 2) if interleaved else (3, 2, -1)
    before, after = (np.linalg.norm(a.reshape(pairs), axis=2 - (not interleaved)) for a in (x, y))
    assert_within(after, before, 1e-15 * (1 + 4 * before))
    back = wavepe.rope(y, cos, sin, interleaved=interleaved, inverse=True)
    assert_within(back, x, 1e-14)


@given(seeds, positions, dims, st.sampled_from([np.float32, np.float64]))
@steady
def test_interleaved_is_the_half_split_permuted(seed, m, dim, dtype):
    x = normal(seed, dim).astype(dtype)
    cos, sin = wavepe.rope_table(m, wavepe.rope_frequencies(dim)[0], dtype=dtype)
    order = np.arange(dim).reshape(-1, 2).T.ravel()  # 0, 2, 4, ..., 1, 3, 5, ...
    interleaved = wavepe.rope(x, cos, sin, interleaved=True)
    assert_same_bits(interleaved[order], wavepe.rope(x[order], cos, sin))


@given(seeds, positions, dims, bases)
@steady
def test_fraction_one_is_rope_and_zero_is_nothing(seed, m, dim, theta):
    x = normal(seed, dim).astype(np.float32)
    plain = wavepe.rope(x, *wavepe.rope_table(m, wavepe.rope_frequencies(dim, theta)[0]))
    whole = wavepe.encoding("rope", theta=theta, fraction=1.0).rope_table(m, dim)
    none = wavepe.encoding("rope", theta=theta, fraction=0.0).rope_table(m, dim)
    assert_same_bits(wavepe.rope(x, *whole), plain)
    assert_same_bits(wavepe.rope(x, *none), x)


@given(positions, st.integers(-1000, 1000), dims, bases)
@steady
def test_the_shift_matrix_moves_the_sinusoid(m, k, dim, theta):
    got = analysis.shift_matrix(k, dim, theta) @ wavepe.sinusoidal(m, dim, theta)
    assert_within(got, wavepe.sinusoidal(m + k, dim, theta), 1e-10)


@pytest.mark.parametrize("kind", oracle.KINDS)
@given(seeds, st.integers(1, 40), st.integers(0, 40))
@steady
def test_wavelet_scores_depend_on_the_difference_alone(kind, seed, length, shift):
    """The tokens from `shift` on have the same scores alone as in the whole sequence."""
    q = normal(seed, shift + length, 16).astype(np.float32)
    p, first, _ = wavepe.encoding("wavelet", kind=kind, scales=4).table(shift + length, 16)
    whole = wavepe.relative_bias(q, p, shift + length, first=first)
    assert_same_bits(wavepe.relative_bias(q[shift:], p, length), whole[shift:, shift:])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", oracle.KINDS)
@given(seeds, st.integers(1, 40))
@steady
def test_wavelet_scores_are_a_block_of_those_at_twice_the_length(kind, causal, seed, length):
    encoding = wavepe.encoding("wavelet", kind=kind, scales=4)
    q = normal(seed, 2 * length, 16).astype(np.float32)
    scores = []
    for size in (length, 2 * length):
        p, first, beyond = encoding.table(size, 16, causal=causal)
        scores.append(wavepe.relative_bias(q[:size], p, size, first=first, beyond=beyond))
    assert_same_bits(scores[0], scores[1][:length, :length])
