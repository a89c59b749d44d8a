"""The benchmarks on tiny sizes: what a run writes, and when it fails."""

import contextlib
import functools
import importlib
import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import using
from processes import forked, output

ROOT = Path(__file__).parent.parent

import wavepe
import wavepe.ops as ops

from benchmarks import bench
from benchmarks.case import Case, Compiler, judge
from benchmarks.memory import Allocator
from benchmarks.timing import Timing, take_turns

QUICK = ["--quick", "--repeats", "1"]
OPERATORS = ("attention", "relative_bias", "rope", "rope_table", "wavelet_table")
LONGER = sorted({*OPERATORS} - {"relative_bias"})  # whose rivals take longer to compile


def run(folder, *words):
    """(exit code, results, what was printed)"""
    file, printed = folder / "results.json", io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = bench.main([*words, *QUICK, "--json", str(file)])
    return code, json.loads(file.read_text()), printed.getvalue()


@pytest.fixture(scope="module")
def wavelets(tmp_path_factory):
    """A run of one operator, whose results several tests read."""
    return run(tmp_path_factory.mktemp("run"), "wavelet_table")


def rows_of(results, op, **wanted):
    rows = [row for row in results["rows"] if row["op"] == op]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


@pytest.mark.parametrize("operator", OPERATORS)
def test_quick_run(operator, wavelets, tmp_path):
    assert tuple(sorted(bench.operators())) == OPERATORS
    before = wavepe.variant(), torch.get_num_threads()
    shared = operator == "wavelet_table"
    code, results, printed = wavelets if shared else run(tmp_path, operator)
    assert code == 0
    assert before == (wavepe.variant(), torch.get_num_threads())
    ours = [row for row in results["rows"] if row["who"] == "wavepe"]
    assert {row["variant"] for row in ours} == set(wavepe.variants())
    for row in ours:
        assert row["ok"] is True
        assert 0 <= row["error_of_bound"] <= 1
        seconds = row["seconds"]
        assert 0 < seconds["min"] <= seconds["p10"] <= seconds["median"] <= seconds["p90"]
        assert row["rate"] == pytest.approx(row["work"] / seconds["median"], rel=1e-4)
        reference = results["machine"][row["share_of"]]["rate"]
        assert row["share"] == pytest.approx(row["rate"] / reference, rel=1e-4)
        for name, ratio in row["ratios"].items():
            same = {key: row[key] for key in ("op", "size", "dtype", "memory")}
            found = rows_of(results, same.pop("op"), who=name, **same)
            (rival,) = (other for other in found if other["variant"] in (row["variant"], None))
            quotient = rival["seconds"]["median"] / seconds["median"]
            assert ratio["median"] == pytest.approx(quotient, rel=1e-4)
            assert rival["ok"] is None
    assert any(row["headline"] for row in ours)
    for word in ("share", "max error", "GB/s", *wavepe.variants()):
        assert word in printed
    assert "FAIL" not in printed


def test_environment_is_recorded(wavelets):
    _, results, _ = wavelets
    about = results["environment"]
    assert results["quick"] is True
    wanted = {"torch": torch.__version__, "numpy": np.__version__, "threads": 1}
    wanted |= {"compiler": wavepe.build_info()["compiler"], "variant": wavepe.variant()}
    assert wanted.items() <= about.items()
    assert about["cpu"]
    for name in ("copy", "clone", "sgemm"):
        assert results["machine"][name]["rate"] > 0


@pytest.mark.parametrize("wrong", [1 + 1e-4, float("nan")])
def test_an_error_over_its_bound_fails_the_run(wrong, tmp_path, monkeypatch):
    right = ops.wavelet_table
    monkeypatch.setattr(ops, "wavelet_table", lambda *args: right(*args) * wrong)
    code, results, printed = run(tmp_path, "wavelet_table")
    assert code == 1
    assert {row["ok"] for row in rows_of(results, "ops.wavelet_table", who="wavepe")} == {False}
    assert {row["ok"] for row in rows_of(results, "wavepe.wavelet_table", who="wavepe")} == {True}
    assert "FAIL ops.wavelet_table" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rope_tables"], "unknown operator 'rope_tables'; known: "),
        (["rope", "--variants", "neon"], "variant 'neon' does not run here; known: portable"),
        (["rope", "--threads", "0"], "--threads 0: needs 1 to 1024"),
        (["rope", "--threads", "100000"], "--threads 100000: needs 1 to 1024"),
        (["rope", "--repeats", "0"], "--repeats 0: needs 1 to"),
        (["rope", "--repeats", str(10**30)], f"--repeats {10**30}: needs 1 to"),
        *(
            (["rope", "--budget", text], f"--budget {text}: needs a finite number of seconds")
            for text in ("nan", "inf", "-1")
        ),
    ],
)
def test_wrong_arguments(words, message, capsys):
    assert bench.main([*words, "--quick"]) == 2
    assert message in capsys.readouterr().err


