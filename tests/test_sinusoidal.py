"""sinusoidal [V]: values, the shift matrix of METHODS 4, and bad input."""

import numpy as np
import oracle
import pytest
import wavepe
from cases import BOUNDS, INTEGERS, OUT_LAYOUTS, Guard, assert_same_bits, assert_within, unit
from hypothesis import given, settings
from hypothesis import strategies as st


def check(got, positions, dim, theta=10000.0):
    positions = np.asarray(positions)
    assert got.dtype == np.float64
    assert got.shape == (*positions.shape, dim)
    w = np.repeat(oracle.rope_frequencies(dim, theta), 2)
    angle = np.abs(positions.astype(float))[..., None] * w
    spread = 1 + np.abs(np.log(w))  # how much the exponent's rounding grows in the frequency
    bound = BOUNDS["sinusoidal"].units * unit(float) * (1 + angle * spread)
    assert_within(got, oracle.sinusoidal(positions, dim, theta), bound, f"dim={dim} theta={theta}")


def test_values_of_the_paper():
    row = wavepe.sinusoidal(1, 128)
    want = [0.8414709848, 0.5403023059, 0.0001154782, 0.9999999933]
    assert np.allclose(row[[0, 1, -2, -1]], want, rtol=0, atol=1e-10)
    assert wavepe.sinusoidal(0, 6).tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("dim", [0, 2, 4, 6, 16, 24, 66, 128])
@pytest.mark.parametrize("theta", [10000.0, 128, 1.0, 1e6])
def test_against_the_oracle(dim, theta):
    positions = np.array([[0, 1, 2, 7], [-1, -30, 4095, 10**6]])
    check(wavepe.sinusoidal(positions, dim, theta), positions, dim, theta)


@pytest.mark.parametrize("integer", INTEGERS)
def test_every_integer_type(integer):
    info = np.iinfo(integer)
    values = [p for p in (-128, -1, 0, 1, 127, 255, 65535, 2**31) if info.min <= p <= info.max]
    check(wavepe.sinusoidal(np.array(values, integer), 8), values, 8)


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


def test_output_stays_inside():
    for shape in ((), (1,), (5,), (3, 4)):
        positions = np.arange(int(np.prod(shape))).reshape(shape)
        for dim in (2, 6, 34):
            for layout in OUT_LAYOUTS:
                guard = Guard((*shape, dim), np.float64, layout)
                assert wavepe.sinusoidal(positions, dim, out=guard.out) is guard.out
                guard.check(f"{shape} {dim} {layout}")
                assert_same_bits(guard.out, wavepe.sinusoidal(positions, dim))


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.integers(-1000, 1000), st.integers(-1000, 1000), st.integers(1, 20))
def test_linear_in_the_shift(m, k, pairs):
    """f(m + k) = A(k) f(m), A block-diagonal [[cos wk, sin wk], [-sin wk, cos wk]]."""
    w = oracle.rope_frequencies(2 * pairs)
    sin, cos = wavepe.sinusoidal(m, 2 * pairs).reshape(pairs, 2).T
    shifted = np.stack(
        [np.cos(w * k) * sin + np.sin(w * k) * cos, np.cos(w * k) * cos - np.sin(w * k) * sin], -1
    )
    assert_within(wavepe.sinusoidal(m + k, 2 * pairs), shifted.ravel(), 1e-11)


@pytest.mark.parametrize(
    ("error", "match", "args", "options"),
    [
        (ValueError, "7", (np.arange(3), 7), {}),
        (ValueError, "-2", (np.arange(3), -2), {}),
        (ValueError, "theta", (np.arange(3), 8, 0.0), {}),
        (ValueError, "theta", (np.arange(3), 8, -5.0), {}),
        (ValueError, "theta", (np.arange(3), 8, np.nan), {}),
        (TypeError, r"dim must be an integer, got 8\.0", (np.arange(3), 8.0), {}),
        (TypeError, "dim must be an integer, got '8'", (np.arange(3), "8"), {}),
        (TypeError, "theta must be a number, got 'big'", (np.arange(3), 8, "big"), {}),
        (
            TypeError,
            "positions must hold real numbers, got dtype complex128",
            (np.arange(3) * 1j, 8),
            {},
        ),
        (TypeError, "positions must hold real numbers, got dtype <U3", ("abc", 8), {}),
        (TypeError, "positions must hold real numbers, got dtype object", (None, 8), {}),
        (ValueError, "3, 8", (np.arange(3), 8), {"out": np.empty((3, 6))}),
        (TypeError, "float32", (np.arange(3), 8), {"out": np.empty((3, 8), np.float32)}),
        (TypeError, "out must be a NumPy array, got list", (np.arange(3), 8), {"out": [0.0]}),
        (
            ValueError,
            "out must be writeable, got a read-only array",
            (np.arange(3), 8),
            {"out": np.broadcast_to(0.0, (3, 8))},
        ),
    ],
)
def test_errors(error, match, args, options):
    with pytest.raises(error, match=match):
        wavepe.sinusoidal(*args, **options)
