"""Kernel variants, the build's description, and what importing the package does."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import wavepe
from cases import assert_same_bits, generator, turn, using
from processes import forked, output
from variants import KNOWN, TEST_ONLY, all_of_them, of_this_cpu

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    """Processes of these tests get no settings of this one's, but as given."""
    for name in os.environ:
        if name.startswith(("WAVEPE_", "PYTEST_")):
            monkeypatch.delenv(name)


def test_variants_are_known_and_what_this_cpu_runs_is_listed():
    """A build without a variant that the CPU runs would be slow, and its tests would pass."""
    names = wavepe.variants()
    assert {"portable", *of_this_cpu()} <= set(names) <= set(KNOWN)
    assert len(set(names)) == len(names)
    assert wavepe.variant() in names


def test_default_is_the_widest():
    code = "import wavepe; print(wavepe.variant(), *wavepe.variants())"
    chosen, *names = output("-c", code, start=forked).split()
    assert chosen == max(names, key=KNOWN.index)


@pytest.mark.parametrize(
    "bad", ["avx1024", "", "AVX2", "portable ", None, 3, b"portable", ["portable"]]
)
def test_bad_names_are_refused_with_the_known_ones(bad):
    before, is_text = wavepe.variant(), isinstance(bad, str)
    with pytest.raises(ValueError if is_text else TypeError) as caught:
        wavepe.use_variant(bad)
    needed = [repr(bad), *wavepe.variants()] if is_text else []
    assert all(word in str(caught.value) for word in needed)
    assert wavepe.variant() == before


@pytest.mark.parametrize("name", [*KNOWN, TEST_ONLY])
def test_a_variant_runs_or_is_refused(name):
    """Listed variants run; any other known one is refused by its name, but the test-only one, which
    some builds take."""
    before = wavepe.variant()
    if name in wavepe.variants() or (name == TEST_ONLY and name in all_of_them()):
        with using(name):
            assert wavepe.variant() == name
    else:
        with pytest.raises(ValueError, match=name):
            wavepe.use_variant(name)
    assert wavepe.variant() == before


@pytest.mark.parametrize("name", wavepe.variants())
def test_environment_chooses(name):
    code = "import wavepe; print(wavepe.variant())"
    assert output("-c", code, start=forked, WAVEPE_VARIANT=name) == f"{name}\n"


def test_a_variant_of_another_cpu_is_known(monkeypatch):
    """Its name is known: the message says that this CPU or build has no such variant."""
    monkeypatch.setattr("wavepe._numpy.use_variant", lambda name: False)
    monkeypatch.setattr("wavepe._numpy.variants", lambda: ["portable", "avx2"])
    with pytest.raises(ValueError, match=r"'avx512' cannot run here.*use one of portable, avx2"):
        wavepe.use_variant("avx512")


def test_bad_environment_is_no_crash_and_not_silent():
    done = forked("-c", "import wavepe; print(wavepe.variant())", WAVEPE_VARIANT="sse9")
    assert done.returncode == 1, "killed by a signal, or nothing was wrong"
    assert "sse9" in done.stderr
    assert "portable" in done.stderr


def test_build_info():
    info = wavepe.build_info()
    assert info["version"] == wavepe.__version__
    assert set(wavepe.variants()) <= set(info["variants"]) <= set(KNOWN)
    assert isinstance(info["torch"], bool)
    assert isinstance(info["cuda_archs"], list)
    assert isinstance(info["compiler"], str)
    assert info["compiler"]
    assert re.fullmatch(r"\d+\.\d+.*", wavepe.__version__)


def test_import_needs_numpy_alone():
    """And it leaves subnormal numbers what they are."""
    code = (
        "import sys, wavepe; import numpy as np;"
        "wavepe.rope(np.ones((2, 4)), np.ones((2, 2)), np.zeros((2, 2)));"
        "wavepe.wavelet_table(3, *wavepe.wavelet_grid(8)); wavepe.encoding('wavelet');"
        "import wavepe.cli; assert 'analysis' in dir(wavepe);"
        "wavepe.analysis.rope_matrix(1, 4); wavepe.analysis.wavelet_transform([1.0], 1, 0);"
        "print({'torch', 'transformers', 'matplotlib', 'pywt', 'rich'} & {*sys.modules});"
        "print(np.float32(1e-38) / np.float32(16) != 0)"
    )
    assert output("-W", "error", "-c", code) == "set()\nTrue\n"


