"""`wavepe compare` on tiny models: its files, what its rows share, jobs, and exact resuming."""

import json
import math
import os
import shlex
import shutil
import signal
import statistics
import sys

import compare_cases
import pytest
import torch
import wavepe.hf
from cases import forget_registrations
from compare_cases import SPECS, arguments, compare, figures, forks, refused, results, text, trained
from processes import forked, gone
from transformers import AutoModelForCausalLM
from wavepe.analysis import perplexity
from wavepe.cli import main
from wavepe.experiments import comparison, evaluation
from wavepe.experiments.comparison import new_model
from wavepe.experiments.data import evaluation_bytes, load_text
from wavepe.experiments.model import load_model
from wavepe.experiments.settings import Settings

PNG = b"\x89PNG"


def held_out():
    content = load_text(str(text()), 32, 16).held_out
    return torch.from_numpy(evaluation_bytes(content, (16, 32), 128))


# ------------------------------------------------------------------ results


def test_results_have_the_published_form():
    comparison = results(trained())
    assert set(comparison) == {"train_length", "runs", "summary", "environment"}
    assert comparison["train_length"] == 16
    assert [run["encoding"] for run in comparison["runs"]] == list(SPECS)
    for run in comparison["runs"]:
        assert set(run) == {"encoding", "seed", "perplexity", "seconds"}
        assert run["seed"] == 0
        assert list(run["perplexity"]) == ["16", "32"]
        assert all(1 < value < 300 for value in run["perplexity"].values())
        assert run["seconds"] > 0
    environment = comparison["environment"]
    assert environment["complete"] is True
    assert environment["threads"] == 1
    assert environment["torch"] == torch.__version__
    assert environment["devices"] == [environment["device"]] == ["cpu"]
    assert environment["gpu"] is environment["autocast"] is None
    assert environment["variant"] in wavepe.variants()
    assert environment["settings"]["steps"] == 6
    assert environment["data"]["evaluated_bytes"] == 128
    assert len(environment["data"]["sha256"]) == 64


def test_rows_trained_alike_share_a_checkpoint():
    folders = sorted(path.name for path in (trained() / "checkpoints").iterdir())
    assert len(folders) == 3
    assert not (trained() / "training").exists()
    models = results(trained())["environment"]["models"]
    assert sorted(models) == [f"checkpoints/{name}" for name in folders]
    assert all(model["steps"] == 6 for model in models.values())
    figure = {spec: values for spec, _, values in figures(trained())}
    plain, scaled = figure["rope"], figure["rope:inference_theta=scaled"]
    assert plain["16"] == scaled["16"]
    assert plain["32"] != scaled["32"]


def test_checkpoints_load_with_their_encoding():
    figure = {
        wavepe.encoding(spec).trained_as(): value
        for spec, _, value in figures(trained())
        if spec != SPECS[2]
    }
    for folder in (trained() / "checkpoints").iterdir():
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert isinstance(model, wavepe.hf.WavePELlamaForCausalLM)
        encoding = wavepe.encoding(json.loads((folder / "training.json").read_text())["spec"])
        assert wavepe.encoding(model.config.position_encoding) == encoding
        assert model.config.max_position_embeddings == 16
        assert perplexity(model, held_out(), 32) == figure[encoding]["32"]


def test_every_encoding_starts_from_the_same_weights():
    settings = Settings(tuple(SPECS), (16,), 16, 1, 1, 1, 1, 2, 6, 1e-3, 1)
    first = new_model("none", 3, settings).state_dict()
    state = torch.random.get_rng_state()
    for spec in (*SPECS, "transformer_xl", "wavelet:scales=3,biases=true+kerple"):
        other = new_model(spec, 3, settings).state_dict()
        assert all(torch.equal(first[key], other[key]) for key in first)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(new_model("none", 4, settings).lm_head.weight, first["lm_head.weight"])


