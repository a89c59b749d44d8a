"""The tasks of `wavepe compare --task`: their questions, and the scores of answers."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from compare_cases import arguments, figures, results, text_in
from wavepe.cli.compare.tasks import TASKS
from wavepe.cli.errors import UsageError

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
        first = (
            int(np.argmax(questions)) if QUESTIONS[name] == 1 else int((questions == 1).argmax())
        )
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
    one, same, other = (TASKS[name].examples(TEXT, [7, n], 4, 120) for n in (1, 1, 2))
    assert np.array_equal(one.tokens, same.tokens)
    assert np.array_equal(one.questions, same.questions)
    assert not np.array_equal(one.tokens, other.tokens)


@pytest.mark.parametrize("name", TASKS)
def test_too_short_for_the_task(name):
    task = TASKS[name]
    task.check(task.least)
    with pytest.raises(UsageError, match=f"--task {name}: needs lengths of at least {task.least}"):
        task.check(task.least - 1)


@pytest.fixture
def torch():
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


@pytest.mark.parametrize(("knows", "accuracy"), [(1.0, 1.0), (0.0, 0.0), (0.5, 0.5)])
def test_scores_of_models_that_know_the_answers(torch, monkeypatch, knows, accuracy):
    """The models know all answers, none, or those of the first half of the questions."""
    from wavepe.cli.compare import evaluation
    from wavepe.cli.device import CPU

    answers = {}
    examples = type(TASKS["keys"]).examples

    def noted(task, *given):
        drawn = examples(task, *given)
        for tokens, questions in zip(drawn.tokens, drawn.questions, strict=True):
            known = np.where(questions <= knows * 8, tokens, ord("?"))
            answers[tokens[:-1].tobytes()] = known[1:]
        return drawn

    class Knowing(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            told = [answers[row.numpy().tobytes()] for row in input_ids]
            hot = torch.nn.functional.one_hot(torch.from_numpy(np.stack(told)), 256)
            return SimpleNamespace(logits=100.0 * hot)

    monkeypatch.setattr(type(TASKS["keys"]), "examples", noted)
    settings = SimpleNamespace(task="keys", lengths=(96, 300), eval_bytes=1)
    found = evaluation._answers(Knowing(), TEXT, settings, CPU)
    assert found["accuracy"] == {"96": accuracy, "300": accuracy}
    expected = math.exp(100 * (1 - knows))
    assert found["perplexity"]["300"] == pytest.approx(expected, rel=1e-4)


def test_a_loss_beyond_all_numbers_is_infinite(torch):
    from wavepe.cli.compare import evaluation
    from wavepe.cli.device import CPU

    class Wrong(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            logits = torch.zeros(*input_ids.shape, 256)
            logits[..., ord("?")] = 1e4
            return SimpleNamespace(logits=logits)

    settings = SimpleNamespace(task="needle", lengths=(24,), eval_bytes=1)
    found = evaluation._answers(Wrong(), TEXT, settings, CPU)
    assert found == {"perplexity": {"24": math.inf}, "accuracy": {"24": 0.0}}


def test_a_task_is_compared(torch, tmp_path, capsys):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    from wavepe.cli import main

    (tmp_path / "text").mkdir()
    text, out = text_in(tmp_path / "text"), tmp_path / "out"
    more = ["--task", "needle", "--train-length", "24", "--lengths", "24", "48", "--seeds", "2"]
    assert main(arguments(text, out, *more, specs=["none", "alibi"])) == 0
    for run in results(out)["runs"]:
        assert set(run["accuracy"]) == set(run["perplexity"]) == {"24", "48"}
        assert all(0 <= share <= 1 for share in run["accuracy"].values())
    assert len(figures(out)) == 4
    assert results(out)["summary"][0]["accuracy"]["24"]["std"] is not None
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert "![Task needle: share of answers" in (out / "report.md").read_text()
    # The command `needle` asks this model for what it was trained on, unless told otherwise.
    (model,) = (out / "checkpoints").glob("none-seed0")
    words = ["needle", str(model), "--lengths", "32", "--trials", "1"]
    for more, form in (([], "statement"), (["--form", "pairs"], "pairs")):
        assert main([*words, *more]) == 0
        assert f"({form}: " in capsys.readouterr().out
