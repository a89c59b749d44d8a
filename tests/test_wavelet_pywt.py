"""Kinds that PyWavelets samples, against the cascade written out by hand."""

import numpy as np
import pytest
import wavepe
from cases import assert_within, soon
from numpy.testing import assert_array_equal
from processes import forked, output

pywt = pytest.importorskip("pywt")

# The families and members of [W], and the largest that PyWavelets has.
PUBLISHED = [
    *(f"db{n}" for n in range(2, 33)),
    *(f"sym{n}" for n in range(2, 9)),
    *(f"coif{n}" for n in range(1, 17)),
    "dmey",
    *(f"{family}{n}" for family in ("bior", "rbio")
      for n in ("1.1", "1.3", "1.5", "2.2", "2.4", "2.6", "2.8", "3.1", "3.3", "3.5", "3.7", "3.9",
                "4.4", "5.5", "6.8")),
]  # fmt: skip
SOME = ["db1", "db2", "db4", "sym5", "coif2", "dmey", "bior2.2", "bior1.3", "rbio2.2", "rbio5.5"]


def cascade(kind, level):
    """psi at steps of 2^-level: the two-scale relation psi(x) = sqrt 2 sum g_n phi(2x - n), and
    then phi(x) = sqrt 2 sum h_n phi(2x - n), level - 1 times, begun with a unit impulse.

    The filters are those of synthesis for an orthogonal wavelet; the biorthogonal psi of
    decomposition is synthesised from the analysis filters, in reverse, and wavefun gives it the
    other sign but in bior1, rbio1, bior5 and rbio5.
    """
    wavelet = pywt.Wavelet(kind)
    low, high = wavelet.rec_lo, wavelet.rec_hi
    if not wavelet.orthogonal:
        low, high = wavelet.dec_lo[::-1], wavelet.dec_hi[::-1]
        if kind[4] not in "15":
            high = np.negative(high)
    samples = np.sqrt(2) * np.array(high)
    for _ in range(level - 1):
        spread = np.zeros(2 * len(samples) - 1)
        spread[::2] = samples
        samples = np.sqrt(2) * np.convolve(spread, low)
    return samples


def shifted(samples, level):
    """The cascade as wavefun has it: one 0 before, zeros after."""
    return np.concatenate([[0.0], samples, np.zeros(3 * 2**level)])


def table(kind, offsets, levels, shifts, mirrored=False):
    """p[r, c] = sample number t - shift, 0 outside, entry for entry."""
    out = np.zeros((len(offsets), len(levels)))
    for c, (level, shift) in enumerate(zip(levels, shifts, strict=True)):
        samples = pywt.Wavelet(kind).wavefun(level=int(level))[1]
        for r, offset in enumerate(offsets):
            number = (-offset if mirrored else offset) - shift
            if 0 <= number < len(samples):
                out[r, c] = samples[int(number)]
    return out


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("level", [1, 2, 3, 6])
def test_samples_are_those_of_the_cascade(kind, level):
    want = shifted(cascade(kind, level), level)
    got = wavepe.wavelet_table(len(want), [level], [0], kind=kind, dtype=np.float64)[:, 0]
    size = np.abs(want).max()
    assert size > 0.5
    assert_within(got, want, 1e-12 * size, f"{kind} level {level}")


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("mirrored", [None, False, True])
def test_every_entry(kind, mirrored):
    levels, shifts = np.repeat([1, 2, 4], 3), np.tile([-2, 0, 5], 3)
    offsets = np.array([-100, -6, -1, 0, 1, 2, 3, 17, 40, 10**6])
    for dtype in (np.float16, np.float32, np.float64):
        options = {"kind": kind, "mirrored": mirrored, "dtype": dtype}
        got = wavepe.wavelet_table(offsets, levels, shifts, **options)
        assert got.dtype == dtype
        assert_array_equal(got, table(kind, offsets, levels, shifts, bool(mirrored)).astype(dtype))


@pytest.mark.parametrize("kind", soon(PUBLISHED, *SOME))
def test_published_members(kind):
    """Mean 0, not nothing, finite, and none of it beyond the support of 2^level (filter - 1)."""
    p, first, beyond = wavepe.encoding(f"wavelet:kind={kind}").table(40000, 16)
    assert p.shape == (40000, 16)
    assert p.dtype == np.float32
    assert (first, beyond) == (0, "zero")
    taps = pywt.Wavelet(kind).dec_len
    for column in range(16):
        level = column // 2 + 1
        assert np.abs(p[:, column]).max() > 0.3
        # the Riemann sum of psi, whose integral is 0; dmey's filter is an approximation
        assert abs(p[:, column].sum(dtype=np.float64)) / 2**level < 1e-3
        assert not p[(taps + 3) * 2**level + 2 :, column].any()


def test_large_levels():
    got = wavepe.wavelet_table(1000, [16, 1], [0, 0], kind="db2", dtype=np.float64)
    samples = pywt.Wavelet("db2").wavefun(level=16)[1]
    assert len(samples) > 2**17
    assert_array_equal(got[:, 0], samples[:1000])
    short = wavepe.wavelet_table(1000, [1], [0], kind="db2", dtype=np.float64)
    assert_array_equal(got[:, 1], short[:, 0])


