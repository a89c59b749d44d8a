"""Fixture `variant`: every kernel variant in turn. One that this CPU should run and the build lacks
fails the run; WAVEPE_REQUIRE=portable,avx2,... asks for others instead. The last lines of a run say
which variants were tested."""

import collections
import gc
import os

# Before torch is loaded, and for the processes that tests start: small operators on several threads
# of a busy machine mostly wait. Tests of threads ask torch for theirs.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # PEFT asks the Hub about folders
# Triton's kernels run on the CPU (tests/attention_interpreted.py). On a GPU: TRITON_INTERPRET=0.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import wavepe
from cases import EMULATED, load_torch
from variants import KNOWN, TEST_ONLY, all_of_them, of_this_cpu, runs
from wavepe import _threads

REQUIRED = os.environ.get("WAVEPE_REQUIRE", "").replace(" ", "").split(",")
REQUIRED = tuple(filter(None, REQUIRED)) or tuple(of_this_cpu())
TESTED = [name for name in KNOWN if runs(name)]
if "avx512" not in TESTED and runs(TEST_ONLY):  # where avx512 runs, it would tell nothing new
    TESTED.append(TEST_ONLY)


def pytest_configure(config):
    known = (*KNOWN, TEST_ONLY)
    unknown = sorted(set(REQUIRED) - set(known))
    if unknown:
        raise pytest.UsageError(f"WAVEPE_REQUIRE: unknown variants {unknown}; known: {known}")
    missing = [name for name in REQUIRED if not runs(name)]
    if missing:
        why = "WAVEPE_REQUIRE asks for" if "WAVEPE_REQUIRE" in os.environ else "this CPU runs"
        raise pytest.UsageError(
            f"{why} {', '.join(REQUIRED)}, and this build of wavepe lacks {', '.join(missing)}: "
            "build it again, or say with WAVEPE_REQUIRE=portable,... what is wanted"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """After everything else, the skipped tests too: the variants, by the tests that ran on each."""
    result = yield
    ran = collections.Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            ran.update({value for name, value in report.user_properties if name == "variant"})
    if ran:
        known = (*KNOWN, TEST_ONLY)
        tests = {name: f"{ran[name]} test{'s' * (ran[name] > 1)}" for name in known}
        tested = [f"{name} ({tests[name]})" for name in known if ran[name]]
        others = [f"{name} ({why_not(name)})" for name in known if not ran[name]]
        terminalreporter.write_line(f"variants tested: {', '.join(tested)}")
        terminalreporter.write_line(f"variants not tested: {', '.join(others) or 'none'}")
    return result


def why_not(name):
    if runs(name):
        return "no test that ran uses it"
    if name == TEST_ONLY:
        return "only in builds with WAVEPE_TEST_VARIANT=1, for CPUs with AVX2"
    return "this CPU does not run it, or the build lacks it"


@pytest.hookimpl(trylast=True)  # hypothesis marks its tests first
def pytest_collection_modifyitems(items):
    """The longest first: at the end they would keep one core busy while the others wait."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if seed := os.environ.get("WAVEPE_HYPOTHESIS_SEED"):  # `make fuzz`: other examples each time
        hypothesis = pytest.importorskip("hypothesis")
        for item in items:
            if item.get_closest_marker("hypothesis"):
                hypothesis.seed(int(seed))(item.function)


def pytest_collection_finish():
    """What was imported stays: the collector, and what looks at all its objects, may skip it.

    `wavepe.hf.patch` looks for caches among them, which takes longer than the rest of a tiny test.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # else Triton calls what is frozen leaked


if EMULATED:  # see test_sanitizers.py
    load_torch()[0].ops.wavepe.emulate_cuda(True)


@pytest.fixture(params=TESTED)
def variant(request):
    """Switch to one variant for a test, and back."""
    before = wavepe.variant()
    wavepe.use_variant(request.param)
    request.node.user_properties.append(("variant", request.param))
    yield request.param
    wavepe.use_variant(before)


@pytest.fixture
def every_variant(request):
    """For tests that run all of them by themselves, with fuzz.py: the summary counts them."""
    names = [wavepe.variant()] if EMULATED else all_of_them()
    request.node.user_properties += [("variant", name) for name in names]


@pytest.fixture(scope="module")
def torch():
    """For the tests of a module that need torch where others do not."""
    return load_torch()[0]


@pytest.fixture
def small_pieces(monkeypatch):
    """NumPy's functions use threads for small arrays, too."""
    monkeypatch.setattr(_threads, "LEAST_ELEMENTS", 16)
    yield
    wavepe.set_num_threads(1)


@pytest.fixture
def pools(small_pieces, monkeypatch):
    """How many workers each pool had: without it a test of threads could pass without any."""
    used = []

    class Counting(_threads.ThreadPoolExecutor):
        def __init__(self, workers):
            used.append(workers)
            super().__init__(workers)

    monkeypatch.setattr(_threads, "ThreadPoolExecutor", Counting)
    return used
