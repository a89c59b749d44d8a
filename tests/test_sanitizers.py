"""The tests of the kernels again, on a build with AddressSanitizer and UndefinedBehaviorSanitizer.

What they find ends the process, so the tests run in a process of their own. The build stays in
build/sanitizer, where a later run compiles only what has changed.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import wavepe
from cases import compiler

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "sanitizer"
KERNELS = (
    "attention",
    "attention_bits",
    "attention_inputs",
    "relative_bias",
    "rope",
    "rope_reduction",
    "rope_table",
    "wavelet",
    "wavelet_table",
)
NUMPY_TESTS = [f"test_{name}.py" for name in (*KERNELS, "fuzz", "threads")]
EMULATED = ("fuzz", "relative_bias", "rope", "rope_in_place", "rope_table", "wavelet")
EMULATED_TESTS = [f"test_ops_{name}.py" for name in EMULATED]
# Left out: what compiles, traces or differentiates numerically calls no other kernel code.
LEFT_OUT = ("compile", "opcheck", "gradcheck", "derivatives", "qk_gradients", "transforms")
LEFT_OUT += ("composed", "composition", "is_the_hash")
OUT_OF_BOUNDS = """
import numpy as np, wavepe
def short(*shape):  # one element less than its shape says
    hole = np.ones(np.prod(shape) - 1, np.float32)
    return np.lib.stride_tricks.as_strided(hole, shape, np.empty(shape, np.float32).strides)
table = np.ones((2, 33), np.float32)
"""


def runtimes() -> list[str]:
    """The libraries that must be in the process before Python's own allocations."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = [*compiler(), f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if not os.path.isabs(path):
            pytest.skip(f"{shlex.join(compiler())} has no {name}: not GCC, or without sanitizers")
        found.append(path)
    return found


@pytest.fixture(scope="module")
def sanitized() -> dict[str, str]:
    """The environment in which `import wavepe` brings the sanitized build."""
    if not (ROOT / "setup.py").is_file():
        pytest.skip("not run from a source tree")
    if not shutil.which(compiler()[0]):
        pytest.skip(f"no compiler {compiler()[0]}")
    preload = runtimes()
    library = BUILD / "lib"
    for module in library.rglob("*.py"):  # one that has gone would stay there
        module.unlink()
    places = (f"--build-base={BUILD}", f"--build-lib={library}")
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build", "--parallel=2", *places],
        cwd=ROOT,
        env={**os.environ, "WAVEPE_SANITIZE": "1", "WAVEPE_EMULATE_CUDA": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        **os.environ,
        "PYTHONPATH": str(library),
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


def run_tests(names: list[str], environment: dict[str, str]) -> None:
    # -s: the report of a sanitizer would end with the process, in pytest's buffer
    options = ("-q", "-s", "-p", "no:cacheprovider", "-k", f"not ({' or '.join(LEFT_OUT)})")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(ROOT / "tests" / name) for name in names)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    report = re.search("ERROR: AddressSanitizer|runtime error:", done.stderr)
    start = max(report.start() - 200, 0) if report else 0
    said = f"{done.stdout[-4000:]}\n{done.stderr[start:][:2500]}"
    assert done.returncode == 0, said
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100, said


def test_numpy_side(sanitized):
    run_tests(NUMPY_TESTS, sanitized)


def test_torch_side(sanitized):
    if not wavepe.build_info()["torch"]:
        pytest.skip("wavepe was built without torch")
    run_tests(sorted(path.name for path in ROOT.glob("tests/test_ops_*.py")), sanitized)


def test_cuda_kernels_emulated(sanitized):
    """The operators that have CUDA kernels, whose sources run here one thread after the other: no
    GPU is involved, so nothing is said of races or of what a GPU computes otherwise."""
    if not wavepe.build_info()["torch"]:
        pytest.skip("wavepe was built without torch")
    run_tests(EMULATED_TESTS, sanitized | {"WAVEPE_TEST_EMULATED": "1"})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--emulated"],
        cwd=ROOT,
        env=sanitized,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[:2500]}"
    assert done.stdout.count("  ok  ") > 10
    assert done.stdout.splitlines()[-1].startswith("no GPU")


@pytest.mark.parametrize(
    ("call", "report"),
    [
        ("wavepe.rope(short(2, 67), table, table)", "READ of size"),
        ("wavepe.relative_bias(table, table, 9, out=short(2, 9))", "WRITE of size"),
    ],
    ids=["read", "write"],
)
def test_an_access_out_of_bounds_is_found(sanitized, variant, call, report):
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_BOUNDS + call],
        env=sanitized | {"WAVEPE_VARIANT": variant},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-4000:]
    assert report in done.stderr
    assert re.search(rf"#\d .*_f32_{variant} .*csrc/kernels/", done.stderr), done.stderr[-4000:]


def test_undefined_behaviour_is_checked_too(sanitized):
    """Overflow of signed integers too, which Python's own compiler flags make defined."""
    library = next(Path(sanitized["PYTHONPATH"]).glob("wavepe/_numpy*.so")).read_bytes()
    for handler in ("pointer_overflow", "add_overflow", "mul_overflow"):
        assert f"__ubsan_handle_{handler}".encode() in library