@pytest.mark.parametrize(
    ("spec", "dim", "levels"),
    [
        ("kind=db4,scales=3", 12, [1, 2, 3]),
        ("kind=db4,scales=1+2+3", 12, [1, 2, 3]),
        ("kind=db4,scales=5+2", 4, [5, 2]),
        ("kind=sym4", 8, range(1, 9)),
    ],
)
def test_a_number_of_scales_means_levels(spec, dim, levels):
    each = dim // len(levels)
    p = wavepe.encoding(f"wavelet:{spec}").table(60, dim)[0]
    columns = np.repeat(levels, each), np.tile(range(each), len(levels))
    assert_array_equal(p, table(spec[5:].split(",")[0], range(60), *columns).astype(np.float32))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("kind=db99", "unknown wavelet kind 'db99'; PyWavelets has db1, db2"),
        ("kind=bior9.9", r"PyWavelets has bior1\.1"),
        ("kind=db4,min_scale=2", "kind=db4 has levels as scales"),
        ("kind=db4,fixed_scale=true", "levels"),
        ("kind=db4,scales=17", "integers from 1 to 16; got 17"),
        ("kind=db4,scales=128", "got 128"),
        ("kind=db4,scales=2+128", "got 128"),
        ("kind=db4,scales=1.5+2", r"got 1\.5"),
        ("kind=db4,learned=true", "kind=db4 is sampled at integer levels"),
    ],
)
def test_options_that_mean_nothing(options, words):
    with pytest.raises(ValueError, match=words):
        wavepe.encoding(f"wavelet:{options}")


@pytest.mark.parametrize(
    ("scale", "shift", "words"),
    [
        (0, 0, "integers from 1 to 16; got 0"),
        *((level, 0, f"got {level:g}") for level in (-1, 17, 128, 1.5, np.nan, np.inf)),
        (2.0**127, 0, r"got 1\.70141e\+38"),
        (1, 0.5, r"shifts must be integers .* got 0\.5"),
        *((1, shift, f"got {shift:g}") for shift in (np.nan, np.inf)),
        (1, 1e30, "got 1e"),
    ],
)
def test_wrong_levels_and_shifts(scale, shift, words):
    with pytest.raises(ValueError, match=f"db4: .*{words}"):
        wavepe.wavelet_table(5, [scale], [shift], kind="db4")


def test_without_pywavelets():
    """Nothing but these kinds needs it, and importing wavepe does not load it."""
    script = """
import sys, wavepe
assert "pywt" not in sys.modules
sys.modules["pywt"] = None
wavepe.encoding("wavelet").table(4, 8)
for make in (
    lambda: wavepe.encoding("wavelet:kind=db4"),
    lambda: wavepe.wavelet_table(3, [1], [0], kind="sym2"),
):
    try:
        make()
    except ImportError as error:
        print(error)
try:
    wavepe.encoding("wavelet:kind=mexican")
except ValueError as error:
    print(error)
"""
    first, second, third = output("-c", script, start=forked).splitlines()
    needed = """the wavelet 'db4' needs pywt: pip install ".[pywt]" """
    assert first == needed + "(in the folder of the wavepe checkout)"
    assert "'sym2'" in second
    assert "unknown wavelet kind 'mexican'" in third


def test_torch_gives_what_numpy_gives(torch, ops):
    levels, shifts = wavepe.wavelet_grid(12, [1, 3, 2])
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        scale, shift = (torch.from_numpy(x).to(dtype) for x in (levels, shifts))
        for mirrored in (None, True):
            options = {"kind": "bior2.2", "mirrored": mirrored}
            got = ops.wavelet_table(40, scale, shift, **options)
            want = wavepe.wavelet_table(40, levels, shifts, dtype=np.float64, **options)
            assert torch.equal(got, torch.from_numpy(want).to(dtype))
    compiled = torch.compile(
        lambda n: ops.wavelet_table(n, scale, shift, kind="db2"), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(30), ops.wavelet_table(30, scale, shift, kind="db2"))


def test_torch_errors(torch, ops):
    ones, zeros = torch.ones(2), torch.zeros(2)
    with pytest.raises(RuntimeError, match="unknown kind 'db99'; PyWavelets has"):
        ops.wavelet_table(3, ones, zeros, kind="db99")
    with pytest.raises(RuntimeError, match="got 128"):
        ops.wavelet_table(3, 128 * ones, zeros, kind="db4")
    with pytest.raises(RuntimeError, match=r"'db4' is not differentiable.*levels and integers"):
        ops.wavelet_table(3, ones.requires_grad_(), zeros, kind="db4")


def test_in_a_model(torch):
    pytest.importorskip("transformers")
    from hf_model import LENGTH, close, logits, patched_tiny, reference, tokens

    row = tokens(1, 3 * LENGTH)

    def parts(length, **_):
        return {"relative": table("db2", range(length), np.repeat([1, 2], 4), [0, 1, 2, 3] * 2)}

    model = patched_tiny("wavelet:kind=db2,scales=2")
    assert close(logits(model, row)[0], reference(model, row[0], parts)[0])
