"""ricker, gaussian, morlet, haar: ufuncs against the oracle, in every variant, and as NumPy's own
ufuncs behave."""

import itertools
import warnings

import numpy as np
import oracle
import pytest
import wavepe
from cases import LAYOUTS, SIZES, assert_same_bits, assert_within, generator, lay_out, psi_bound

FLOATS = (np.float16, np.float32, np.float64)
each_kind = pytest.mark.parametrize("kind", oracle.KINDS)
each_dtype = pytest.mark.parametrize("dtype", FLOATS)


def check(kind, got, t, scale, shift, dtype, what=""):
    exact = oracle.psi(kind, t, scale, shift, dtype)
    with np.errstate(all="ignore"):
        t, scale, shift = (np.asarray(a).astype(dtype) for a in (t, scale, shift))
        u = (t - shift).astype(np.float64) / scale.astype(np.float64)
    assert got.dtype == dtype
    assert_within(got, exact, psi_bound(kind, u, dtype), f"{kind} {np.dtype(dtype)} {what}")


def inputs(rng, n, dtype):
    """(t, scale, shift) with abs(u) mostly below 8 and both signs of the scale."""
    scale = rng.choice([-2.0, 0.3, 1.0, 1.5, 8.0, 128.0], n)
    shift = rng.integers(-20, 20, n) / 2
    return [a.astype(dtype) for a in (rng.uniform(-8, 8, n) * scale + shift, scale, shift)]


@each_kind
@each_dtype
def test_sizes_and_layouts(variant, kind, dtype):
    psi, rng = getattr(wavepe, kind), generator(kind)
    for n in SIZES:
        for layout in LAYOUTS:
            t, scale, shift = (lay_out(a, layout) for a in inputs(rng, n, dtype))
            check(kind, psi(t, scale, shift), t, scale, shift, dtype, f"n={n} {layout}")


@each_kind
@each_dtype
def test_dense_sweep(variant, kind, dtype):
    for t, scale, shift in ((np.linspace(-14, 14, 4001), 1, 0), (np.arange(-600, 600), 48, 7)):
        given = t.astype(dtype), dtype(scale), dtype(shift)
        check(kind, getattr(wavepe, kind)(*given), *given, dtype)


def test_values_of_the_papers(variant):
    t = np.array([0, 0.5, 1, 3**0.5, 2, 4])
    ricker = [1, 0.6618726769, 0, -0.4462603203, -0.4060058497, -0.0050319394]
    assert np.allclose(wavepe.ricker(t, 1.0, 0.0), ricker, rtol=0, atol=1e-10)
    assert wavepe.ricker(1.0, 1.0, 0.0) == 0
    at = [(2, 1, 0), (3, 2, 1), (10, 8, 3), (511, 128, 15), (-3, 2, 1), (-10, 8, 3)]
    p = [-0.4060058497, 0, 0.1598298636, -0.0076914980, -0.4060058497, -0.4381319172]
    assert np.allclose([wavepe.ricker(*map(float, a)) for a in at], p, rtol=0, atol=1e-10)
    # [W] Eq. 15: +1 on [-0.5, 0), -1 on [-1, -0.5), 0 elsewhere.
    t = np.array([-1.001, -1, -0.75, -0.501, -0.5, -0.25, -1e-9, -0.0, 0, 0.5, 1])
    assert wavepe.haar(t, 1.0, 0.0).tolist() == [0, -1, -1, -1, 1, 1, 1, 0, 0, 0, 0]
    # The cosine of morlet is not scaled: one radian per token at every scale.
    assert wavepe.morlet(3.0, 1e12, 1.0) == pytest.approx(np.cos(2.0), rel=1e-15)
    assert wavepe.gaussian(3.0, 2.0, 1.0) == pytest.approx(np.exp(-1.0), rel=1e-15)


@each_dtype
def test_haar_at_its_jumps(variant, dtype):
    scale = np.array([1, 3, 5, 7, 11, 13, 0.3, 1 / 3, 49, 127, 1000], dtype)[:, None]
    at = np.array([-1, -0.5], dtype) * scale
    beside_zero = np.array([-1, 0, 1], dtype) * np.finfo(dtype).tiny * dtype(2048)
    below, above = (np.nextafter(at, dtype(end)) for end in (-np.inf, np.inf))
    t = np.concatenate([below, at, above, 0 * at[:, :1] + beside_zero], 1)
    check("haar", wavepe.haar(t, scale, dtype(0)), t, scale, dtype(0), dtype)


