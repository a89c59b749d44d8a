"""`python -m benchmarks.gpu` without a GPU: rows, what fails, and the deadline."""

import json
from pathlib import Path

import pytest
import torch
from cases import needs
from processes import output

needs("triton")

ROOT = Path(__file__).parent.parent

import wavepe.ops as ops

from benchmarks import (
    gpu,
    gpu_attention,
    gpu_attention_checks,
    gpu_tasks,
    gpu_training,
)
from benchmarks.gpu_measure import Place

DTYPES = gpu_tasks.DTYPES
CHECKS = ["bias"]  # the other ones take a second each
CHECKS += [
    pytest.param(name, marks=pytest.mark.slow)
    for name in gpu_attention_checks.NAMES
    if name not in ("bias", "graph")
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


@pytest.mark.slow
def test_the_command_without_a_gpu(monkeypatch, tmp_path, capsys):
    tasks = ["check bias"], ["times 16 5", "training 16", "rope"]
    monkeypatch.setattr(gpu_tasks, "names", lambda place: tasks)
    monkeypatch.setattr(torch.ops.wavepe, "emulate_cuda", lambda on: 0, raising=False)
    file = tmp_path / "gpu.json"
    assert gpu.main(["--emulated", "--json", str(file)]) == 0
    message = capsys.readouterr().out
    assert message.splitlines()[-1] == gpu.NO_GPU
    assert "ok    attention: bias float32 (interpreted, not a GPU)" in message
    kept = json.loads(file.read_text())
    assert kept["environment"]["interpreted"]
    check, times, training, rope = kept["rows"]
    assert [row["name"] for row in kept["rows"]] == [name for some in tasks for name in some]
    assert 0 < check["checks"][0]["error"] < 1
    for phase in gpu_attention.PHASES:
        assert times["seconds"][phase][gpu_attention.OURS] > 0
        assert times["differs"][phase][gpu_attention.DENSE] < 1e-6
    assert times["differs"]["forward"][gpu_attention.FLEX] < 1e-6
    assert "CPU" in times["errors"][gpu_attention.FLEX]  # whose backward it lacks
    assert set(training["seconds"]) == {gpu_training.OURS, gpu_training.STOCK}
    assert rope["not_run"] == "it needs a GPU"
    assert gpu.main(["--emulated", "--minutes", "0"]) == 0
    assert capsys.readouterr().out.count("  not run: ") == 4


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
rows = host.measure(1, ("plain", "wavelets"), 16)["rows"]
print(json.dumps([rows, host.compiled_while_decoding()]))"""


@pytest.mark.slow
def test_the_host_takes_plans():
    """Triton's real launcher on a libcuda that does nothing: a plan makes the launches and the
    allocations of the call, and enters a fifth of the functions. Lengths compile nothing new."""
    rows, decoding = json.loads(output("-c", HOST, cwd=ROOT, TRITON_INTERPRET="0"))
    assert [row["plan"]["launches"] for row in rows] == [1, 3, 2, 6]
    for row in rows:
        plan, operator = row["plan"], row["operator"]
        assert plan.pop("Python calls") < operator.pop("Python calls") / 5, row
        assert plan == operator, row
    assert len(set(decoding)) == 1, decoding


def test_rows_that_fail_and_the_deadline(capsys):
    clock = iter([30, 30, 20, 20, 0, -1])

    def do(name, timeout):
        assert timeout > gpu_tasks.GRACE
        if name == "check a":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return {"seconds": 3.0}

    names = ["check a", "b", "c", "d"]
    rows = list(gpu_tasks.rows(names, do, lambda: next(clock)))
    assert [row["name"] for row in rows] == names
    assert rows[0]["error"] == "OutOfMemoryError: CUDA out of memory."
    assert rows[1]["seconds"] == 3
    assert rows[2] == {"name": "c", "not_run": "the deadline came first"}
    assert [gpu.print_row(row, interpreted=False) for row in rows] == [False, True, True, True]
    assert "error: check a: OutOfMemoryError" in capsys.readouterr().out
    wrong = {"name": "check d", "checks": [{"name": "y", "error": 3.0, "largest": 1.0}]}
    assert not gpu.print_row(wrong, interpreted=False)
    assert "  WRONG y: 3.00 of the bound, 1.0e+00 absolute\n" in capsys.readouterr().out
