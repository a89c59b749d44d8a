"""`python -m benchmarks.gpu_window` without a GPU: rows, what fails, deadlines, and the table."""

import json
from pathlib import Path

import pytest
import torch
from cases import needs
from processes import output

needs("triton")

ROOT = Path(__file__).parent.parent

import wavepe.ops as ops

from benchmarks import gpu_attention, gpu_attention_checks, gpu_tasks, gpu_training, gpu_window
from benchmarks.gpu_measure import Place
from benchmarks.gpu_window import Phase

DTYPES = tuple(getattr(torch, name) for name in gpu_tasks.DTYPES)
CHECKS = ["bias"]  # the other ones take a second each
CHECKS += [
    pytest.param(name, marks=pytest.mark.slow)
    for name in gpu_attention_checks.NAMES
    if name != "bias" and (name not in gpu_attention_checks.ALONE or name in ("bits", "compile"))
]


class OfTheCPU(Place):
    """The CPU's operator in the GPU's place, or another function, at the sizes of a GPU."""

    def __init__(self, function=ops.attention):
        super().__init__("cpu")
        self.emulated, self.function = False, function

    def attention(self):
        return self.function


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of what compiles
@pytest.mark.parametrize("name", CHECKS)
def test_the_cpu_is_found_right(name):
    for found in gpu_attention_checks.check(OfTheCPU(), name, DTYPES):
        assert found.ok, found


def test_what_is_wrong_is_found():
    def last_key_lost(q, k, v, **options):
        mask = torch.ones(q.shape[0], k.shape[2], dtype=torch.bool)
        mask[:, -1] = False
        return ops.attention(q, k, v, key_mask=mask, **options)

    def gradient_lost(q, k, v, **options):
        return ops.attention(q, k.detach() + 0 * k, v, **options)

    for wrong in (last_key_lost, gradient_lost):
        for found in gpu_attention_checks.check(OfTheCPU(wrong), "wavelet", DTYPES):
            assert found.error > 2, found


def test_numbers_that_every_dtype_holds():
    x = gpu_attention_checks.numbers(10000, generator=torch.Generator().manual_seed(0))
    assert all((x.to(dtype).double() == x).all() for dtype in DTYPES)


TASKS = ("probe", "check bias", "times 16 5", "training 16", "decode 5 1", "rope")


@pytest.mark.slow
def test_the_command_without_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(gpu_window.WINDOWS, "figures", (Phase(60, (), TASKS),))
    words = ("figures", "--dry", "--out", str(tmp_path))
    assert gpu_window.main(words) == 0
    message = capsys.readouterr().out
    assert message == (tmp_path / "lines.txt").read_text()
    assert message.splitlines()[-1] == gpu_window.NO_GPU
    assert "  ok    attention: bias float32: " in message
    kept = json.loads((tmp_path / "rows.json").read_text())
    assert kept["environment"]["interpreted"]
    probe, check, times, training, decode, rope = kept["rows"]
    assert tuple(row["name"] for row in kept["rows"]) == TASKS
    assert probe["lines"][0]["name"] == "copy"
    assert 0 < check["checks"][0]["error"] < 1
    for phase in gpu_attention.PHASES:
        assert times["seconds"][phase][gpu_attention.OURS] > 0
        assert times["differs"][phase][gpu_attention.DENSE] < 1e-6
    assert times["differs"]["forward"][gpu_attention.FLEX] < 1e-6
    assert "CPU" in times["errors"][gpu_attention.FLEX]  # whose backward it lacks
    assert set(training["seconds"]) == {gpu_training.OURS, gpu_training.STOCK}
    assert decode["lines"][0]["value"] < 1e-5  # off PyTorch's attention
    assert rope["not_run"] == "it needs a GPU"
    monkeypatch.setitem(gpu_window.WINDOWS, "figures", (Phase(0, (), TASKS),))
    gpu_window.main(words)
    assert capsys.readouterr().out.count("  not run: ") == len(TASKS)


def test_each_check_has_a_place_in_the_window():
    assert {*gpu_window.CHECKS, "large"} == {"kernels", *gpu_attention_checks.NAMES}
    tasks = [name for some in gpu_window.WINDOWS.values() for each in some for name in each.tasks]
    assert {key.partition(":")[0] for key in gpu_window.PREDICTED} <= set(tasks)