def test_picture_and_tables(capsys, monkeypatch):
    out = trained()
    capsys.readouterr()
    monkeypatch.setattr("wavepe.experiments.run._THREADS", 2)  # the folder was begun with 1
    assert (out / "perplexity.png").read_bytes().startswith(PNG)
    assert (out / "report.md").read_text().count("**") >= 2 * 2
    before = (out / "results.json").read_bytes()
    assert main(arguments(out, "--quiet")) == 0  # nothing left to do but to report
    assert (out / "results.json").read_bytes() == before
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "16 (1x)" in printed.out
    assert printed.out.count("*") >= 2 + 1  # one best per column, and its meaning
    for spec, _, values in figures(out):
        assert spec in printed.out
        assert f"{values['32']:.2f}" in printed.out


def test_a_task_is_compared(tmp_path, capsys):
    more = ["--task", "needle", "--train-length", "24", "--lengths", "24", "48", "--seeds", "2"]
    assert main(arguments(tmp_path, *more, specs=["none", "alibi"])) == 0
    for run in results(tmp_path)["runs"]:
        assert set(run["accuracy"]) == set(run["perplexity"]) == {"24", "48"}
        assert all(0 <= share <= 1 for share in run["accuracy"].values())
    assert len(figures(tmp_path)) == 4
    assert results(tmp_path)["summary"][0]["accuracy"]["24"]["std"] is not None
    assert (tmp_path / "accuracy.png").read_bytes().startswith(PNG)
    assert "![Task needle: share of answers" in (tmp_path / "report.md").read_text()
    # The command `needle` asks this model for what it was trained on, unless told otherwise.
    (model,) = (tmp_path / "checkpoints").glob("none-seed0")
    words = ["needle", str(model), "--lengths", "32", "--trials", "1"]
    for more, form in (([], "statement"), (["--form", "pairs"], "pairs")):
        assert main([*words, *more]) == 0
        assert f"({form}: " in capsys.readouterr().out


# ------------------------------------------------------------------ training goes on, protocols

GOING_ON = ["none", "rope", "rope/rope:type=yarn,factor=2", "none/shaw:clip=2"]
MORE = ("--seeds", "2", "--finetune", "32", "--finetune-steps", "4", "--keep", "2",
        "--protocols", "whole", "sliding", "blocks:8", "--bands")  # fmt: skip


LONGER = {"steps": 12, "specs": GOING_ON}


def words(out, *more):
    return arguments(out, *MORE, *more, **LONGER)


