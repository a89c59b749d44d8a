"""The tests of the kernels again, on a build with AddressSanitizer and UndefinedBehaviorSanitizer
(sanitizer_build.py). What these find ends the process, so the tests run in a process of their own:
without --all, for each pair of parameters shows a kernel all that it reads and writes.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import sanitizer_build
from cases import HAS_TORCH
from second_build import ROOT, numpy_tests, torch_tests
from variants import TEST_ONLY, of_this_cpu, usual

pytestmark = pytest.mark.slow

# Left out: what compiles, traces, differentiates numerically or starts processes calls no other
# kernel code.
LEFT_OUT = ("compile", "opcheck", "gradcheck", "derivatives", "transforms", "vmap")
LEFT_OUT += ("composed", "composition", "is_the_hash", "the_command", "a_crash", "private_names")
LEFT_OUT += ("another_variant_meanwhile",)  # less optimised, all variants give the same bits
LEFT_OUT += ("threads_runs",)  # the same calls on more threads
NO_CUDA_KERNEL = ("attention", "relative_table")
VARIANTS = (*of_this_cpu(), TEST_ONLY)
# torch's conversion of a string argument keeps a copy: pytorch/pytorch#191340, mended after 2.13
STRING_OF_TORCH = "torch::stable::detail::ToImpl<std::"
OUT_OF_BOUNDS = """
import numpy as np, wavepe
def short(*shape):  # one element less than its shape says
    hole = np.ones(np.prod(shape) - 1, np.float32)
    return np.lib.stride_tricks.as_strided(hole, shape, np.empty(shape, np.float32).strides)
table = np.ones((2, 33), np.float32)
"""


@pytest.fixture(scope="session")
def sanitized():
    """The environment in which `import wavepe` brings the sanitized build."""
    try:
        return sanitizer_build.environment()
    except sanitizer_build.Unavailable as reason:
        pytest.skip(str(reason))


def run_python(*words, environment, **options):
    command = [sys.executable, *map(str, words)]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 1200} | options
    return subprocess.run(command, env=environment, **options)


def run_tests(names, environment, folder, variants=VARIANTS):
    # -s: the report of a sanitizer would end with the process, in pytest's buffer
    results = folder / "results.xml"
    options = ("-q", "-s", "-p", "no:cacheprovider", "-k", f"not ({' or '.join(LEFT_OUT)})")
    options += (f"--junitxml={results}", *(ROOT / "tests" / name for name in names))
    done = run_python("-m", "pytest", *options, environment=environment)
    report = re.search("ERROR: AddressSanitizer|runtime error:", done.stderr)
    start = max(report.start() - 200, 0) if report else 0
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[start:][:2500]}"
    check_results(ElementTree.parse(results), names, variants)


def check_results(results, names, variants):
    """Each test passed or said why it did not run, each file has some that passed, and they ran on
    all these variants."""
    cases = list(results.iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = [case for case in cases if case not in skipped]
    (suite,) = results.iter("testsuite")
    assert int(suite.get("tests")) == len(passed) + len(skipped)
    assert not [case.get("name") for case in passed if case.find("failure") is not None]
    of_files = {case.get("classname").split(".")[1] for case in passed}
    assert of_files == {name.removesuffix(".py") for name in names}
    properties = [p for case in passed for p in case.iter("property") if p.get("name") == "variant"]
    assert {p.get("value") for p in properties} == set(variants)


# Random calls are made by the test of leaks.
@pytest.mark.parametrize("side", ["numpy", "torch"])
def test_kernels(sanitized, tmp_path, side):
    if side == "torch" and not HAS_TORCH:
        pytest.skip("wavepe was built without torch")
    left_out = (*LEFT_OUT, "fuzz")
    names = torch_tests(left_out) if side == "torch" else numpy_tests()
    run_tests([name for name in names if "fuzz" not in name], sanitized, tmp_path)


def test_cuda_kernels_emulated(sanitized, tmp_path):
    """The operators that have CUDA kernels, whose sources run here one thread after the other: no
    GPU is involved, so this finds neither races nor other faults of a GPU."""
    if not HAS_TORCH:
        pytest.skip("wavepe was built without torch")
    emulated = sanitized | {"WAVEPE_TEST_EMULATED": "1"}
    names = torch_tests((*LEFT_OUT, *NO_CUDA_KERNEL))
    run_tests(names, emulated, tmp_path, usual(VARIANTS))
    words = ("-m", "benchmarks.gpu_tasks", "--dry", "1000", "check kernels")
    done = run_python(*words, environment=sanitized)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[:2500]}"
    row = json.loads(done.stdout)
    assert len(row["checks"]) > 10, row
    assert all(check["error"] <= 1 for check in row["checks"]), row


def leaks(environment, code):
    """LeakSanitizer's reports of what a process that runs the code never freed."""
    environment = environment | sanitizer_build.leaks() | {"OMP_NUM_THREADS": "1"}
    code += "\nprint('came to the end')"
    done = run_python("-c", code, environment=environment, cwd=ROOT / "tests")
    if "LeakSanitizer has encountered a fatal error" in done.stderr:
        pytest.skip("LeakSanitizer may not trace processes here")
    assert "came to the end" in done.stdout, done.stderr[-4000:]
    return re.findall(r"^Direct leak of .*?(?=\n\n)", done.stderr, re.M | re.S)


def test_no_call_leaks(sanitized):
    code = "import fuzz\nfor name in fuzz.NAMES:\n"
    code += "    fuzz.make_calls(name, range(100 if name == 'ops.attention' else 40))"
    ours = [report for report in leaks(sanitized, code) if "wavepe/_" in report]
    found = [report for report in ours if STRING_OF_TORCH not in report]
    assert not found, "\n\n".join(found)


def test_a_leak_would_be_found(sanitized):
    found = leaks(sanitized, "import ctypes\nctypes.CDLL(None).malloc(54321)")
    assert sum("leak of 54321 byte(s) in 1 object" in report for report in found) == 1


@pytest.mark.parametrize(
    ("call", "report"),
    [
        ("wavepe.rope(short(2, 67), table, table)", "READ of size"),
        ("wavepe.relative_bias(table, table, 9, out=short(2, 9))", "WRITE of size"),
    ],
    ids=["read", "write"],
)
def test_an_access_out_of_bounds_is_found(sanitized, variant, call, report):
    done = run_python(
        "-c", OUT_OF_BOUNDS + call, environment=sanitized | {"WAVEPE_VARIANT": variant}
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
