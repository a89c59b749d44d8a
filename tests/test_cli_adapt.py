"""The command adapt."""

import json
import re
import shlex

import pytest
from compare_cases import interrupt
from hf_model import TRAINER_WARNS, tiny
from transformers import AutoModelForCausalLM
from wavepe.cli import main
from wavepe.experiments.progress import Report

pytestmark = TRAINER_WARNS
SIZES = ["--tokens", "2e3", "--length", "40", "--batch", "2"]


@pytest.fixture
def words(tmp_path):
    """The first words of a command: a model of bytes, a folder to write, an encoding, a text."""
    tiny(vocab_size=256, max_position_embeddings=64).save_pretrained(tmp_path / "stock")
    (tmp_path / "text.txt").write_text("It was dark, and nobody spoke.\n" * 900)
    places = [tmp_path / "stock", tmp_path / "new"]
    return ["adapt", *map(str, places), "alibi", "--data", str(tmp_path / "text.txt"), *SIZES]


def test_adapt(words, tmp_path, capsys):
    words += ["--control", "--held-out", "300"]
    assert main(words) == 0
    printed, log = capsys.readouterr()
    assert re.search(r"^swapped, fine-tuned: training: \d+ of 25, 0:00:\d\d left$", log, re.M)
    for label in ("stock model ", "stock model, YaRN", "swapped  ", "swapped, fine-tuned"):
        assert label in printed
    assert "rope:fraction=0.25+alibi" in printed
    assert log.startswith("encoding: rope:fraction=0.25+alibi; recipe auto: keeps")
    assert "(1/4 of all pairs)" in log.splitlines()[0]
    assert "warning" not in log  # the text has more tokens than it trains on
    assert "biases" not in printed  # there are no wavelets
    assert re.search(r"^Trained on 2000 tokens in \d+ s\.$", printed, re.M)
    assert "stock model, YaRN: rope:type=yarn,factor=1.25\n" in printed
    assert "Learning rate: 0.0001; of the stock model: 5e-05." in printed
    results = json.loads((tmp_path / "new/results.json").read_text())
    found = results["perplexity"]
    assert set(found) == {"stock", "yarn", "self-extend", "control", "swapped", "adapted"}
    assert found["self-extend"]["40"] != found["stock"]["40"]  # beyond 32 neighbors
    for name in found:
        assert f"{found[name]['80']:.2f}" in printed
    rivals = {"control": "fine-tuned", "yarn": "YaRN", "self-extend": "Self-Extend"}
    for name, label in ((name, f"stock model, {label}") for name, label in rivals.items()):
        ahead = [n for n in ("40", "64", "80") if found[name][n] < found["adapted"][n]]
        line = f"At {' and '.join(ahead)} bytes it is behind: {label}."
        assert (line in printed.splitlines()) == bool(ahead)
        assert printed.count(f"behind: {label}") == bool(ahead)
    assert found["adapted"]["40"] < found["swapped"]["40"]
    report = (tmp_path / "new/report.md").read_text()
    assert report.startswith("# stock with rope:fraction=0.25+alibi\n")
    assert "| `swapped, fine-tuned` |" in report
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert model.config.position_encoding == "rope:fraction=0.25+alibi"
    (tmp_path / "new/report.md").unlink()
    assert results["settings"]["held_out"] == 300
    capsys.readouterr()
    assert main([*words, "--resume"]) == 0
    new = tmp_path / "new"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"{new} is finished already: nothing was left to do"
    assert (new / "report.md").exists()
    assert main([*words, "--tokens", "2400", "--lr", "1e-3", "--gradient-checkpointing"]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(
        f"wavepe adapt: error: {new} holds an adaptation with other settings ("
    )
    assert "tokens 2000 there, 2400 here; learning_rate 0.0001 there, 0.001 here; " in message
    assert message.endswith("give another folder, or give its model to adapt, which trains it on")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lr", "0"], "--lr must be above 0, got 0.0"),
        (["--tokens", "9"], "tokens must be at least those of one step, 80, got 9"),
        (["--lora", "0"], "--lora must be at least 1, got 0"),
    ],
)
def test_errors(words, more, message, capsys):
    assert main([*words, *more]) == 2
    assert message in capsys.readouterr().err


def test_links_that_lead_out_of_the_folder(words, tmp_path, capsys):
    """The new folder would hold a copy, as of a chat template."""
    template = tmp_path / "stock" / "additional_chat_templates" / "tool.jinja"
    template.parent.mkdir()
    template.symlink_to("../../text.txt")
    (tmp_path / "stock" / "runs").symlink_to(tmp_path)  # a folder, which no program copies
    assert main(words) == 2
    message = "links lead out of the folder (additional_chat_templates/tool.jinja): remove them"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(("spec", "line"), [
    ("wavelet", "pairs), and gives wavelets biases and a projection; 4 scales, so that the largest "
     "is at most a quarter of 40 tokens"),
    pytest.param(
        "wavelet:scales=1+32", "pairs), and gives wavelets biases and a projection; the largest "
        "scale is 32, which is above 10, a quarter of the trained length", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_short_text_is_read_again(words, tmp_path, capsys, spec, line):
    """The log says so, and its first line has the scales, in place of a warning."""
    (tmp_path / "text.txt").write_text("It was dark, and nobody spoke.\n" * 40)
    words[3] = spec
    assert main([*words, "--tokens", "1680", "--lengths", "40"]) == 0  # 23 rows of 40, 310 held out
    out, log = capsys.readouterr()
    assert "Trained on 1680 tokens, 1.8 times the text, in" in out
    assert "compare YaRN and Self-Extend" in out.replace("\n", " ")  # which no length has shown
    assert line in log.splitlines()[0]
    assert "text.txt has 930 bytes to train on, fewer than the 1680 asked for: training" in log


def test_wrong_folders(words, tmp_path, capsys):
    words[2] = str(tmp_path / "text.txt")
    assert main(words) == 2
    assert "is a file: give a folder" in capsys.readouterr().err
    assert main([*words[:4], "--tokens", "9"]) == 2
    assert "arguments are required: --data (wavepe" in capsys.readouterr().err


def test_ctrl_c_and_on(words, tmp_path, capsys, monkeypatch):
    """In a step of the training. The message has the command that goes on."""
    interrupt(monkeypatch, Report, "_advance", lambda report, number, done: done == 5)
    assert main(words) == 130
    assert capsys.readouterr().err.endswith(f"interrupted; to resume: wavepe {shlex.join(words)}\n")
    assert not (tmp_path / "new/model.safetensors").exists()
    assert main([*words, "--quiet"]) == 0
    assert (tmp_path / "new/model.safetensors").exists()