def runs(out):
    """Return the results that must not depend on the process that trained a model."""
    return [{k: v for k, v in run.items() if k != "seconds"} for run in results(out)["runs"]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert main(words(out)) == 0
    return out


def test_rows_before_and_after_the_training_goes_on(finished):
    """The results agree with the checkpoints."""
    names = [(run["encoding"], run["seed"]) for run in runs(finished)]
    assert names == [(spec, seed) for seed in range(2) for spec in GOING_ON]
    (tuned,) = (finished / "checkpoints").glob("rope-theta-10000-rope-*-yarn-*-seed1")
    run = runs(finished)[6]
    cases = {finished / "checkpoints" / "rope-theta-10000-seed1": run["before"], tuned: run}
    protocols = {
        "whole": {},
        "sliding:16/8": {"protocol": "sliding", "window": 16, "stride": 8},
        "blocks:8": {"protocol": "blocks", "window": 8},
    }
    for folder, result in cases.items():
        model = load_model(folder, "rope:type=yarn,factor=2")
        assert result["perplexity"] == result["protocols"]["whole"]
        for name, options in protocols.items():
            for length in (16, 32):
                value = perplexity(model, held_out(), length, **options)
                assert result["protocols"][name][str(length)] == pytest.approx(value, rel=1e-6)
    assert run["before"]["perplexity"] != run["perplexity"]


def test_mean_and_spread(finished):
    """Compare those of the sample with Python's own statistics."""
    by_name = {entry["encoding"]: entry for entry in results(finished)["summary"]}
    assert list(by_name) == GOING_ON
    for spec, entry in by_name.items():
        assert entry["seeds"] == 2
        for length, result in entry["perplexity"].items():
            values = [r["perplexity"][length] for r in runs(finished) if r["encoding"] == spec]
            assert result["mean"] == statistics.fmean(values)
            assert result["std"] == statistics.stdev(values)


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
    """Only rotary rows have them; the steps are those before the training goes on."""
    report = (finished / "report.md").read_text()
    heads = "predicted j* | 1.1 j* | step 4 | step 8 | before the training on 32 | at the end"
    assert f"| encoding | {heads} |" in report
    rows = [run for run in runs(finished) if run["encoding"] == "rope"]
    bands = [[*run["before"]["bands"]["steps"].values(), run["before"]["bands"]["key"],
              run["bands"]["key"]] for run in rows]  # fmt: skip
    cells = [
        f"{statistics.fmean(x):.2f} ±{statistics.stdev(x):.2f}" for x in zip(*bands, strict=True)
    ]
    assert " | ".join(cells) in report
    assert ["bands" in run for run in runs(finished)] == [False, True, True, False] * 2


def test_what_is_not_finite_is_no_result(finished, tmp_path, monkeypatch, capsys):
    """This holds for every protocol."""

    def measured(*given, protocol="whole", **options):
        return 2.0 if protocol == "whole" else math.nan

    shutil.copytree(finished, tmp_path / "copy")
    (tmp_path / "copy" / "results.json").unlink()
    monkeypatch.setattr(evaluation, "perplexity", measured)
    message = refused(capsys, tmp_path / "copy", *MORE, "--quiet", code=1, **LONGER)
    assert "none: the perplexity at 16 is nan" in message


def test_a_training_that_goes_on_sees_new_batches(tmp_path, monkeypatch):
    steps, batch_at = [], comparison.batch_at
    monkeypatch.setattr(comparison, "batch_at", lambda *x: steps.append(x[1]) or batch_at(*x))
    more = ["--finetune", "32", "--finetune-steps", "2"]
    assert compare(tmp_path, *more, specs=["none"]) == 0
    assert steps == list(range(8))


def test_another_split_is_another_comparison(tmp_path, capsys):
    """The text is too short to hold validation out."""
    options = (*MORE, "--split", "validation")
    assert "(validation)" in refused(capsys, tmp_path, *options, **LONGER)


# ------------------------------------------------------------------ interruption


# The command in a process that gets a signal in the third step of the second training.
STOPPED = """
import os, signal, sys
from pathlib import Path
from wavepe.cli import main
from wavepe.experiments import comparison

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
batch_at = comparison.batch_at


def stopping(tokens, step, *rest):
    if step == 2 and Path(sys.argv[-1], "training", "rope-theta-10000-seed0.pt").exists():
        os.kill(os.getpid(), int(sys.argv[1]))
    return batch_at(tokens, step, *rest)


comparison.batch_at = stopping
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, -signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_stopped_it_resumes_with_the_same_figures(tmp_path, number, status, capsys):
    """All but SIGKILL save the state and say how to resume."""
    again = arguments(tmp_path)
    done = forked("-c", STOPPED, int(number), *again)
    assert done.returncode == status
    path = tmp_path / "training" / "rope-theta-10000-seed0.pt"
    step = torch.load(path, weights_only=True)["step"]
    assert step == (2 if number == signal.SIGKILL else 3)  # the last regular state is of step 2
    assert [run[0] for run in figures(tmp_path)] == [SPECS[0]]
    if number != signal.SIGKILL:
        advice = done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
        assert advice.startswith("wavepe compare: interrupted; to resume: wavepe compare ")
        again = shlex.split(advice.partition("to resume: wavepe ")[2])
    first = tmp_path / "checkpoints" / "none-seed0" / "model.safetensors"
    written = first.stat().st_mtime_ns
    assert main(again) == 0
    assert "resumes at step" in capsys.readouterr().err
    assert first.stat().st_mtime_ns == written
    assert figures(tmp_path) == figures(trained())


# ------------------------------------------------------------------ jobs


@pytest.mark.slow  # a start of three interpreters
def test_a_worker_is_a_process_that_imports_from_where_the_command_does(tmp_path, monkeypatch):
    """A file in the current folder must not replace a module. The user's own files are run."""
    forget_registrations(monkeypatch)
    (tmp_path / "own.py").write_text(compare_cases.LIN)
    (tmp_path / "tempfile.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    out = tmp_path / "out"
    assert compare(out, "--jobs", "2", "--import", "own.py", "--quiet", specs=["lin:slope=0"]) == 0
    assert [figure for *_, figure in figures(out)] == [figures(trained())[0][2]]  # of "none"


def test_jobs_give_the_same_figures(finished, tmp_path):
    line = words(tmp_path, "--jobs", "2")
    done, _ = forks(line)
    assert done.returncode == 0, done.stderr
    assert runs(tmp_path) == runs(finished)
    assert "[4/4] rope: perplexity at" in done.stderr
    first, *_ = results(tmp_path)["environment"]["models"].values()
    assert first["steps"] == 12
    done, _ = forks([*line, "--quiet"])  # nothing is left to do
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("number", "whom", "status", "message"),
    [
        pytest.param(signal.SIGKILL, "command", -signal.SIGKILL, None, marks=pytest.mark.slow),
        (signal.SIGINT, "command", 130, "wavepe compare: interrupted; to resume: "),
        (signal.SIGKILL, "worker", 1, "error: the process of a training was killed, or its "
         "memory was not enough; finished work is kept: to continue, give the same command again"),
    ],
)  # fmt: skip
def test_stopped_jobs_resume_with_the_same_figures(tmp_path, number, whom, status, message):
    seeds = ("--seeds", "2")  # with one, all could be done before the signal
    done, workers = forks(arguments(tmp_path, *seeds, "--jobs", "2"), "results.json", number, whom)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    if message is not None:
        assert message in done.stderr.splitlines()[-1]
    assert gone(workers)
    assert 0 < len(runs(tmp_path)) < 2 * len(SPECS)
    assert compare(tmp_path, *seeds) == 0
    assert runs(tmp_path) == runs(trained(*seeds))


def test_a_worker_whose_parent_is_killed_saves_its_state(tmp_path, capsys):
    """After the step, although the next save is far away. Until then, the folder is locked."""
    options = ["--save-every", "1000000", "--keep", "9999"]
    line = arguments(tmp_path, *options, "--jobs", "2", steps=100_000)
    _, workers = forks(line, "checkpoints/*-step10", signal.SIGKILL, "alone")
    try:
        message = refused(capsys, tmp_path, *options, steps=1)
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
    assert "another process is writing there" in message
    assert gone(workers)
    states = (tmp_path / "training").glob("*.pt")
    assert 10 <= max(torch.load(state, weights_only=True)["step"] for state in states) < 100_000


def test_nothing_but_the_tables_when_quiet(tmp_path, capfd):
    """Nor of parameters that a training adds, which transformers would tell."""
    more = ["--finetune", "32", "--finetune-steps", "1", "--quiet"]
    specs = ["none/shaw:clip=2", "rope"]
    assert compare(tmp_path / "1", *more, specs=specs) == 0
    assert capfd.readouterr().err == ""
    done, _ = forks(arguments(tmp_path / "2", *more, "--jobs", "2", specs=specs))
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------ what ends a training


def test_a_model_too_large_for_the_memory(tmp_path, capsys):
    huge = ["--head-dim", "2147483646", "--heads", "2147483647", "--quiet"]
    error = refused(capsys, tmp_path, *huge, specs=["none"], code=1)
    assert "out of memory (asked for sizes=[" in error
    assert "]); take smaller sizes, or free memory" in error


def test_a_loss_or_a_figure_that_is_no_number_ends_it(tmp_path, capsys):
    error = refused(capsys, tmp_path / "loss", "--lr", "1e30", "--quiet", code=1)
    assert "none: the loss is" in error
    assert "--lr" in error
    options = ("--quiet", "--lr", "1e18")  # the loss before its only step is finite
    error = refused(capsys, tmp_path / "figure", *options, steps=1, specs=["rope"], code=1)
    assert "rope: the perplexity at 16 is nan: try a smaller --lr" in error