def test_calls_leave_the_rounding_mode_and_subnormals_alone(variant):
    x = np.ones((5, 66), np.float32)
    wavepe.rope(x, *turn(generator("mode"), (5, 33)))
    wavepe.relative_bias(x, x, 5)
    wavepe.ricker(x, np.float32(2), np.float32(0))
    assert np.float32(1e-38) / np.float32(16) != 0
    assert (1.0 + 2.0**-53, 1.0 - 2.0**-54) == (1.0, 1.0)


def results(name):
    """Sums of products, on one variant: out of the portable one they come without FMA."""
    rng = generator("agree")
    x, p, (cos, sin) = rng.normal(size=(9, 66)), rng.normal(size=(9, 66)), turn(rng, (9, 33), float)
    with using(name):
        return (
            wavepe.rope(x, cos, sin),
            wavepe.relative_bias(x, p, 9),
            wavepe.morlet(x, 3.0, 0.0),
            wavepe.attention(x[:1], x, p, causal=False),
        )


def test_variants_agree_to_a_few_roundings():
    """Not the judge (that is the oracle)."""
    for name in all_of_them():
        for a, b in zip(results(name), results("portable"), strict=True):
            assert np.allclose(a, b, rtol=0, atol=1e-12), name


@pytest.mark.skipif("avx2" not in wavepe.variants(), reason="one variant on this machine")
def test_variants_are_not_one_another():
    """A switch that did nothing would pass every other test: without FMA some sums end in other
    bits. AVX2 and AVX-512 agree in every bit, so this says nothing of a switch between them."""
    bits = {name: b"".join(x.tobytes() for x in results(name)) for name in all_of_them()}
    for name in set(bits) - {"portable"}:
        assert bits["portable"] != bits[name], name


@pytest.mark.parametrize("other", [TEST_ONLY, "avx512"])
def test_wide_variants_agree_bit_for_bit(other):
    if not {"avx2", other} <= set(all_of_them()):
        pytest.skip(f"this build or CPU has no {other}")
    rng = generator("bit for bit")
    for dtype in (np.float32, np.float64):
        q, p = rng.normal(size=(17, 97)).astype(dtype), rng.normal(size=(33, 97)).astype(dtype)
        with using("avx2"):
            want = wavepe.relative_bias(q, p, 20)
        with using(other):
            assert_same_bits(wavepe.relative_bias(q, p, 20), want)


def run_pytest(*arguments, code="", **environment):
    """Run some code, and pytest; return its status and what it said."""
    options = ["-q", "--assert=plain", "-p", "no:cacheprovider", *arguments]
    script = f"import sys; sys.path.insert(0, {str(HERE)!r})\n{code}\nimport pytest\n"
    script += f"sys.exit(pytest.main({options!r}))"
    done = forked("-c", script, **environment)
    return done.returncode, done.stdout + done.stderr


ONE = f"{HERE / 'test_variants.py'}::test_calls_leave_the_rounding_mode_and_subnormals_alone"


def test_a_variant_that_this_cpu_runs_and_the_build_lacks_fails_the_run():
    code = "import variants; variants.runs = lambda name: name != 'portable'"
    status, message = run_pytest(ONE, code=code)
    assert status == pytest.ExitCode.USAGE_ERROR
    listed = ", ".join(of_this_cpu())
    assert f"this CPU runs {listed}, and this build of wavepe lacks portable" in message
    assert "passed" not in message


def test_required_variants():
    assert run_pytest(ONE, WAVEPE_REQUIRE="portable")[0] == 0
    status, message = run_pytest(ONE, WAVEPE_REQUIRE="portable, sse9")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "unknown variants ['sse9']" in message
    missing = {*KNOWN, TEST_ONLY} - set(all_of_them())
    for name in missing:
        status, message = run_pytest(ONE, WAVEPE_REQUIRE=name)
        assert status == pytest.ExitCode.USAGE_ERROR
        assert f"WAVEPE_REQUIRE asks for {name}" in message