def test_flex_in_two_parts_is_the_same():
    given = gpu_attention.problem(Place("cpu"), 16, 100)
    short = given._replace(table=ops.relative_table(given.table.p[:30]))
    found = gpu_attention.ways(Place("cpu"), short)
    outs = [found[name]()(*short[:3]) for name in (gpu_attention.BAND, gpu_attention.DENSE)]
    torch.testing.assert_close(*outs)


def test_what_has_no_kernel_is_an_error():
    Place("cpu").needs_kernel(torch.empty(1, 1, 1, 8))
    with pytest.raises(RuntimeError, match="attention has no kernel: there is none for meta"):
        Place("meta").needs_kernel(torch.empty(1, 1, 1, 8, device="meta"))


HOST = """import json
from benchmarks import gpu_host as host
rows = host.measure(1, ("plain", "wavelets", "decoding, wavelets, key mask"), 16)["rows"]
print(json.dumps([rows, host.compiled_while_decoding()]))"""


@pytest.mark.slow
def test_the_host_takes_plans():
    """Triton's real launcher on a libcuda that does nothing: a plan makes the launches and the
    allocations of the call, and enters a fifth of the functions. Lengths compile nothing new."""
    rows, decoding = json.loads(output("-c", HOST, cwd=ROOT, TRITON_INTERPRET="0"))
    assert [row["plan"]["launches"] for row in rows] == [1, 3, 2, 6, 2]
    for row in rows:
        plan, operator = row["plan"], row["operator"]
        assert plan.pop("Python calls") < operator.pop("Python calls") / 5, row
        assert plan == operator, row
    assert decoding == decoding[:1] * 4


# The task that dies prints a line first; what is beyond the deadline does not run.
DIES = """import json, os, sys, time
for name in sys.argv[2:]:
    if name == "dies":
        line = {"name": "x", "value": 2.0, "unit": "us"}
        print(json.dumps({"of": name, "line": line}), flush=True)
        print("CUDA error: an illegal access", file=sys.stderr, flush=True)
        os._exit(7)
    if name == "hangs":
        time.sleep(60)
    print(json.dumps({"name": name, "seconds": 3.0, "wall": 3.0}), flush=True)
"""


def test_tasks_that_die_and_the_deadline(monkeypatch, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "gpu_tasks.py").write_text(DIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_tasks, "CLOSING", 0.0)
    clock = iter([9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 2.0, 0.0, 0.0])
    names = ["a", "dies", "b", "hangs", "c"]
    environment = {"PYTHONPATH": str(tmp_path)}
    a, line, dies, b, *late = gpu_tasks.in_processes(names, lambda: next(clock), environment)
    assert (a["name"], b["name"]) == ("a", "b")
    assert line == {"of": "dies", "line": dies["lines"][0]}
    assert dies["error"] == "exit code 7: CUDA error: an illegal access"
    assert late == [{"name": name, "not_run": gpu_tasks.LATE} for name in ("hangs", "c")]
    rows = [a, dies, b, *late]
    assert all(map(gpu_window.right, rows))
    assert not gpu_window.right(dies | {"name": "check x"})
    assert list(gpu_window.lines_of(dies)) == [f"  error: dies: {dies['error']}"]
    assert gpu_window.measured(dies) == {"dies: x, us": 2.0}


def test_what_was_predicted_stands_beside_what_was_measured(monkeypatch):
    monkeypatch.setattr(gpu_window, "PREDICTED", {"t: forward, wavepe, ms": 2.0, "u: y": 5.0})
    row = {"name": "t", "seconds": {"forward": {"wavepe": 3e-3, "Flex": 1e-3}}}
    lines = gpu_window.comparison([row], ["t", "u"]).splitlines()[2:]
    assert lines == [
        "| t: forward, wavepe, ms | 2 | 3 | 1.50 |",
        "| u: y | 5 |  |  |",
        "| t: forward, Flex, ms |  | 1 |  |",
    ]
    wrong = {"name": "check d", "checks": [{"name": "y", "error": 3.0, "largest": 1.0}]}
    assert not gpu_window.right(wrong)
    assert list(gpu_window.lines_of(wrong)) == ["  WRONG y: 3.00 of the bound, 1.0e+00 absolute"]


def test_the_best_tiles_are_shown():
    figures = {f"tiles 64 8: keys {n} 4 2, us": n for n in (3.0, 1.0, 4.0, 2.0)}
    assert gpu_window.best_tiles(figures | {"u: y": 0.5}) == {*figures} - {
        "tiles 64 8: keys 4.0 4 2, us"
    }
