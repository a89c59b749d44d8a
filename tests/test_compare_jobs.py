"""`wavepe compare` in several processes, with training that goes on, and by several protocols."""

import errno
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext

import pytest
from compare_cases import TINY, arguments, one_line, results, text_in

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from wavepe.analysis import perplexity
from wavepe.cli import main
from wavepe.cli.compare.data import evaluation_bytes, load_text
from wavepe.cli.compare.training import load_model

SPECS = ["none", "rope", "rope/rope:type=yarn,factor=2", "none/shaw:clip=2"]
MORE = ["--seeds", "2", "--finetune", "32", "--finetune-steps", "4", "--keep", "2",
        "--protocols", "whole", "sliding", "blocks:8", "--bands"]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return text_in(tmp_path_factory.mktemp("text"))


def words(text, out, *more):
    return arguments(text, out, *MORE, *more, steps=12, specs=SPECS)


def runs(out):
    """Return the results that must not depend on the process that trained a model."""
    return [{k: v for k, v in run.items() if k != "seconds"} for run in results(out)["runs"]]


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert main(words(text, out)) == 0
    return out


def held_out(text):
    content = load_text(str(text), 32, 32).held_out
    return torch.from_numpy(evaluation_bytes(content, (16, 32), 128))


def test_rows_before_and_after_the_training_goes_on(finished, text):
    """The results agree with the checkpoints."""
    names = [(run["encoding"], run["seed"]) for run in runs(finished)]
    assert names == [(spec, seed) for seed in range(2) for spec in SPECS]
    tokens = held_out(text)
    (tuned,) = (finished / "checkpoints").glob("rope-theta-10000-rope-*-yarn-*-seed1")
    run = runs(finished)[6]
    cases = {
        finished / "checkpoints" / "rope-theta-10000-seed1": run["before"],
        tuned: run,
    }
    for folder, found in cases.items():
        model = load_model(folder, "rope:type=yarn,factor=2")
        assert found["perplexity"] == found["protocols"]["whole"]
        for length in (16, 32):
            by = {
                "whole": perplexity(model, tokens, length),
                "sliding:16/8": perplexity(
                    model, tokens, length, protocol="sliding", window=16, stride=8
                ),
                "blocks:8": perplexity(model, tokens, length, protocol="blocks", window=8),
            }
            for name, value in by.items():
                assert found["protocols"][name][str(length)] == pytest.approx(value, rel=1e-6)
    assert run["before"]["perplexity"] != run["perplexity"]


def test_mean_and_spread(finished):
    """Of the sample, by Python's own statistics."""
    by_name = {entry["encoding"]: entry for entry in results(finished)["summary"]}
    assert list(by_name) == SPECS
    for spec, entry in by_name.items():
        assert entry["seeds"] == 2
        for length, found in entry["perplexity"].items():
            values = [r["perplexity"][length] for r in runs(finished) if r["encoding"] == spec]
            assert found["mean"] == statistics.fmean(values)
            assert found["std"] == statistics.stdev(values)


def test_checkpoints_on_the_way(finished):
    for seed in range(2):
        for step in (4, 8):
            folder = finished / "checkpoints" / f"none-seed{seed}-step{step}"
            assert torch.isfinite(load_model(folder, "none").lm_head.weight).all()
    assert len(list((finished / "checkpoints").glob("*-step*"))) == 2 * 2 * 2


def test_the_report_shows_all_of_it(finished):
    report = (finished / "report.md").read_text()
    for heading in (
        "whole sequence, trained on 16 bytes, before the training on 32 bytes",
        "sliding window of 16, stride 8, trained on 16 bytes, then on 32",
        "blocks of 8, trained on 16 bytes, then on 32",
    ):
        assert f"{heading}\n\n| encoding |" in report
    for picture in ("before", "perplexity", "perplexity-sliding-16-8", "perplexity-blocks-8"):
        assert f"({picture}.png)" in report
        assert (finished / f"{picture}.png").read_bytes().startswith(b"\x89PNG")


def test_bands_on_the_way_before_and_at_the_end(finished):
    """Of rotary rows alone; the steps are of the training before it goes on."""
    report = (finished / "report.md").read_text()
    heads = "predicted j* | 1.1 j* | step 4 | step 8 | before the training on 32 | at the end"
    assert f"| encoding | {heads} |" in report
    found = [run for run in runs(finished) if run["encoding"] == "rope"]
    bands = [[*run["before"]["bands"]["steps"].values(), run["before"]["bands"]["key"],
              run["bands"]["key"]] for run in found]  # fmt: skip
    cells = [
        f"{statistics.fmean(x):.2f} ±{statistics.stdev(x):.2f}" for x in zip(*bands, strict=True)
    ]
    assert " | ".join(cells) in report
    assert ["bands" in run for run in runs(finished)] == [False, True, True, False] * 2


def test_jobs_give_the_same_figures(finished, text, tmp_path, capfd):
    assert main(words(text, tmp_path, "--jobs", "3")) == 0
    assert runs(tmp_path) == runs(finished)
    assert "[4/4] rope: perplexity at" in capfd.readouterr().err
    first, *_ = results(tmp_path)["environment"]["models"].values()
    assert first["steps"] == 12
    assert main(words(text, tmp_path, "--jobs", "2", "--quiet")) == 0  # nothing is left to do
    assert capfd.readouterr().err == ""