@each_dtype
def test_tails_are_exactly_zero(variant, dtype):
    """Where the value rounds to 0 it is 0, not a remainder of an approximated exp."""
    far = {np.float16: 8, np.float32: 20, np.float64: 40}[dtype]
    with np.errstate(over="ignore"):
        t = (far * np.geomspace(1, np.finfo(dtype).max / 2 / far, 333)).astype(dtype)
    for kind in oracle.KINDS:
        for sign in (1, -1):
            got = getattr(wavepe, kind)(dtype(sign) * t, dtype(1), dtype(0))
            assert not got.any(), f"{kind}: {got[got != 0]} at {t[got != 0]}"


@each_kind
@each_dtype
def test_special_values_without_a_warning(variant, kind, dtype):
    psi, inf, nan = getattr(wavepe, kind), np.inf, np.nan
    big, small = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    values = {  # of (t, scale, shift)
        0: [(inf, 1, 0), (-inf, 1, 0), (inf, -2, 0), (0, 1, inf), (0, 1, -inf), (big, 1, -big),
            (big, small, 0), (-big, 0.5, 1)],
        "peak": [(small, big, 0), (-small, -big, 0), (0, inf, 0), (2, -inf, 2)],
        nan: [(nan, 1, 0), (0, nan, 0), (0, 1, nan), (inf, inf, 0), (-inf, inf, 0), (inf, 1, inf),
              (-inf, 3, -inf)],
    }  # fmt: skip
    for value, places in values.items():
        want = value if value != "peak" else 0.0 if kind == "haar" else 1.0
        for given, n in itertools.product(places, (1, 3, 8, 17, 33)):
            with warnings.catch_warnings(), np.errstate(all="raise"):
                warnings.simplefilter("error")
                got = psi(*(np.full(n, x, dtype) for x in given))
            assert np.array_equal(got, np.full(n, want), equal_nan=True), (given, got)


@each_kind
@each_dtype
def test_no_warning_at_ordinary_and_extreme_values(variant, kind, dtype):
    """Padding lanes of a short row must not divide by zero, and neither exp nor a product may
    report an underflow."""
    psi, rng, info = getattr(wavepe, kind), generator(kind, "flags"), np.finfo(dtype)
    limits = np.array([0, info.smallest_subnormal, info.tiny, 1, 3, 11, 100, info.max], dtype)
    limits = np.concatenate([limits, -limits])
    with np.errstate(all="raise"):
        for n in SIZES:
            psi(*inputs(rng, n, dtype))
            psi(rng.choice(limits, n), rng.choice(limits[limits != 0], n), rng.choice(limits, n))
        psi(limits[:, None], dtype(1.5), limits)


