"""examples/hf_swap_and_train.py at toy size: its figures and files, a second run, its errors."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("rich")

from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.utils import logging

FILE = Path(__file__).parent.parent / "examples" / "hf_swap_and_train.py"
SPEC = "wavelet:scales=4"
NAMES = ["rope", f"rope -> {SPEC}"]
TINY = "--length 16 --steps 4 --more 2 --batch 2 --layers 1 --hidden 32 --eval-bytes 128"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads, bars = torch.get_num_threads(), logging.is_progress_bar_enabled()
    yield module
    torch.set_num_threads(threads)
    if bars:
        logging.enable_progress_bar()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """4000 bytes of eight letters."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    letters = np.random.default_rng(0).integers(97, 105, size=4000).astype(np.uint8)
    path.write_bytes(letters.tobytes())
    return path


def run(example, out, text, *more):
    words = ["--out", out, "--data", text, "--encoding", SPEC, *TINY.split(), *more]
    return example.main([str(word) for word in words])


def kept(out):
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def finished(example, text, tmp_path_factory):
    """The folder of one run."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert run(example, out, text) == 0
    return out


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_results(finished):
    results = kept(finished)
    assert results["train_length"] == 16
    assert results["encoding"] == SPEC
    assert results["evaluated_bytes"] == 128
    assert results["settings"]["steps"] == 4
    assert results["environment"]["torch"] == torch.__version__
    runs = results["runs"]
    names = [*NAMES, *(f"{name}, trained on" for name in NAMES)]
    assert [each["encoding"] for each in runs] == names
    assert [each["steps"] for each in runs] == [4, 4, 6, 6]
    for each in runs:
        assert list(each["perplexity"]) == ["16", "64"]
        assert all(1 < value < 1000 for value in each["perplexity"].values())
    seconds = [each["seconds"] for each in runs]
    assert seconds[1] == 0 < min(seconds[0], *seconds[2:])
    assert len({each["perplexity"]["64"] for each in runs}) == 4


def test_the_swap_changes_no_weight_and_training_does(finished):
    stock, swapped = weights(finished / "llama"), weights(finished / "llama-swapped")
    assert set(stock) == set(swapped)
    for name, weight in stock.items():
        assert torch.equal(weight, swapped[name])
    for folder in ("llama", "llama-swapped"):
        trained = weights(finished / f"{folder}-trained")
        assert all(not torch.equal(trained[name], weight) for name, weight in stock.items())
    assert AutoConfig.from_pretrained(finished / "llama-trained").model_type == "llama"
    config = AutoConfig.from_pretrained(finished / "llama-swapped-trained")
    assert config.position_encoding == SPEC


def test_it_prints_every_figure_and_repeats_itself(example, finished, text, tmp_path, capsys):
    assert run(example, tmp_path / "again", text) == 0
    shown = capsys.readouterr().out
    for first, second in zip(kept(finished)["runs"], kept(tmp_path / "again")["runs"], strict=True):
        assert first["perplexity"] == second["perplexity"]
        assert first["encoding"] in shown
        assert all(f"{value:.2f}" in shown for value in first["perplexity"].values())
    assert run(example, tmp_path / "other", text, "--seed", "1") == 0
    assert kept(tmp_path / "other")["runs"][0] != kept(finished)["runs"][0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "holds models already"),
        (["--encoding", "wavelett"], "wavelett"),
        (["--length", "2000"], "text too short"),
    ],
)
def test_what_is_refused_at_once(more, message, example, finished, text, capsys):
    before = (finished / "results.json").read_bytes()
    assert run(example, finished, text, *more) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert "loss" not in shown.out
    assert (finished / "results.json").read_bytes() == before
