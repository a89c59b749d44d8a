"""`wavepe bench`, from this installation and from one that is no source tree."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import wavepe
from cases import load_torch
from processes import output
from wavepe.cli import main

load_torch()

ROOT = Path(__file__).parent.parent
QUICK = ("wavelet_table", "--quick", "--repeats", "2", "--variants", "portable")


def test_bench(capsys, tmp_path):
    file = tmp_path / "results.json"
    before = wavepe.variant()
    assert main(["bench", *QUICK, "--json", str(file)]) == 0
    assert wavepe.variant() == before
    out = capsys.readouterr().out
    assert "ops.wavelet_table" in out
    rows = json.loads(file.read_text())["rows"]
    assert {row["variant"] for row in rows if row["who"] == "wavepe"} == {"portable"}
    assert all(row["ok"] for row in rows if row["who"] == "wavepe")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ropy"], "unknown operator 'ropy'"),
        (["rope", "--variants", "sse9"], "'sse9' does not run here"),
        (["rope", "--threads", "0"], "--threads 0: needs 1 to 1024"),
        (["rope", "--threads", "100000"], "--threads 100000: needs 1 to 1024"),
        (["rope", "--quick", "--full"], "--full: not allowed with argument --quick"),
        (["rope", "--budget", "nan"], "--budget nan: needs a finite number"),
        (["rope", "--json", "/none/results.json"], "/none/results.json: No such file"),
        (["rope", "--repeats", "x"], "--repeats"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, words, message):
    assert main(["bench", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("wavepe bench: error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_from_an_installed_package(tmp_path):
    """The files that an installation gets, and this build's modules among them."""
    if not (ROOT / "setup.py").is_file():
        pytest.skip("not run from a source tree")
    output("setup.py", "--quiet", "build_py", f"--build-lib={tmp_path}", cwd=ROOT)
    for name in ("_numpy", "_torch"):
        shutil.copy(Path(sys.modules[f"wavepe.{name}"].__file__), tmp_path / "wavepe")
    held = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"wavepe/py.typed", "wavepe/_numpy.pyi", "wavepe/benchmarks/bench_rope.py"} <= held
    assert not [name for name in held if Path(name).suffix not in (".py", ".pyi", ".typed", ".so")]
    shown = output("-m", "wavepe", "bench", *QUICK, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "ops.wavelet_table" in shown
    assert "(no commit)" in shown  # so it is not the repository's
