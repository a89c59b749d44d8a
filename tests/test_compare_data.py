"""The text and the tasks of `wavepe compare`: splits, batches, pieces, questions and answers."""

import errno
import math
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compare_cases import text_in
from wavepe.common.errors import UsageError
from wavepe.experiments import evaluation
from wavepe.experiments.data import batch_at, evaluation_bytes, load_text
from wavepe.experiments.tasks import TASKS
from wavepe.training.device import CPU


@pytest.fixture
def text(tmp_path):
    """A folder of twelve text files, 300 bytes each."""
    return text_in(tmp_path)


def test_held_out_files_are_whole_and_apart(text):
    read = load_text(str(text), 32, 16)
    contents = [file.read_bytes() for file in sorted(text.iterdir())]
    train, held_out = read.train.tobytes(), read.held_out.tobytes()
    assert len(train) + len(held_out) == sum(map(len, contents))
    for content in contents:
        assert (content in train) != (content in held_out)
    assert 0 < len(held_out) < 0.2 * len(train)
    again = load_text(str(text), 32, 16)
    assert again.sha256 == read.sha256
    assert again.held_out.tobytes() == held_out


def test_a_single_file_holds_out_its_end(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "one.txt"
    file.write_bytes(bytes(range(1, 201)) * 5)
    for path in (file, folder):
        read, other = load_text(str(path), 32, 16), load_text(str(path), 32, 16, "validation")
        parts = read.train, other.held_out, read.held_out
        assert b"".join(part.tobytes() for part in parts) == file.read_bytes()
        assert len(read.held_out) == len(other.held_out) == 50
        assert other.train.tobytes() == read.train.tobytes()
        assert other.sha256 != read.sha256


def test_large_files_stay_in_training_unless_all_are(tmp_path):
    (tmp_path / "a").write_bytes(b"a" * 5000)
    (tmp_path / "b").write_bytes(b"b" * 6000)
    assert set(load_text(str(tmp_path), 32, 16).held_out.tobytes()) == {ord("a")}
    (tmp_path / "c").write_bytes(b"c" * 300)
    assert set(load_text(str(tmp_path), 32, 16).held_out.tobytes()) == {ord("c")}


@pytest.mark.slow  # reads all of it
def test_the_standard_library_is_the_default():
    read = load_text(None, 1024, 128)
    assert len(read.train) > 5_000_000
    assert 0.04 < len(read.held_out) / len(read.train) < 0.07
    assert b"def test_" not in read.held_out.tobytes()[:100_000]


def test_a_standard_library_without_sources(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(UsageError, match="data"):
        load_text(None, 16, 16)


def test_batches_follow_from_step_and_seed():
    train = np.arange(200, dtype=np.uint8)
    batch = batch_at(train, 7, 1, 5, 16)
    assert batch.shape == (5, 17)
    assert (np.diff(batch, axis=1) == 1).all()
    assert np.array_equal(batch, batch_at(train, 7, 1, 5, 16))
    others = [batch_at(train, step, seed, 5, 16) for step in range(12) for seed in range(3)]
    assert sum(np.array_equal(batch, other) for other in others) == 1
    shortest = batch_at(train[:17], 0, 0, 3, 16)
    assert np.array_equal(shortest, np.tile(train[:17], (3, 1)))


@pytest.mark.parametrize("lengths", [(16, 32, 128), (16, 24), (128,)])
def test_every_length_scores_the_same_bytes(lengths):
    chosen = evaluation_bytes(np.arange(5000).astype(np.int64), lengths, 600)
    assert all(len(chosen) % length == 0 for length in lengths)
    assert 256 < len(chosen) <= 600
    pieces = chosen.reshape(-1, max(lengths))
    if max(lengths) == 128:
        assert (np.diff(pieces, axis=1) == 1).all()  # no seam within a piece
        assert len(np.unique(chosen)) == len(chosen)
        assert chosen.max() > 3500  # spread over all of it


def test_lengths_without_a_common_multiple_take_a_stretch():
    held_out = np.arange(5000).astype(np.int64)
    chosen = evaluation_bytes(held_out, (101, 103), 600)
    assert np.array_equal(chosen, held_out[:600])
    assert len(evaluation_bytes(held_out, (101, 103), 50)) == 103


def test_comparisons_inside_the_data_are_not_read(text):
    before = load_text(str(text), 32, 16)
    run = text / "runs" / "one"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/config.json").write_text("{}" * 100)
    (run / "settings.json").write_text('{"encodings": ["none"], "text_sha256": "0"}')
    assert load_text(str(text), 32, 16).sha256 == before.sha256


def test_a_binary_file_is_refused(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"text " * 100 + b"\0" + b"text " * 100)
    with pytest.raises(UsageError, match=r"model\.bin: needs a text, but byte 500 .* is NUL"):
        load_text(str(file), 32, 16)


def test_a_pipe_is_read_and_a_device_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = b"some text " * 100
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    read = load_text(str(pipe), 32, 16)
    writer.join()
    assert content.startswith(read.train.tobytes())
    assert content.endswith(read.held_out.tobytes())
    with pytest.raises(UsageError, match="/dev/null: is a device"):
        load_text("/dev/null", 32, 16)


def test_a_folder_that_cannot_be_read_is_named(text, monkeypatch):
    (text / "inner").mkdir()
    scandir = os.scandir

    def refusing(path):  # the tests may run as root, who is refused nothing
        if Path(path).name == "inner":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(UsageError, match=r"cannot read .*inner: Permission denied"):
        load_text(str(text), 32, 16)


# ------------------------------------------------------------------ tasks

TEXT = np.frombuffer(b"The quick brown fox jumps over the lazy dog. " * 99, np.uint8)
QUESTIONS = {"needle": 1, "keys": 8, "tracking": 2}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [0, 1, 40, 900])
def test_the_answers_follow_from_the_statements(name, length):
    """By a reader of the statements that shares nothing with the one who wrote them."""
    task = TASKS[name]
    length += task.least
    drawn = task.examples(TEXT, [3, length], 20, length)
    assert drawn.tokens.shape == drawn.questions.shape == (20, length)
    depths = []
    for tokens, questions in zip(drawn.tokens, drawn.questions, strict=True):
        text = bytes(tokens.astype(np.uint8)).decode("ascii")
        assert questions.max() == QUESTIONS[name]
        first = int((questions == 1).argmax())
        known = {}
        told = re.compile(r"\$(\w)=(\$?\w+);")
        begin = text.rindex("$", 0, first)
        for found in told.finditer(text[:begin]):
            key, value = found.groups()
            known[key] = known[value[1:]] if value.startswith("$") else value
            depths.append(found.start() / length)
        for number in range(1, QUESTIONS[name] + 1):
            where = np.flatnonzero(questions == number)
            key = text[where[0] - 2]
            assert text[where[0] - 3 : where[0]] == f"${key}="
            assert text[where[0] : where[-1] + 1] == known[key]
            assert text[where[-1] + 1] == ";"
        hay = told.sub("", text[:begin])
        assert hay in TEXT.tobytes().decode("ascii")
    if length > 900:
        assert min(depths) < 0.2
        assert max(depths) > 0.7


@pytest.mark.parametrize("name", TASKS)
def test_examples_follow_from_the_seed(name):
    task = TASKS[name]
    one, same, other = (task.examples(TEXT, [7, n], 4, 120) for n in (1, 1, 2))
    assert np.array_equal(one.tokens, same.tokens)
    assert np.array_equal(one.questions, same.questions)
    assert not np.array_equal(one.tokens, other.tokens)


@pytest.mark.parametrize("part", ["all", "none", "none for sure", "first", "second bytes"])
def test_scores_of_models_that_know_the_answers(monkeypatch, part):
    """All answers, none, those of the first half of the questions, or half of each.

    A loss beyond all numbers is infinite.
    """
    answers = {}
    examples = type(TASKS["keys"]).examples

    def noted(task, *given):
        drawn = examples(task, *given)
        for tokens, questions in zip(drawn.tokens, drawn.questions, strict=True):
            is_known = questions <= {"none": 0, "none for sure": 0, "first": 4}.get(part, 8)
            if part == "second bytes":
                is_known = np.diff(questions, prepend=0) <= 0
            answers[tokens[:-1].tobytes()] = np.where(is_known, tokens, ord("?"))[1:]
        return drawn

    class Knowing(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            told = [answers[row.numpy().tobytes()] for row in input_ids]
            hot = torch.nn.functional.one_hot(torch.from_numpy(np.stack(told)), 256)
            return SimpleNamespace(logits=hot * (1e4 if part == "none for sure" else 100.0))

    monkeypatch.setattr(type(TASKS["keys"]), "examples", noted)
    settings = SimpleNamespace(task="keys", lengths=(96, 300), eval_bytes=1)
    figures = evaluation._answers(Knowing(), TEXT, settings, CPU)
    accuracy = {"all": 1.0, "first": 0.5}.get(part, 0.0)
    assert figures["accuracy"] == {"96": accuracy, "300": accuracy}
    expected = {"all": 1, "none": math.exp(100), "none for sure": math.inf}.get(part, math.exp(50))
    assert figures["perplexity"]["300"] == pytest.approx(expected, rel=1e-4)
