"""alibi_slopes [A]."""

import math

import numpy as np
import oracle
import pytest
import wavepe
from cases import BOUNDS, SIZES, assert_within, unit


@pytest.mark.parametrize("heads", sorted({*SIZES, 4, 6, 12, 24, 40, 128, 1000}))
def test_slopes(heads):
    got, want = wavepe.alibi_slopes(heads), oracle.alibi_slopes(heads)
    assert got.dtype == np.float64
    assert got.shape == (heads,)
    assert_within(got, want, BOUNDS["alibi_slopes"].units * unit(float) * want)


def test_values_of_the_paper():
    assert wavepe.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert wavepe.alibi_slopes(1).tolist() == [2.0**-8]
    assert wavepe.alibi_slopes(16)[1::2].tolist() == wavepe.alibi_slopes(8).tolist()
    # 12 heads: those of 8, then every second one of 16.
    want = [*(2.0**-i for i in range(1, 9)), *(2.0 ** -(i + 0.5) for i in range(4))]
    assert np.allclose(wavepe.alibi_slopes(12), want, rtol=1e-15)


@pytest.mark.parametrize("heads", [np.int64(8), np.uint8(8)])
def test_numpy_integers_count(heads):
    assert np.array_equal(wavepe.alibi_slopes(heads), wavepe.alibi_slopes(8))


@pytest.mark.parametrize(
    ("error", "heads"),
    [
        (ValueError, 0),
        (ValueError, -4),
        (ValueError, 2**61),
        (TypeError, 8.0),
        (TypeError, math.nan),
        (TypeError, "8"),
        (TypeError, None),
        (TypeError, [8]),
    ],
)
def test_errors(error, heads):
    with pytest.raises(error, match="heads"):
        wavepe.alibi_slopes(heads)
