"""Fixtures of all tests. `variant` runs a test with every kernel variant.

The run fails if the build lacks a variant that this CPU should run.
WAVEPE_REQUIRE=portable,avx2,... names other variants instead. The last lines of a run list the
tested variants.
"""

import atexit
import collections
import fnmatch
import gc
import heapq
import importlib
import itertools
import os

# Most of what imports and models make lives on. The default looks at it all after 700 objects.
gc.set_threshold(50_000)

# This must be set before torch is loaded. It is also for processes that tests start. On a busy
# machine, small operators with several threads mostly wait. Tests of threads set their own number.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # PEFT would look for folders on the Hub
# Triton's kernels run on the CPU (test_ops_attention_interpreted.py). On a GPU: TRITON_INTERPRET=0.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import wavepe
from cases import EMULATED, forget_registrations, load_torch
from variants import KNOWN, TEST_ONLY, all_of_them, of_this_cpu, runs, usual
from wavepe.arrays import threads

# Files of tests, without test_, and what they need beside NumPy: elsewhere they are skipped.
NEEDS = {
    "ops_* nn_* analysis combinations cuda docstrings rope_known_bugs self_extend": "torch",
    "hf* analysis_models examples* device_calls distributed kept": "torch transformers",
    "benchmarks* cli_* compare* docs experiments faults notebooks":
        "torch transformers rich matplotlib",
    "*_adapt": "accelerate",
}  # fmt: skip

REQUIRED = os.environ.get("WAVEPE_REQUIRE", "").replace(" ", "").split(",")
REQUIRED = tuple(filter(None, REQUIRED)) or tuple(of_this_cpu())
TESTED = usual(all_of_them())


def pytest_addoption(parser):
    text = "run the long tail too: tests marked slow, and all combinations of parameters"
    parser.addoption("--all", action="store_true", help=text)
    text = "leave the long tail out although tests are named, which else run in full"
    parser.addoption("--quick", action="store_true", help=text)


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


class File(pytest.Module):
    """A file of tests; where something of NEEDS is missing, it is skipped and not imported."""

    def collect(self):
        name = self.path.stem.removeprefix("test_")
        for files, needed in NEEDS.items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in files.split()):
                load_torch()
                for package in needed.split():
                    pytest.importorskip(package)
        return super().collect()


def pytest_pycollect_makemodule(module_path, parent):
    return File.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """Print the variants at the end, with the number of tests of each."""
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


def is_quick(config):
    named = any("::" in argument for argument in config.args) or config.option.markexpr
    return config.getoption("--quick") or not (config.getoption("--all") or named)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """Leave the long tail out, but with --all: as items, it would take seconds in each process."""
    yield
    if is_quick(metafunc.config):
        calls = [x for x in metafunc._calls if all(mark.name != "slow" for mark in x.marks)]
        spare = beyond_pairs([call.params for call in calls])
        kept = [call for place, call in enumerate(calls) if place not in spare]
        metafunc._calls = kept or metafunc._calls  # without any, pytest would ask for no values


@pytest.hookimpl(trylast=True)  # hypothesis marks its tests first
def pytest_collection_modifyitems(config, items):
    """Leave slow tests out, but with --all. The longest ones come first: at the end, cores wait."""
    if is_quick(config):
        slow = {item for item in items if item.get_closest_marker("slow")}
        config.hook.pytest_deselected(items=list(slow))
        items[:] = [item for item in items if item not in slow]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if seed := os.environ.get("WAVEPE_HYPOTHESIS_SEED"):  # `make fuzz`: other examples each time
        hypothesis = pytest.importorskip("hypothesis")
        for item in items:
            if item.get_closest_marker("hypothesis"):
                hypothesis.seed(int(seed))(item.function)


def beyond_pairs(calls):
    """Return the places of the calls of a test that show no new pair of values of its parameters.

    The test-only variant need not be shown with each of the other values.
    """
    shown, texts = [], {}  # values are shared, and the text of a tensor is slow
    for given in calls:
        texts |= {id(value): repr(value) for value in given.values() if id(value) not in texts}
        values = [(name, texts[id(given[name])]) for name in sorted(given)]
        rare = {("variant", repr(TEST_ONLY))} & set(values)
        pairs = itertools.combinations(values, 2)
        shown.append({p for p in pairs if rare.isdisjoint(p)} | rare or set(values))
    left = set().union(*shown)
    spare = set(range(len(calls)))
    # How many new pairs each call shows at most; this number only falls.
    heap = [(-len(shown[place]), place) for place in spare]
    heapq.heapify(heap)
    while left:
        most, place = heap[0]
        new = shown[place] & left
        if len(new) < -most:
            heapq.heapreplace(heap, (-len(new), place))
            continue
        heapq.heappop(heap)
        left -= new
        spare.remove(place)
    return spare if len(calls) > 1 else set()


@pytest.fixture(scope="module", autouse=True)
def freeze():
    """Freeze what is there: Trainer's collections of garbage would take longer than the tests."""
    gc.collect()
    gc.freeze()


atexit.register(gc.unfreeze)  # Triton would report frozen objects as leaked


if EMULATED:  # see test_sanitizers.py
    load_torch()[0].ops.wavepe.emulate_cuda(True)


@pytest.fixture(params=TESTED)
def variant(request):
    """Use one variant in a test, and then the earlier one again."""
    before = wavepe.variant()
    wavepe.use_variant(request.param)
    request.node.user_properties.append(("variant", request.param))
    yield request.param
    wavepe.use_variant(before)


@pytest.fixture
def every_variant(request):
    """Count a test that runs all variants itself, by fuzz.py, for the summary."""
    names = [wavepe.variant()] if EMULATED else all_of_them()
    request.node.user_properties += [("variant", name) for name in names]


@pytest.fixture(scope="module")
def torch():
    """Return torch, or skip the test, in a module whose other tests do not need torch."""
    return load_torch()[0]


@pytest.fixture(scope="module")
def ops():
    """Return wavepe.ops, or skip the test."""
    return load_torch()[1]


@pytest.fixture(scope="module")
def hf(torch):
    """Return the helpers of tiny Llamas, or skip the test."""
    pytest.importorskip("transformers")
    return importlib.import_module("hf_model")


@pytest.fixture
def own(monkeypatch):
    """Let registers of encodings and wavelets forget what the test adds."""
    forget_registrations(monkeypatch)


@pytest.fixture
def fresh_compiler(torch):
    """Let Dynamo begin and end without graphs of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def small_pieces(monkeypatch):
    """Let the functions for NumPy use threads for small arrays too."""
    monkeypatch.setattr(threads, "LEAST_ELEMENTS", 16)
    yield
    wavepe.set_num_threads(1)


@pytest.fixture
def pools(small_pieces, monkeypatch):
    """Return a list of each pool's workers. It shows that a test of threads used threads."""
    used = []

    class Counting(threads.ThreadPoolExecutor):
        def __init__(self, workers):
            used.append(workers)
            super().__init__(workers)

    monkeypatch.setattr(threads, "ThreadPoolExecutor", Counting)
    return used
