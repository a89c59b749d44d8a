"""The arrays that encodings give a model, against the formulas."""

import math

import numpy as np
import pytest
import wavepe
from wavepe.encodings import RoPE, Sinusoidal, Wavelet

KINDS = ["ricker", "gaussian", "morlet", "haar"]
ENTRY_METHODS = {
    "absolute": lambda e: e.absolute([0, 1], 8),
    "rotary": lambda e: e.rope_table([0, 1], 8),
    "relative": lambda e: e.table(4, 8),
    "slope": lambda e: e.slopes(2),
    "bias": lambda e: e.bias(4, 2),
}


@pytest.mark.parametrize(
    "text",
    ["wavelet", "shaw", "transformer_xl", "rope", "alibi", "t5", "sandwich", "sinusoidal", "none"],
)
def test_methods_of_other_entry_points_raise(text):
    encoding = wavepe.encoding(text)
    for entry, call in ENTRY_METHODS.items():
        if entry == encoding.entry:
            call(encoding)
        else:
            with pytest.raises(NotImplementedError, match=f"{text!r}.*{encoding.entry!r}"):
                call(encoding)


def test_trained_as():
    rows = [
        "none",
        "sinusoidal",
        "rope",
        "rope:theta=128",
        "rope:theta=128,inference_theta=scaled",
        "rope:theta=10000,inference_theta=scaled",
        "alibi",
        "wavelet:scales=6",
    ]
    trained = {row: wavepe.encoding(row).trained_as() for row in rows}
    assert len(set(trained.values())) == 6
    assert trained["rope"] == trained["rope:theta=10000,inference_theta=scaled"]
    assert trained["rope:theta=128"] == trained["rope:theta=128,inference_theta=scaled"]
    assert trained["rope:theta=128"] == RoPE(theta=128)
    assert wavepe.encoding("rope:fraction=0.5,inference_theta=7").trained_as().fraction == 0.5
    for encoding in trained.values():
        assert encoding.trained_as() == encoding


# Wavelet


def psi(kind, offsets, scale, shift):
    """The mother wavelets as METHODS 1 has them, at t = offset, float64."""
    t = np.asarray(offsets, np.float64)[:, None] - shift
    u = t / scale
    if kind == "ricker":
        return (1 - u**2) * np.exp(-(u**2) / 2)
    if kind == "gaussian":
        return np.exp(-(u**2))
    if kind == "morlet":
        return np.exp(-(u**2)) * np.cos(t)
    return np.where((u >= -0.5) & (u < 0), 1.0, 0.0) - np.where((u >= -1) & (u < -0.5), 1.0, 0.0)


@pytest.mark.parametrize(
    ("delta", "scale", "shift", "mirrored", "expected"),
    [
        (2, 1, 0, False, -0.4060058497),
        (3, 2, 1, False, 0.0),
        (10, 8, 3, False, 0.1598298636),
        (511, 128, 15, False, -0.0076914980),
        (3, 2, 1, True, -0.4060058497),
        (10, 8, 3, True, -0.4381319172),
    ],
)
def test_wavelet_values(delta, scale, shift, mirrored, expected):
    p, first, _ = wavepe.encoding("wavelet", mirrored=mirrored).table(512, 128)
    column = int(math.log2(scale)) * 16 + shift
    assert first == 0
    assert p[delta, column] == pytest.approx(expected, abs=2**-25)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mirrored", [None, False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "head_dim", "scales"), [(1, 8, 8), (7, 12, 3), (33, 64, 8)])
