"""The GPU's kernels of attention, compiled ahead of time for GPUs that need not be here: nothing
spills where it must not, shared memory is enough, and tensor cores are used. Nothing runs.

Strict for the Triton that wavepe[dev] pins: others allot registers otherwise."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")
triton = pytest.importorskip("triton", reason="needs Triton")
kernels = pytest.importorskip("benchmarks.attention_kernels", reason="not run from a source tree")

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(triton.__version__ != "3.9.0", reason="registers are those of Triton 3.9.0"),
]


@functools.cache
def compiled(call):
    """The rows of ``measure(<call>)``, by a process whose kernels are not interpreted."""
    program = "import json, torch; from benchmarks.attention_kernels import *; "
    program += f"print(json.dumps(measure({call})))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment.pop("TRITON_INTERPRET", None)
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(row, spills=0):
    assert row["spilled"] <= spills, row
    assert row["shared"] <= 1024 * kernels.SHARED[row["arch"]], row
    assert row["tensor_core"] or row["kernel"] == "diagonal_sums", row


@pytest.mark.parametrize("arch", [80, 100])
@pytest.mark.parametrize("size", [64, 128])
def test_forward_compiled(arch, size):
    rows = compiled(f"Case({arch}, {size}), backward=False")
    assert [row["kernel"] for row in rows] == ["table_products", "attention_forward"]
    for row in rows:
        check(row)


@pytest.mark.parametrize(("size", "table"), [(64, "constant"), (128, "constant"), (64, "learned")])
def test_forward_and_backward_compiled_for_sm_90(size, table):
    rows = compiled(f"Case(90, {size}, {table!r})")
    assert len(rows) == 5 + (table == "learned")
    for row in rows:
        check(row)


def test_float16_compiled():
    for row in compiled("Case(90, 64, dtype=torch.float16), backward=False"):
        check(row)


EVERYTHING = """bias=torch.zeros(4, 100), bias_beyond="edge", softcap=2.0, window=99,
slopes=torch.ones(4), offset=torch.zeros(1, dtype=torch.int64),
key_mask=torch.ones(1, 1024, dtype=torch.bool), segments=torch.zeros(1, 1024, dtype=torch.int32),
mask=torch.ones(1, 1, 1024, 1024, dtype=torch.bool), dropout_p=0.1, seed=torch.tensor(1)"""


def test_every_option_compiled():
    rows = compiled(f"Case(90, 64, 'none'), {EVERYTHING}")
    assert len(rows) == 5
    for row in rows:
        check(row, spills=10**4)


def test_the_table_of_kernels(capsys):
    assert kernels.main(["--check"]) == 0, capsys.readouterr().err
    rows = json.loads((ROOT / kernels.RESULTS).read_text())["rows"]
    archs, sizes, tables = ({row[key] for row in rows} for key in ("arch", "head_size", "table"))
    assert (archs, sizes) == ({80, 90, 100}, {64, 128})
    assert tables == {"none", "constant", "learned"}


def test_missing_parts_are_named(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.main([]) == 1
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton.runtime.driver", None)
    assert kernels.main([]) == 1
    assert "pip install wavepe[dev]" in capsys.readouterr().err
