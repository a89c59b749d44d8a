"""sinusoidal [V] and alibi_slopes [A] by their formulas; their errors are in test_arrays.py."""

import numpy as np
import oracle
import pytest
import wavepe
from cases import BOUNDS, INTEGERS, SIZES, assert_same_bits, assert_within, unit


def check(got, positions, dim, theta=10000.0):
    positions = np.asarray(positions)
    assert got.dtype == np.float64
    assert got.shape == (*positions.shape, dim)
    w = np.repeat(oracle.rope_frequencies(dim, theta), 2)
    angle = np.abs(positions.astype(float))[..., None] * w
    spread = 1 + np.abs(np.log(w))  # how much the exponent's rounding grows in the frequency
    bound = BOUNDS["sinusoidal"].units * unit(float) * (1 + angle * spread)
    assert_within(got, oracle.sinusoidal(positions, dim, theta), bound, f"dim={dim} theta={theta}")


@pytest.mark.parametrize("dim", [0, 2, 4, 6, 16, 24, 66, 128])
@pytest.mark.parametrize("theta", [10000.0, 128, 1.0, 1e6])
def test_sinusoidal(dim, theta):
    positions = np.array([[0, 1, 2, 7], [-1, -30, 4095, 10**6]])
    check(wavepe.sinusoidal(positions, dim, theta), positions, dim, theta)


@pytest.mark.parametrize("integer", INTEGERS)
def test_every_integer_type(integer):
    info = np.iinfo(integer)
    values = [p for p in (-128, -1, 0, 1, 127, 255, 65535, 2**31) if info.min <= p <= info.max]
    check(wavepe.sinusoidal(np.array(values, integer), 8), values, 8)
    assert np.array_equal(wavepe.alibi_slopes(integer(8)), wavepe.alibi_slopes(8))


def test_shapes_and_layouts():
    positions = np.arange(24).reshape(4, 6)
    whole = wavepe.sinusoidal(positions, 10)
    assert whole.shape == (4, 6, 10)
    assert wavepe.sinusoidal(5, 10).shape == (10,), "a scalar is one position, never a count"
    assert_same_bits(wavepe.sinusoidal(5, 10), whole[0, 5])
    assert_same_bits(wavepe.sinusoidal(positions.tolist(), 10), whole)
    assert_same_bits(wavepe.sinusoidal(positions.T[::-1], 10), whole.swapaxes(0, 1)[::-1])
    assert_same_bits(wavepe.sinusoidal(positions[1:, ::2], 10), whole[1:, ::2])
    assert wavepe.sinusoidal(np.empty((0, 3), int), 4).shape == (0, 3, 4)
    assert wavepe.sinusoidal([], 4).shape == (0, 4)


@pytest.mark.parametrize("heads", sorted({*SIZES, 4, 6, 12, 24, 40, 128, 1000}))
def test_alibi_slopes(heads):
    got, want = wavepe.alibi_slopes(heads), oracle.alibi_slopes(heads)
    assert got.dtype == np.float64
    assert got.shape == (heads,)
    assert_within(got, want, BOUNDS["alibi_slopes"].units * unit(float) * want)