def test_wavelet_table_is_the_formula(kind, mirrored, causal, length, head_dim, scales):
    encoding = Wavelet(kind=kind, scales=scales, mirrored=mirrored)
    p, first, beyond = encoding.table(length, head_dim, causal=causal)
    offsets = np.arange(0 if causal else 1 - length, length)
    turned = kind == "haar" if mirrored is None else mirrored
    scale = np.repeat(2.0 ** np.arange(scales), head_dim // scales)
    shift = np.tile(np.arange(head_dim // scales), scales)
    expected = psi(kind, -offsets if turned else offsets, scale, shift)
    assert (p.dtype, p.shape, first, beyond) == (np.float32, expected.shape, offsets[0], "zero")
    np.testing.assert_allclose(p, expected, rtol=0, atol=2**-24)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 5, 16, 33])
def test_wavelet_table_is_a_part_of_the_longer_one(kind, length):
    encoding = Wavelet(kind=kind, scales=4)
    short, _, _ = encoding.table(length, 16)
    long, _, _ = encoding.table(2 * length, 16)
    np.testing.assert_array_equal(short, long[:length])
    short, first, _ = encoding.table(length, 16, causal=False)
    long, long_first, _ = encoding.table(2 * length, 16, causal=False)
    start = first - long_first
    np.testing.assert_array_equal(short, long[start : start + 2 * length - 1])
    np.testing.assert_array_equal(short[-first:], encoding.table(length, 16)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_mirrored_table_is_the_literal_one_turned_round(kind):
    literal, _, _ = Wavelet(kind=kind, scales=4, mirrored=False).table(20, 16, causal=False)
    mirrored, _, _ = Wavelet(kind=kind, scales=4, mirrored=True).table(20, 16, causal=False)
    np.testing.assert_array_equal(mirrored, literal[::-1])


def test_haar_is_mirrored_by_default():
    table = Wavelet(kind="haar", scales=4).table(20, 16)[0]
    np.testing.assert_array_equal(table, Wavelet("haar", 4, mirrored=True).table(20, 16)[0])
    shifts = 4
    literal = Wavelet("haar", 4, mirrored=False).table(20, 16)[0]
    assert not literal[shifts:].any()
    assert table[shifts:].any()


def test_wavelet_scales():
    by_number = wavepe.encoding("wavelet:scales=4,min_scale=4").table(64, 16)[0]
    by_list = wavepe.encoding("wavelet:scales=4+8+16+32").table(64, 16)[0]
    np.testing.assert_array_equal(by_number, by_list)
    fixed = wavepe.encoding("wavelet:kind=haar,scales=4,fixed_scale=true").table(64, 16)[0]
    np.testing.assert_array_equal(fixed, np.tile(fixed[:, :4], 4))
    one = wavepe.encoding("wavelet:scales=128+").table(64, 16)[0]
    expected = psi("ricker", np.arange(64), 128.0, np.arange(16))
    np.testing.assert_allclose(one, expected, rtol=0, atol=2**-24)


@pytest.mark.parametrize("scales", [1, 2, 4, 8, 16, 32, 64, 128])
def test_published_scale_sets(scales):
    p, _, _ = wavepe.encoding("wavelet", scales=scales).table(9, 128)
    assert np.isfinite(p).all()
    assert (p[0, :: 128 // scales] == 1).all()  # shift 0, delta 0


@pytest.mark.parametrize(("scales", "head_dim"), [(8, 12), (3, 64), ((1, 2, 8), 64)])
def test_wavelet_needs_a_multiple_of_the_scales(scales, head_dim):
    count = scales if isinstance(scales, int) else len(scales)
    with pytest.raises(ValueError, match=rf"\b{head_dim}\b") as caught:
        Wavelet(scales=scales).table(4, head_dim)
    assert str(count) in str(caught.value)


@pytest.mark.parametrize(("length", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError)])
def test_wavelet_length(length, error):
    with pytest.raises(error, match="wavelet length must be"):
        Wavelet().table(length, 8)


# RoPE


def angles(positions, head_dim, theta):
    pairs = np.arange(head_dim // 2)
    return np.asarray(positions, np.float64)[..., None] * theta ** (-2.0 * pairs / head_dim)


def assert_table(table, angle):
    """Within one float32 ulp of 1."""
    for got, expected in zip(table, (np.cos(angle), np.sin(angle)), strict=True):
        assert got.dtype == np.float32
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=0, atol=2**-23)


@pytest.mark.parametrize("head_dim", [2, 6, 16, 64, 128])
@pytest.mark.parametrize(("text", "theta"), [("rope", 1e4), ("rope:theta=128", 128.0)])
def test_rope_table_is_the_formula(text, theta, head_dim):
    encoding = wavepe.encoding(text)
    for positions in (np.arange(33), 7, np.arange(6).reshape(2, 3), np.zeros((0,), int)):
        table = encoding.rope_table(positions, head_dim)
        assert_table(table, angles(positions, head_dim, theta))
    inv_freq, factor = encoding.frequencies(head_dim)
    assert inv_freq.dtype == np.float64
    assert factor == 1.0
    np.testing.assert_allclose(inv_freq, angles(1, head_dim, theta), rtol=1e-14)


def test_rope_layout_does_not_change_the_table():
    for got, expected in zip(
        RoPE(interleaved=True).rope_table(np.arange(9), 16),
        RoPE().rope_table(np.arange(9), 16),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("fraction", "kept"), [(1, 64), (0.9, 57), (0.75, 48), (0.5, 32), (0.25, 16), (0.0, 0)]
)
def test_fraction_keeps_the_fast_pairs(fraction, kept):
    inv_freq, _ = RoPE(fraction=fraction).frequencies(128)
    whole, _ = RoPE().frequencies(128)
    np.testing.assert_array_equal(inv_freq[:kept], whole[:kept])
    assert inv_freq.shape == (64,)
    assert not inv_freq[kept:].any()
    cos, sin = RoPE(fraction=fraction).rope_table(np.arange(50), 128)
    whole_cos, whole_sin = RoPE().rope_table(np.arange(50), 128)
    np.testing.assert_array_equal(cos[:, :kept], whole_cos[:, :kept])
    np.testing.assert_array_equal(sin[:, :kept], whole_sin[:, :kept])
    assert (cos[:, kept:] == 1).all()
    assert (sin[:, kept:] == 0).all()


@pytest.mark.parametrize("theta", [None, 128.0])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 256, 1024])
def test_scaled_theta(theta, length):
    encoding = RoPE(theta=theta, inference_theta="scaled")
    trained = theta or 1e4
    expected = trained * length / 128 if length > 128 else trained
    positions = np.arange(length)
    table = encoding.rope_table(positions, 16, trained_length=128)
    assert_table(table, angles(positions, 16, expected))
    same = RoPE(theta=expected).frequencies(16)[0]
    np.testing.assert_array_equal(
        encoding.frequencies(16, length=length, trained_length=128)[0], same
    )
    np.testing.assert_array_equal(
        encoding.frequencies(16, length=length, trained_length=128, training=True)[0],
        RoPE(theta=trained).frequencies(16)[0],
    )


def test_scaled_theta_of_a_cached_step_is_that_of_the_full_pass():
    encoding = RoPE(theta=128, inference_theta="scaled")
    full = encoding.rope_table(np.arange(300), 16, trained_length=128)
    step = encoding.rope_table([299], 16, length=300, trained_length=128)
    early = encoding.rope_table(np.arange(10), 16, length=300, trained_length=128)
    for whole, last, first in zip(full, step, early, strict=True):
        np.testing.assert_array_equal(whole[-1:], last)
        np.testing.assert_array_equal(whole[:10], first)


def test_scaled_theta_needs_its_lengths():
    encoding = RoPE(inference_theta="scaled")
    with pytest.raises(ValueError, match="trained_length"):
        encoding.rope_table(np.arange(4), 16)
    with pytest.raises(ValueError, match="needs trained_length"):
        encoding.frequencies(16, length=4)
    with pytest.raises(ValueError, match="needs length"):
        encoding.frequencies(16, trained_length=4)
    with pytest.raises(ValueError, match="trained_length must be at least 1"):
        encoding.frequencies(16, length=4, trained_length=0)
    with pytest.raises(TypeError, match="length must be an integer"):
        encoding.frequencies(16, length=4.0, trained_length=4)
    assert encoding.frequencies(16, training=True)[1] == 1.0


def test_inference_theta_as_a_number():
    encoding = RoPE(theta=128, inference_theta=4096)
    assert_table(encoding.rope_table(np.arange(9), 16), angles(np.arange(9), 16, 4096.0))
    np.testing.assert_array_equal(
        encoding.frequencies(16, training=True)[0], RoPE(theta=128).frequencies(16)[0]
    )


@pytest.mark.parametrize("text", ["rope", "rope:fraction=0.5", "rope:theta=128"])
def test_rope_odd_head_size(text):
    with pytest.raises(ValueError, match="7"):
        wavepe.encoding(text).rope_table(np.arange(4), 7)


# ALiBi


def test_alibi_slopes():
    slopes = wavepe.encoding("alibi").slopes(8)
    assert slopes.dtype == np.float64
    np.testing.assert_array_equal(slopes, 0.5 ** np.arange(1, 9))
    assert slopes[-1] == 0.00390625
    six = wavepe.encoding("alibi").slopes(6)
    np.testing.assert_array_equal(six, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])