@each_kind
@each_dtype
def test_scale_zero_is_nan_and_invalid(variant, kind, dtype):
    psi, places = getattr(wavepe, kind), (0, 1, -1, np.inf, -np.inf, np.finfo(dtype).max)
    for t, zero, n in itertools.product(places, (dtype(0), dtype(-0.0)), (1, 7, 19)):
        row, scale = np.full(n, t, dtype), np.ones(n, dtype)
        scale[-1] = zero
        with np.errstate(all="raise", invalid="ignore"):
            got = psi(row, scale, dtype(0))
        assert np.isnan(got).tolist() == [False] * (n - 1) + [True], (t, zero, n)
        for of_all in (scale, zero):  # or one scale for all
            with (
                np.errstate(all="ignore", invalid="raise"),
                pytest.raises(FloatingPointError, match=f"invalid value .* {kind}"),
            ):
                psi(row, of_all, dtype(0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_morlet_of_huge_arguments(variant, dtype):
    """The cosine is right for every finite argument; a scale as large keeps the Gaussian factor
    from hiding it."""
    rng, info = generator("huge"), np.finfo(dtype)
    exponent = np.arange(0, info.maxexp)
    t = np.ldexp(rng.uniform(0.5, 1, (4, len(exponent))), exponent).astype(dtype).ravel()
    t = np.concatenate([t, -t, [info.max, -info.max]]).astype(dtype)
    with np.errstate(over="ignore"):
        scale = (t * rng.choice([0.75, 1.5, 2.5], t.shape)).astype(dtype)
    scale = np.where(np.isfinite(scale), scale, t)
    check("morlet", wavepe.morlet(t, scale, dtype(0)), t, scale, dtype(0), dtype)
    # Right beside the zeros of cos.
    t = (np.pi * (np.arange(2000) + 0.5)).astype(dtype)
    check("morlet", wavepe.morlet(t, dtype(1e30), dtype(0)), t, dtype(1e30), dtype(0), dtype)


def test_difference_is_rounded_first(variant):
    t, shift = np.float32(2**24 + 2), np.float32(1.5)
    assert wavepe.morlet(t, np.float32(1e30), shift) == pytest.approx(np.cos(2.0**24), rel=1e-6)
    t, shift = np.float16(2050), np.float16(0.5)
    assert wavepe.morlet(t, np.float16(np.inf), shift) == np.float16(np.cos(2050.0))


@each_kind
def test_broadcasting(variant, kind):
    psi, rng = getattr(wavepe, kind), generator(kind, "broadcast")
    t, scale, shift = rng.normal(size=(5, 1, 1)), np.array([1.0, 2, 3]), np.arange(4.0)[:, None]
    got = psi(t, scale, shift)
    assert got.shape == (5, 4, 3)
    full = np.broadcast_arrays(t, scale, shift)
    assert_same_bits(got, psi(*(np.ascontiguousarray(a) for a in full)))
    check(kind, got, *full, np.float64)
    assert psi(1.0, 2.0, 3.0).shape == ()
    assert isinstance(psi(1.0, 2.0, 3.0), np.float64)
    assert psi(np.empty((0, 3)), 1.0, 0.0).shape == (0, 3)
    with pytest.raises(ValueError, match="broadcast"):
        psi(np.ones(3), np.ones(2), 0.0)


@each_kind
def test_out_where_dtype(variant, kind):
    psi, rng = getattr(wavepe, kind), generator(kind, "where")
    t = rng.normal(size=37)
    mask = rng.random(37) < 0.5
    out = np.full(37, 7.0)
    psi(t, 1.5, 0.5, out=out, where=mask)
    assert (out[~mask] == 7).all()
    assert_same_bits(out[mask], psi(t, 1.5, 0.5)[mask])
    for narrow in (np.float32, np.float16):
        got = psi(t, 1.5, 0.5, dtype=narrow)
        assert_same_bits(got, psi(t.astype(narrow), narrow(1.5), narrow(0.5)))
    assert_same_bits(psi(t, 1.5, 0.5, out=np.empty(37, np.float32)), psi(t, 1.5, 0.5).astype("f4"))
    in_place = t.copy()
    assert psi(in_place, 1.5, 0.5, out=in_place) is in_place
    assert_same_bits(in_place, psi(t, 1.5, 0.5))
    overlap = np.concatenate([t, t])
    want = psi(overlap[:-3].copy(), 1.5, 0.5)
    assert_same_bits(psi(overlap[:-3], 1.5, 0.5, out=overlap[3:]), want)
    with pytest.raises(ValueError, match="36"):
        psi(t, 1.5, 0.5, out=np.empty(36))
    with pytest.raises(TypeError, match=r"float64.*int64"):
        psi(t, 1.5, 0.5, out=np.empty(37, np.int64))
    with pytest.raises(ValueError, match="read-only"):
        psi(t, 1.5, 0.5, out=np.broadcast_to(np.float64(0), (37,)))


@each_kind
def test_types_promote_as_numpy_does(variant, kind):
    psi = getattr(wavepe, kind)
    types = [bool, *"bhiqBHIQefd"]
    values = [np.ones(3, t) for t in types] + [1, 1.0, np.float32(1), np.int8(1)]
    for t in values:
        for scale in values:
            want = np.hypot(np.hypot(t, scale), t)
            got = psi(t, scale, t)
            assert got.dtype == want.dtype, (t, scale)
            check(kind, np.asarray(got), t, scale, t, want.dtype)
    swapped = np.linspace(-2, 2, 9).astype(">f4")
    of_native = psi(swapped.astype("f4"), np.float32(1), np.float32(0))
    assert_same_bits(psi(swapped, np.float32(1), np.float32(0)), of_native)
    for bad in (1j, "1", None, np.longdouble(1), np.datetime64(0, "s")):
        with pytest.raises(TypeError, match=f"'{kind}' not supported|convert"):
            psi(bad, 1.0, 0.0)


@each_kind
@each_dtype
def test_bits_do_not_depend_on_place_or_layout(variant, kind, dtype):
    psi, rng = getattr(wavepe, kind), generator(kind, "bits")
    t, scale, shift = inputs(rng, 97, dtype)
    whole = psi(t, scale, shift)
    for start in range(0, 20):
        for stop in (start, start + 1, start + 7, start + 33, 97):
            cut = slice(start, stop)
            assert_same_bits(psi(t[cut], scale[cut], shift[cut]), whole[cut], f"{start}:{stop}")
    for layout in ("sliced", "negative", "offset", "unaligned"):
        assert_same_bits(psi(*(lay_out(a, layout) for a in (t, scale, shift))), whole, layout)
    assert_same_bits(np.array([psi(*a) for a in zip(t, scale, shift, strict=True)]), whole)
