"""wavepe.analysis: matrices, the wavelet transform and the predicted band (METHODS 1, 4, 5, 6)."""

import math

import numpy as np
import oracle
import pytest
import wavepe
import wavepe.analysis as analysis
from cases import assert_within, forget_registrations

MATRICES = (
    analysis.rope_matrix,
    analysis.shift_matrix,
    analysis.multiscale_rope_matrix,
    analysis.rope_wavelet_matrix,
)


def turn(angle):
    return np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


def assert_blocks(matrix, block):
    """Each 2x2 block is block(i, j), or zeros to the bit where that is None."""
    assert matrix.dtype == np.float64
    pairs = len(matrix) // 2
    blocks = matrix.reshape(pairs, 2, pairs, 2).swapaxes(1, 2)
    for i, j in np.ndindex(pairs, pairs):
        wanted = block(i, j)
        bound = 0 if wanted is None else 1e-12
        assert_within(blocks[i, j], np.zeros((2, 2)) if wanted is None else wanted, bound, (i, j))


@pytest.mark.parametrize("position", [0, 1, 7, -3, 1000])
@pytest.mark.parametrize(("dim", "theta"), [(2, 1e4), (6, 1e4), (16, 128.0)])
def test_matrices_block_by_block(dim, theta, position):
    angles = position * oracle.rope_frequencies(dim, theta)
    rope = analysis.rope_matrix(position, dim, theta)
    assert_blocks(rope, lambda i, j: turn(angles[i]) if i == j else None)
    shift = analysis.shift_matrix(position, dim, theta)
    assert_blocks(shift, lambda i, j: turn(-angles[i]) if i == j else None)
    several = analysis.multiscale_rope_matrix(position, dim, theta)
    assert_blocks(several, lambda i, j: turn(angles[i]) if j <= i else None)


@pytest.mark.parametrize("matrix", MATRICES)
def test_theta_is_ten_thousand_by_default(matrix):
    assert np.array_equal(matrix(5, 8), matrix(5, 8, 10000.0))
    assert not np.allclose(matrix(5, 8), matrix(5, 8, 500.0))


@pytest.mark.parametrize("dim", [2, 8, 64, 128, 256])
@pytest.mark.parametrize("theta", [1.0, 128.0, 1e4, 1e6])
def test_the_theorem(dim, theta):
    """[W]: rows of wavelets are the rows of the rotation."""
    for position in (0, 1, 6, 7, 44, 710, 4095, 99999, 100000):  # 44 and 710: next to 2 k pi
        wavelets = analysis.rope_wavelet_matrix(position, dim, theta)
        rotation = analysis.rope_matrix(position, dim, theta)
        assert_within(wavelets, rotation, 1e-9, f"position {position}")


@pytest.mark.parametrize("position", [0, 1, 6, 7, 44, 1000])
def test_the_wavelets_of_the_theorem(position):
    turns = next(k for k in range(1, 10**6) if position < 2 * k * math.pi)
    t = np.array([-0.5, 0.0, 0.1, 0.75, 1.0, 1.3, 1.999, 2.0, 5.0])
    angle = 2 * turns * math.pi * (t % 1)
    first, second = (t >= 0) & (t < 1), (t >= 1) & (t < 2)
    psi, prime = analysis.rope_wavelet(t, position)
    assert_within(psi, first * np.cos(angle) - second * np.sin(angle), 1e-9)
    assert_within(prime, first * np.sin(angle) + second * np.cos(angle), 1e-9)
    assert not psi[~(first | second)].any()
    assert not prime[~(first | second)].any()
    assert analysis.rope_wavelet(0.0, position)[0] == 1.0


# --------------------------------------------------------------- wavelet transform


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_the_transform_is_the_sum(kind):
    x = np.random.default_rng(1).standard_normal((3, 2, 40))
    scale, shift = oracle.wavelet_grid(8, [1, 2, 8, 16])
    got = analysis.wavelet_transform(x, scale, shift, kind)
    wanted = np.zeros((3, 2, 8))
    for t in range(40):
        for c in range(8):
            sample = float(oracle.psi(kind, t, scale[c], shift[c]))
            wanted[..., c] += sample / math.sqrt(scale[c]) * x[..., t]
    assert (got.dtype, got.shape) == (np.float64, (3, 2, 8))
    assert_within(got, wanted, 1e-13)