def begun(text, out):
    """The command with two jobs, in a process of its own, as soon as it has a result."""
    command = [sys.executable, "-c",
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from wavepe.cli import main; sys.exit(main(sys.argv[1:]))",
        *words(text, out, "--jobs", "2")]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (out / "results.json").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    return process


def workers(process):
    """Return the processes that `process` has started."""
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    with open(children) as file:
        return [int(number) for number in file.read().split()]


def gone(numbers):
    """Return whether all these processes end within a minute."""
    for _ in range(6000):
        if not any(os.path.exists(f"/proc/{number}") for number in numbers):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_it_resumes_with_the_same_figures(finished, text, tmp_path, number):
    process = begun(text, tmp_path)
    started = workers(process)
    assert len(started) == 2
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    kept = len(runs(tmp_path))
    assert 0 < kept < 8
    assert gone(started)
    if number != signal.SIGKILL:
        assert said.splitlines()[-1].startswith("wavepe compare: interrupted; to resume: ")
    assert "Traceback" not in said
    assert main(words(text, tmp_path)) == 0
    assert runs(tmp_path) == runs(finished)


def test_a_worker_whose_parent_is_killed_saves_its_state(text, tmp_path):
    """After the step, although the next regular save is far away."""
    options = ["--save-every", "1000000", "--keep", "999", "--jobs", "2"]
    command = [sys.executable, "-m", "wavepe", *arguments(text, tmp_path, *options, steps=100_000)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not list(tmp_path.glob("checkpoints/*-step100")):
            assert process.poll() is None
            time.sleep(0.01)
        started = workers(process)
        process.kill()
    assert gone(started)
    states = (tmp_path / "training").glob("*.pt")
    assert 100 <= max(torch.load(state, weights_only=True)["step"] for state in states) < 100_000


def test_a_worker_that_is_killed_is_named(finished, text, tmp_path):
    process = begun(text, tmp_path)
    os.kill(workers(process)[0], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert "the process of this training ended with SIGKILL" in last
    assert "give the same command again" in last
    assert main(words(text, tmp_path)) == 0
    assert runs(tmp_path) == runs(finished)


def test_nothing_but_the_tables_when_quiet(text, tmp_path, capfd):
    """Nor of parameters that a training adds, which transformers would tell."""
    options = ["--finetune", "32", "--finetune-steps", "1", "--quiet"]
    for jobs in ("1", "2"):
        out = tmp_path / jobs
        words = arguments(text, out, *options, "--jobs", jobs, specs=["none/shaw:clip=2", "rope"])
        assert main(words) == 0
        assert capfd.readouterr().err == ""


def test_a_worker_imports_from_where_the_command_does(text, tmp_path, monkeypatch):
    """A file in the current folder must not replace a module."""
    (tmp_path / "tempfile.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert main(arguments(text, tmp_path / "out", "--jobs", "2", "--quiet", specs=["none"])) == 0


def test_a_worker_without_a_parent_says_nothing():
    command = [sys.executable, "-m", "wavepe.cli.compare.worker"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_full_disk_of_temporary_files_is_named(text, tmp_path, capfd, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Full:
        write = full

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: nullcontext(Full()))
    assert main(words(text, tmp_path, "--jobs", "2", "--quiet")) == 1
    said = one_line(capfd)
    assert tempfile.gettempdir() in said
    assert "the disk at" in said


def test_what_is_not_finite_is_no_result(finished, text, tmp_path, monkeypatch, capsys):
    """This holds for every protocol."""
    from wavepe.cli.compare import evaluation

    def measured(*given, protocol="whole", **options):
        return 2.0 if protocol == "whole" else math.nan

    shutil.copytree(finished, tmp_path / "copy")
    (tmp_path / "copy" / "results.json").unlink()
    monkeypatch.setattr(evaluation, "perplexity", measured)
    assert main(words(text, tmp_path / "copy", "--quiet")) == 1
    assert "none: the perplexity at 16 is nan" in one_line(capsys)


def test_an_error_of_a_worker_is_one_line(text, tmp_path, capfd):
    assert main(words(text, tmp_path, "--jobs", "2", "--lr", "1e30", "--quiet")) == 1
    assert "try a smaller --lr" in one_line(capfd)


def test_a_grid_is_a_folder_for_each_part(text, tmp_path, capsys):
    """Its options but the text's are the preset's: here they are made small."""
    out = tmp_path / "grid"
    options = arguments(text, out, "--preset", "tasks", "--train-length", "96", "--lengths", "96",
                        specs=["none"])  # fmt: skip
    assert main(options) == 0
    folders = sorted(path.name for path in out.iterdir() if path.is_dir())
    assert folders == ["keys", "needle", "tracking"]
    report = (out / "report.md").read_text()
    for name in folders:
        assert f"# {name}\n" in report
        assert f"({name}/accuracy.png)" in report
        assert (out / name / "accuracy.png").exists()
        assert json.loads((out / name / "results.json").read_text())["environment"]["complete"]
    capsys.readouterr()
    assert main([*options, "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*options, "--steps", "7"]) == 2
    assert "steps 6 there, 7 here" in one_line(capsys)


def test_another_split_is_another_comparison(text, tmp_path, capsys):
    assert TINY  # of which the text is too short to hold validation out
    assert main(words(text, tmp_path, "--split", "validation")) == 2
    assert "(validation)" in one_line(capsys)