# Sinusoidal


def sinusoid(positions, dim, theta):
    angle = angles(positions, dim, theta)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(*angle.shape[:-1], dim)


def test_sinusoidal_values():
    f = wavepe.encoding("sinusoidal").absolute([1], 128)[0]
    expected = [0.8414709848, 0.5403023059, 0.0001154782, 0.9999999933]
    np.testing.assert_allclose(f[[0, 1, -2, -1]], expected, rtol=0, atol=5e-11)


@pytest.mark.parametrize("dim", [2, 6, 64])
@pytest.mark.parametrize(
    "positions", [5, np.arange(9), np.arange(6, dtype=np.uint8).reshape(2, 3), np.zeros((0,), int)]
)
def test_sinusoidal_is_the_formula(positions, dim):
    for encoding, theta in ((Sinusoidal(), 1e4), (Sinusoidal(theta=50), 50.0)):
        got = encoding.absolute(positions, dim)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, sinusoid(positions, dim, theta), rtol=0, atol=1e-12)


def test_sinusoidal_of_the_length():
    positions = np.arange(12)
    encoding = wavepe.encoding("sinusoidal:theta=length")
    expected = sinusoid(positions, 16, 12.0)
    np.testing.assert_allclose(encoding.absolute(positions, 16), expected, rtol=0, atol=1e-12)
    step = encoding.absolute([3], 16, length=12, trained_length=4)
    np.testing.assert_allclose(step, expected[3:4], rtol=0, atol=1e-12)
    one = encoding.absolute([0], 16)
    np.testing.assert_allclose(one, sinusoid([0], 16, 1.0), rtol=0, atol=1e-12)
    assert encoding.absolute(np.zeros((0,), int), 16).shape == (0, 16)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.float32])
def test_sinusoidal_reversed(dtype):
    positions = np.arange(12, dtype=dtype)
    encoding = wavepe.encoding("sinusoidal:reversed=true")
    got = encoding.absolute(positions, 16)
    np.testing.assert_allclose(got, sinusoid(12 - np.arange(12), 16, 1e4), rtol=0, atol=1e-12)
    got = encoding.absolute(positions, 16, length=300)
    np.testing.assert_allclose(got, sinusoid(300 - np.arange(12), 16, 1e4), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("positions", "length", "error"),
    [
        ([0, 1], 0, ValueError),
        ([0, 1], 2.0, TypeError),
        ([0.0, math.nan], None, ValueError),
        (["a"], None, TypeError),
        (["a"], 3, TypeError),
    ],
)
def test_sinusoidal_bad_length(positions, length, error):
    for text in ("sinusoidal:theta=length", "sinusoidal:reversed=true"):
        with pytest.raises(error, match=r"sinusoidal (length|positions)"):
            wavepe.encoding(text).absolute(positions, 8, length=length)


def test_sinusoidal_odd_dim():
    with pytest.raises(ValueError, match="7"):
        Sinusoidal().absolute([0], 7)