def test_runs_from_an_installed_place(tmp_path, monkeypatch):
    """Under another package name and outside the repository; the commit is then unknown."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "installed_benchmarks")
    monkeypatch.syspath_prepend(str(tmp_path))
    elsewhere = __import__("installed_benchmarks.bench").bench
    file = tmp_path / "results.json"
    assert elsewhere.main(["wavelet_table", *QUICK, "--json", str(file)]) == 0
    assert json.loads(file.read_text())["environment"]["commit"] is None


def case_of(**rivals):
    return Case(
        op="double",
        size="3",
        dtype="float64",
        ours=lambda: np.full(3, 2.0),
        rivals=rivals,
        work=24,
        unit="GB/s",
        judge=judge((np.full(3, 2.0),), (0.0,)),
        bound="none",
        memory=("warm",),
    )


@pytest.mark.parametrize(
    "operator", ["relative_bias", *(pytest.param(o, marks=pytest.mark.slow) for o in LONGER)]
)
def test_compiled_rivals_compute_the_same(operator, monkeypatch):
    """With Dynamo's eager backend: inductor itself takes many seconds."""
    compile_eagerly = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    module = importlib.import_module(f"benchmarks.bench_{operator}")
    compared = 0
    for case in module.cases(True, Compiler()):
        torch.compiler.reset()  # as the runner does: many shapes of one function reach a limit
        for name in set(case.rivals) & {"compile", "compile-skew"}:
            if case.reset:
                case.reset()
            verdict = case.judge(case.rivals[name]())
            assert verdict.ok, (case.op, case.dtype, name, verdict)
            compared += 1
    torch.compiler.reset()
    assert compared >= 2


def broken():
    raise RuntimeError("no working C++ compiler\nfound: none")


def timed(case):
    args = bench.argparse.Namespace(repeats=2, budget=1.0, threads=1)
    with using(wavepe.variant()):
        return bench.time_case(case, ["portable"], Allocator(), args)


def test_without_a_compiler_the_compiled_rival_is_left_out():
    case = case_of(compile=broken, eager=lambda: np.full(3, 2.0))
    ours, eager = timed(case)
    assert (ours["who"], eager["who"]) == ("wavepe", "eager")
    assert set(ours["ratios"]) == {"eager"}
    assert case.notes == ["compile left out: RuntimeError: no working C++ compiler found: none"]
    with pytest.raises(RuntimeError, match="no working"):  # another rival must work
        timed(case_of(eager=broken))


def test_judge():
    exact, bound = np.array([1.0, 0.0]), np.array([0.5, 0.0])
    verdict = judge((exact,), (bound,))
    assert verdict(np.array([1.25, 0.0])) == (0.25, 0.5)
    assert verdict((torch.tensor([1.0, 0.0]),)).ok
    assert verdict(np.array([1.5, 0.0])).ok
    for wrong in ([1.6, 0.0], [1.0, 1e-9], [float("nan"), 0.0], [float("inf"), 0.0], [1.0]):
        assert not verdict(np.array(wrong)).ok
    with pytest.raises(ValueError, match="zip"):
        verdict((exact, exact))


def test_timing_statistics():
    timing = Timing([4.0, 1.0, 3.0, 2.0, 9.0], [0, 0, 7, 0, 9])
    for share in (0, 0.1, 0.5, 0.9, 1):
        assert timing.quantile(share) == pytest.approx(np.quantile(timing.seconds, share))
    assert timing.summary()["min"] == 1
    assert timing.summary()["page_faults"] == 0
    assert timing.over(Timing([1.0, 1.0, 1.0, 4.0, 3.0])).seconds == [4, 1, 3, 0.5, 3]


def test_take_turns_calls_each_once_a_round_and_not_always_in_one_order():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    prepared = []
    timings = take_turns(calls, before=prepared.append, repeats=12, budget=math.inf, warm_up=1)
    assert prepared == called
    rounds = [called[i : i + 3] for i in range(0, len(called), 3)]
    assert len(rounds) == 13
    assert {tuple(sorted(r)) for r in rounds} == {("a", "b", "c")}
    assert len({tuple(r) for r in rounds}) > 1
    assert [len(t.seconds) for t in timings.values()] == [12] * 3


PAGE_FAULTS = """
import json, torch
from benchmarks.memory import Allocator
from benchmarks.timing import take_turns
allocator, pages = Allocator(), {}
for situation in ("fresh", "warm", "fresh"):
    allocator.enter(situation)
    calls = {"small": lambda: torch.ones(1 << 20), "large": lambda: torch.ones(10 << 20)}
    timings = take_turns(calls, allocator=allocator, repeats=3, warm_up=2)
    for name, timing in timings.items():
        pages[f"{situation} {name}"] = min(timing.faults)  # what else goes on only adds
print(json.dumps(pages))
"""


@pytest.mark.slow
def test_fresh_memory_is_fresh_and_warm_memory_is_warm():
    allocator = Allocator()
    if not allocator.control:
        pytest.skip("this C library's malloc cannot be told")
    # in a process of its own: here, other tests have left their marks on the heap
    pages = json.loads(output("-c", PAGE_FAULTS, start=forked, cwd=ROOT))
    # a huge page is 2 MiB; warm memory is there except for malloc's own bookkeeping
    assert pages["fresh small"] >= 2
    assert pages["fresh large"] >= 20
    assert pages["warm small"] <= 1
    assert pages["warm large"] <= 1
    with pytest.raises(ValueError, match="situation"):
        allocator.enter("tepid")