def test_shapes_of_the_transform():
    x = np.ones((5, 7))
    assert analysis.wavelet_transform(x, np.ones((3, 1)), np.arange(4)).shape == (5, 3, 4)
    assert analysis.wavelet_transform(x, 2.0, 1.0).shape == (5,)
    assert analysis.wavelet_transform(x, [2.0], 1.0).shape == (5, 1)
    assert analysis.wavelet_transform(x[0], 2.0, 1.0).shape == ()
    assert not analysis.wavelet_transform(np.ones((2, 0)), [1.0], [0.0]).any()
    integers = analysis.wavelet_transform([1, 2, 3], [1, 2], 0)
    assert np.array_equal(integers, analysis.wavelet_transform([1.0, 2, 3], [1.0, 2], [0.0, 0]))


def test_a_registered_wavelet(monkeypatch):
    forget_registrations(monkeypatch)
    wavepe.register_wavelet("test_analysis_triangle", lambda u: np.maximum(1 - np.abs(u), 0))
    got = analysis.wavelet_transform([1.0, 10.0, 100.0], [4.0], [1.0], "test_analysis_triangle")
    assert_within(got, [(0.75 + 10 + 75) / 2], 1e-12)


# --------------------------------------------------------------- bands


@pytest.mark.parametrize(
    ("dim", "theta", "length", "pair"),
    [(128, 1e4, 4096, 48.7874), (256, 1e4, 8192, 107.2077), (128, 512, 512, 50.6969)],
)
def test_predicted_bands_of_the_methods(dim, theta, length, pair):
    assert analysis.predicted_band(dim, theta, length) == pytest.approx(pair, abs=5e-5)


def test_band_variance():
    best = 3.6572100979832105
    assert analysis.band_variance(best) == pytest.approx(0.5404698072, abs=5e-11)
    around = analysis.band_variance(best + np.linspace(-1, 1, 2001))
    assert around.argmax() == 1000
    assert analysis.band_variance(np.linspace(0, 1000, 200001)).max() <= around.max()
    x = np.array([0.3, 1.0, 7.0, 100.0, -2.0])
    formula = 0.5 + np.sin(2 * x) / (4 * x) - (np.sin(x) / x) ** 2
    assert_within(analysis.band_variance(x), formula, 1e-15)
    assert analysis.band_variance(0) == 0
    # the variance of a cosine over that angle
    angle = np.linspace(0, 7.0, 10**6 + 1)
    assert analysis.band_variance(7.0) == pytest.approx(np.cos(angle).var(), abs=1e-5)


# --------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        ("rope_matrix", (1.0, 8), TypeError, "position"),
        ("rope_matrix", (2**60, 8), ValueError, r"2\^53"),
        ("rope_matrix", (1, 7), ValueError, "head size must be even .*, got 7"),
        ("rope_wavelet_matrix", (1, 0), ValueError, "dim"),
        ("multiscale_rope_matrix", (1, 8, 0.0), ValueError, "theta"),
        ("wavelet_transform", (3.0, 1, 0), ValueError, r"\(\.\.\., T\)"),
        ("wavelet_transform", ([1.0], 0, 0), ValueError, "scale must be above 0, got 0"),
        ("wavelet_transform", ([1.0], [1, 2], [1, 2, 3]), ValueError, r"\(2,\) and \(3,\)"),
        ("wavelet_transform", ([1.0], 1, 0, "mexican"), ValueError, "mexican"),
        ("wavelet_transform", ([1.0], 1, 0, "db4"), ValueError, "discrete wavelet"),
        ("wavelet_transform", ([1j], 1, 0), TypeError, "x must hold real numbers"),
        ("rope_wavelet_matrix", (-1, 8), ValueError, "position must be at least 0, got -1"),
        ("rope_wavelet_matrix", (3, 8, 0.5), ValueError, r"theta must be at least 1.*0\.5"),
        ("rope_wavelet", (["a"], 3), TypeError, "t must hold real numbers"),
        ("predicted_band", (7, 1e4, 10), ValueError, "dim must be even"),
        ("predicted_band", (8, 1.0, 10), ValueError, "theta must be above 1"),
        ("predicted_band", (8, 1e4, 0), ValueError, "length"),
        ("predicted_band", (8, "1e4", 10), TypeError, "theta"),
        ("band_variance", ("x",), TypeError, "x must hold real numbers"),
    ],
)
def test_errors(function, arguments, error, message):
    with pytest.raises(error, match=message):
        getattr(analysis, function)(*arguments)
