"""`wavepe compare` on tiny models: its files, what its rows share, and exact resuming."""

import errno
import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from compare_cases import SPECS, arguments, figures, one_line, text_in
from processes import python

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import torch
import wavepe.hf
from transformers import AutoModelForCausalLM
from wavepe.analysis import perplexity
from wavepe.cli import main
from wavepe.cli.compare.comparison import models_of
from wavepe.cli.compare.data import evaluation_bytes, load_text
from wavepe.cli.compare.presets import default_rows
from wavepe.cli.compare.settings import Settings
from wavepe.cli.compare.training import new_model

TRAININGS = 3


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return text_in(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """The folder of one uninterrupted comparison."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert main(arguments(text, out)) == 0
    return out


def test_results_have_the_published_form(finished):
    results = json.loads((finished / "results.json").read_text())
    assert set(results) == {"train_length", "runs", "summary", "environment"}
    assert results["train_length"] == 16
    assert [run["encoding"] for run in results["runs"]] == SPECS
    for run in results["runs"]:
        assert set(run) == {"encoding", "seed", "perplexity", "seconds"}
        assert run["seed"] == 0
        assert list(run["perplexity"]) == ["16", "32"]
        assert all(1 < value < 300 for value in run["perplexity"].values())
        assert run["seconds"] > 0
    environment = results["environment"]
    assert environment["complete"] is True
    assert environment["threads"] == 1
    assert environment["torch"] == torch.__version__
    assert environment["variant"] in wavepe.variants()
    assert environment["settings"]["steps"] == 6
    assert environment["data"]["evaluated_bytes"] == 128
    assert len(environment["data"]["sha256"]) == 64


def test_rows_trained_alike_share_a_checkpoint(finished):
    folders = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert len(folders) == TRAININGS
    assert not (finished / "training").exists()
    environment = json.loads((finished / "results.json").read_text())["environment"]
    assert sorted(environment["models"]) == [f"checkpoints/{name}" for name in folders]
    assert all(model["steps"] == 6 for model in environment["models"].values())
    figure = {spec: values for spec, _, values in figures(finished)}
    plain, scaled = figure["rope"], figure["rope:inference_theta=scaled"]
    assert plain["16"] == scaled["16"]
    assert plain["32"] != scaled["32"]


def test_the_default_rows_take_six_trainings():
    specs = tuple(default_rows(128))
    settings = Settings(specs, (128,), 128, 1, 2, 1, 2, 4, 24, 1e-3, 1)
    models = models_of(settings)
    assert len(specs) == 8
    assert len(models) == 2 * 6
    assert len({model.name for model in models}) == len(models)
    assert sorted(row.name for model in models[:6] for row in model.rows) == sorted(specs)


def test_checkpoints_load_with_their_encoding(finished, text):
    held_out = evaluation_bytes(load_text(str(text), 32, 16).held_out, (16, 32), 128)
    held_out = torch.from_numpy(held_out)
    figure = {wavepe.encoding(spec).trained_as(): value for spec, _, value in figures(finished)[:2]}
    figure[wavepe.encoding(SPECS[3])] = figures(finished)[3][2]
    for folder in (finished / "checkpoints").iterdir():
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert isinstance(model, wavepe.hf.WavePELlamaForCausalLM)
        trained = json.loads((folder / "training.json").read_text())["spec"]
        assert wavepe.encoding(model.config.position_encoding) == wavepe.encoding(trained)
        assert model.config.max_position_embeddings == 16
        expected = figure[wavepe.encoding(trained)]["32"]
        assert perplexity(model, held_out, 32) == expected


def test_every_encoding_starts_from_the_same_weights():
    settings = Settings(tuple(SPECS), (16,), 16, 1, 1, 1, 1, 2, 6, 1e-3, 1)
    first = new_model("none", 3, settings).state_dict()
    state = torch.random.get_rng_state()
    for spec in SPECS:
        other = new_model(spec, 3, settings).state_dict()
        assert all(torch.equal(first[key], other[key]) for key in first)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(new_model("none", 4, settings).lm_head.weight, first["lm_head.weight"])


def test_picture_and_tables(finished, text, capsys):
    assert (finished / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    table = (finished / "report.md").read_text()
    assert table.count("**") >= 2 * 2
    before = (finished / "results.json").read_bytes()
    assert main(arguments(text, finished, "--quiet")) == 0  # nothing left to do but to report
    assert (finished / "results.json").read_bytes() == before
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "16 (1x)" in printed.out
    assert printed.out.count("*") >= 2 + 1  # one best per column, and its meaning
    for spec, _, values in figures(finished):
        assert spec in printed.out
        assert f"{values['32']:.2f}" in printed.out


def test_few_lines_without_a_terminal(text, tmp_path, capsys):
    assert main(arguments(text, tmp_path, steps=40, specs=["none"])) == 0
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 6
    assert "loss" in lines[0]
    assert "left" in lines[0]


def test_seeds_are_trainings_of_their_own(text, tmp_path, capsys):
    specs = ["none", "alibi"]
    assert main(arguments(text, tmp_path, "--seeds", "2", specs=specs)) == 0
    rows = figures(tmp_path)
    assert [row[:2] for row in rows] == [("none", 0), ("alibi", 0), ("none", 1), ("alibi", 1)]
    assert rows[0][2] != rows[2][2]
    assert "±" in capsys.readouterr().out


def test_default_folder_is_named_after_the_settings(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for steps in (1, 2):
        without_out = arguments(text, "", steps=steps, specs=["none"])[:-2]
        assert main(without_out) == 0
    assert len(list((tmp_path / "runs").glob("compare-*/results.json"))) == 2


# Interruption


def test_a_finished_model_is_not_trained_again(finished, text, tmp_path, monkeypatch):
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    (out / "results.json").unlink()
    monkeypatch.setattr("wavepe.cli.compare.training.train", None)
    assert main(arguments(text, out)) == 0
    assert figures(out) == figures(finished)


# The command in a process that gets a signal in the third step of the second training.
STOPPED = """
import os, signal, sys
from pathlib import Path
from wavepe.cli import main
from wavepe.cli.compare import training

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
batch_at = training.batch_at


def stopping(tokens, step, *rest):
    if step == 2 and Path(sys.argv[-1], "training", "rope-theta-10000-seed0.pt").exists():
        os.kill(os.getpid(), int(sys.argv[1]))
    return batch_at(tokens, step, *rest)


training.batch_at = stopping
sys.exit(main(sys.argv[2:]))
"""


def stopped(number, text, out):
    done = python("-c", STOPPED, int(number), *arguments(text, out))
    assert (out / "training" / "rope-theta-10000-seed0.pt").exists()
    assert [run[0] for run in figures(out)] == SPECS[:1]
    return done


def test_killed_it_resumes_with_the_same_figures(finished, text, tmp_path, capsys):
    assert stopped(signal.SIGKILL, text, tmp_path).returncode == -signal.SIGKILL
    first = tmp_path / "checkpoints" / "none-seed0" / "model.safetensors"
    written = first.stat().st_mtime_ns
    assert main(arguments(text, tmp_path)) == 0
    assert "resumes at step" in capsys.readouterr().err
    assert first.stat().st_mtime_ns == written
    assert figures(tmp_path) == figures(finished)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)],
)
def test_a_signal_saves_and_says_how_to_resume(finished, text, tmp_path, number, status):
    done = stopped(number, text, tmp_path)
    assert done.returncode == status
    state = torch.load(tmp_path / "training" / "rope-theta-10000-seed0.pt", weights_only=True)
    assert state["step"] == 3  # the last state is of step 2
    advice = done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert advice.startswith("wavepe compare: interrupted; to resume: wavepe compare ")
    again = shlex.split(advice.partition("to resume: wavepe ")[2])
    assert main(again) == 0
    assert figures(tmp_path) == figures(finished)


# Bad input


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--encodings", "rotary"], "'rotary'"),
        (["--encodings", "rope:base=3"], "'base'"),
        (["--encodings", "none", "rope", "none"], "none: given twice"),
        (["--encodings", "wavelet:scales=3", "wavelet:scales=3,min_scale=1"], "given twice"),
        (["--encodings", "wavelet:scales=5"], "5"),
        (["--encodings", "rope:interleaved=true"], "interleaved=true is for models that"),
        (["--encodings", "rope:partial_rotary_factor=0.5"], "rotates 4 of 6 dims"),
        (["--encodings"], "--encodings"),
        (["--lengths", "1"], "--lengths 1: needs 2 to"),
        (["--lengths", "-8"], "needs 2 to"),
        (["--lengths", "16", "x"], "--lengths x: needs integers"),
        (["--lengths", "16", "32.5"], "--lengths 32.5: needs integers"),
        (["--lengths", "16", "32", "16"], "--lengths 16: given twice"),
        (["--lengths", ","], "at least one number"),
        (["--lengths", "99999"], "too short"),
        (["--train-length", "99999"], "too short"),
        (["--steps", "0"], "--steps 0: needs 1 to"),
        (["--steps", "many"], "--steps"),
        (["--seeds", "0"], "--seeds 0"),
        (["--batch", "0"], "--batch 0"),
        (["--layers", "0"], "--layers 0"),
        (["--heads", "0"], "--heads 0"),
        (["--head-dim", "7"], "--head-dim 7: needs an even number"),
        (["--train-length", "1"], "--train-length 1"),
        (["--eval-bytes", "0"], "--eval-bytes 0"),
        (["--threads", "0"], "--threads 0"),
        (["--threads", "20000"], "--threads 20000: needs 1 to 1024"),
        (["--threads", "99999999999"], "--threads 99999999999: needs 1 to 1024"),
        (["--save-every", "0"], "--save-every 0"),
        (["--lr", "0"], "--lr 0: needs a positive number"),
        (["--lr", "nan"], "--lr nan"),
        (["--lr", "inf"], "--lr inf"),
        (["--data", "/does/not/exist"], "no such file or folder"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(text, tmp_path, capsys, wrong, words):
    out = tmp_path / "out"
    assert main(arguments(text, out, *wrong)) == 2
    assert words in one_line(capsys)
    assert not out.exists()


def test_short_empty_and_unreadable_text(text, tmp_path, capsys):
    out = tmp_path / "out"
    short = tmp_path / "short.txt"
    for size in (0, 1, 32, 48):  # held out 32, so 17 too few to train on
        short.write_bytes(b"a" * size)
        assert main(arguments(short, out)) == 2
        assert "too short" in one_line(capsys)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "binary").write_bytes(b"\0" * 9999)
    assert main(arguments(empty, out)) == 2
    assert "no text files" in one_line(capsys)
    assert not out.exists()


@pytest.mark.parametrize("call", ["mkdir", "read_bytes"])
def test_files_and_folders_without_permission(text, tmp_path, capsys, monkeypatch, call):
    def refused(path, *args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, call, refused)  # the tests may run as root, who is refused nothing
    out = tmp_path / "out"
    assert main(arguments(text, out)) == 2
    error = one_line(capsys)
    assert "Permission denied" in error
    assert str(out if call == "mkdir" else text) in error


def test_a_model_too_large_for_the_memory(text, tmp_path, capsys):
    huge = ["--head-dim", "2147483646", "--heads", "2147483647", "--quiet"]
    assert main(arguments(text, tmp_path, *huge, specs=["none"])) == 1
    error = one_line(capsys)
    assert "out of memory; lower --batch, " in error
    assert "--head-dim" in error


def test_a_loss_that_is_no_number_ends_it(text, tmp_path, capsys):
    assert main(arguments(text, tmp_path, "--lr", "1e30", "--quiet")) == 1
    error = one_line(capsys)
    assert "--lr" in error
    assert "none: the loss is" in error
