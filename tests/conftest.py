"""Fixture `variant`: every kernel variant in turn. WAVEPE_REQUIRE=portable,avx2,... makes a missing
one a failure."""

import os

# Before torch is loaded, and for the processes that tests start: small operators on several threads
# of a busy machine mostly wait. Tests of threads ask torch for theirs.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # PEFT asks the Hub about folders

import pytest
import wavepe
from cases import EMULATED, load_torch
from wavepe import _threads

KNOWN = ("portable", "avx2", "avx512")
PRESENT = tuple(wavepe.variants())
REQUIRED = tuple(filter(None, os.environ.get("WAVEPE_REQUIRE", "").replace(" ", "").split(",")))
MISSING = tuple(name for name in KNOWN if name not in PRESENT)


def pytest_configure(config):
    unknown = sorted(set(REQUIRED) - set(KNOWN))
    if unknown:
        raise pytest.UsageError(f"WAVEPE_REQUIRE: unknown variants {unknown}; known: {list(KNOWN)}")


def pytest_report_header(config):
    lines = [f"wavepe {wavepe.__version__}, variants tested: {', '.join(PRESENT)}"]
    for name in MISSING:
        fate = "required: tests fail" if name in REQUIRED else "skipped"
        lines.append(f"wavepe variant {name}: not in this build or not run by this CPU, {fate}")
    return lines


def pytest_collection_modifyitems(items):
    """The longest first: at the end they would keep one core busy while the others wait."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


if EMULATED:  # see test_sanitizers.py
    load_torch()[0].ops.wavepe.emulate_cuda(True)


@pytest.fixture(params=[name for name in KNOWN if name in PRESENT or name in REQUIRED])
def variant(request):
    """Switch to one variant for a test, and back."""
    if request.param in MISSING:
        pytest.fail(
            f"variant {request.param} is required, but not in this build or not run by this CPU"
        )
    before = wavepe.variant()
    wavepe.use_variant(request.param)
    yield request.param
    wavepe.use_variant(before)


@pytest.fixture(scope="module")
def torch():
    """For the tests of a module that need torch where others do not."""
    return load_torch()[0]


@pytest.fixture
def small_pieces(monkeypatch):
    """NumPy's functions use threads for small arrays, too."""
    monkeypatch.setattr(_threads, "PIECE", 16)
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
