"""wavepe.analysis.needle with models whose answers are known."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from wavepe.analysis import needle

BYTES = 256


class Model(torch.nn.Module):
    """A model that continues a text of bytes by the rule of a subclass, and records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout()
        self.contexts = []

    def forward(self, input_ids, use_cache):
        assert not torch.is_grad_enabled()
        assert not self.dropout.training
        rows = [bytes(row.tolist()) for row in input_ids]
        self.contexts += rows
        logits = torch.zeros(*input_ids.shape, BYTES)
        for number, row in enumerate(rows):
            for end in range(len(row)):
                logits[number, end, self.next(row[: end + 1])] = 1
        return SimpleNamespace(logits=logits)


class Copier(Model):
    """A model that copies the value after the earlier occurrence of the last key."""

    def next(self, seen):
        found = re.search(rb"([a-z]{4}=)(\d*)$", seen)
        if found is None:
            return 0
        key, digits = found.groups()
        value = re.search(key + rb"(\d{5})\n", seen)
        return value[1][len(digits)] if value and len(digits) < 5 else 0


class Remembers(Model):
    """A model that answers with the secret number of a sentence."""

    def next(self, seen):
        value = re.search(rb"number is( \d{5})\.", seen)
        answered = re.search(rb"The secret number is( ?\d*)$", seen)
        return value[1][len(answered[1])] if value and answered and len(answered[1]) < 6 else 0


class Silent(Model):
    def next(self, seen):
        return 0


class Forgets(Copier):
    """A model that forgets a fact that is more than 60 bytes back."""

    def next(self, seen):
        return super().next(seen[-60:])


def test_who_copies_finds_all_and_who_is_silent_none():
    lengths, depths = [40, 100, 163], [0, 0.5, 1]
    found = needle(Copier(), None, lengths, depths, trials=3)
    np.testing.assert_array_equal(found, np.ones((3, 3)))
    assert found.dtype == np.float64
    np.testing.assert_array_equal(
        needle(Silent(), None, lengths, depths, trials=3), np.zeros((3, 3))
    )


def test_sentences():
    found = needle(Remembers(), None, [150, 300], [0, 1], form="sentence", trials=2)
    np.testing.assert_array_equal(found, np.ones((2, 2)))
    text = "It was dark. Nobody spoke.\n"
    model = Remembers()
    assert needle(model, None, [200], [0.5], form="sentence", haystack=text, trials=1) == 1
    assert b"Nobody spoke" in model.contexts[0]
    assert b"grass" not in model.contexts[0]


def test_statements_are_those_of_the_task():
    """A model that reads the task of `wavepe compare` reads them, too."""
    tasks = pytest.importorskip("wavepe.cli.compare.tasks")

    class Reads(Model):
        def next(self, seen):
            told = re.search(rb"\$n=(\w{4});", seen)
            answered = re.search(rb"\$n=(\w{0,3})$", seen)
            return told[1][len(answered[1])] if told and answered else 0

    np.testing.assert_array_equal(
        needle(Reads(), None, [40, 200], [0, 1], form="statement", trials=3), np.ones((2, 2))
    )
    text = np.frombuffer(b"It was dark. " * 50, np.uint8)
    drawn = tasks.TASKS["needle"].examples(text, [0], 1, 200)
    first = int(drawn.questions[0].argmax())
    seen = bytes(drawn.tokens[0, :first].astype(np.uint8))
    assert Reads().next(seen) == drawn.tokens[0, first]


def test_a_short_memory_finds_what_is_near():
    found = needle(Forgets(), None, [44, 200], [0, 0.5, 1], trials=4)
    np.testing.assert_array_equal(found, [[1, 1, 1], [0, 0, 1]])


def test_every_digit_counts():
    class AlmostRight(Copier):
        def next(self, seen):
            right = super().next(seen)
            return right + 1 if re.search(rb"=\d{4}$", seen) else right

    assert needle(AlmostRight(), None, [80], [0.5]) == 0


@pytest.mark.parametrize("length", [30, 77, 200])
@pytest.mark.parametrize("depth", [0, 0.3, 0.5, 1])
def test_contexts_have_their_length_and_the_fact_its_depth(length, depth):
    model = Silent()
    needle(model, None, [length], [depth], trials=3)
    line = len("abcd=12345\n")
    for context in model.contexts:
        context = context[:length]
        key = context[-5:]
        assert len(context) == length
        assert context.count(key) == 2  # the fact, and the question
        place, room = context.index(key), length - line - len(key)
        assert abs(place - depth * room) <= line / 2
        keys = re.findall(rb"([a-z]{4})=\d{5}\n", context)
        assert len(set(keys)) == len(keys)


def test_seeds_give_the_same_facts_to_every_model():
    first, second, other = Silent(), Copier(), Silent()
    for model, seed in ((first, 7), (second, 7), (other, 8)):
        needle(model, None, [50], [0.5], trials=4, seed=seed)
    assert first.contexts == second.contexts
    assert len(set(first.contexts)) == 4
    assert not set(first.contexts) & set(other.contexts)


def test_progress_and_modes():
    steps, model = [], Silent()
    needle(model, None, [40, 50], [0, 1], trials=3, progress=lambda *at: steps.append(at))
    assert model.training
    assert model.dropout.training
    assert [total for _, total in steps] == [12] * len(steps)
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert steps[-1] == (12, 12)


def words(text, add_special_tokens=True):
    """A tokenizer of two bytes a token, which begins texts with the token 0."""
    content = text.encode() + b" " * (len(text) % 2)
    ids = [1 + (a * 31 + b) % 997 for a, b in zip(content[::2], content[1::2], strict=True)]
    return {"input_ids": [0] * add_special_tokens + ids}


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=998)
        self.given = []

    def forward(self, input_ids, use_cache, logits_to_keep):
        self.given.append(input_ids)
        assert logits_to_keep == 3  # a blank and five digits
        kept = torch.nn.functional.one_hot(input_ids, 998).float()
        return SimpleNamespace(logits=kept[:, -logits_to_keep:].roll(-1, 1))


def test_tokenizers():
    """Their first token comes first, and no logits but those of the answer are asked for."""
    model = Tokens()
    found = needle(model, words, [80, 120], [0.5], trials=2)
    assert found.shape == (2, 1)
    for given, length in zip(model.given, (80, 120), strict=True):
        assert given.shape == (2, length + 3 - 1)  # the answer's last token is never shown
        assert (given[:, 0] == 0).all()
        assert (given[:, 1:] != 0).all()


def test_lengths_beyond_the_model_run():
    pytest.importorskip("transformers")
    from hf_model import LENGTH, patched_tiny

    model = patched_tiny("alibi", vocab_size=BYTES)
    found = needle(model, None, [LENGTH * 8], [0, 1], trials=2)
    assert ((found >= 0) & (found <= 1)).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": None}, TypeError, "model must be .* got NoneType"),
        ({"tokenizer": "gpt2"}, TypeError, "tokenizer must be .* None for bytes; got str"),
        ({"lengths": [10]}, ValueError, "lengths must be at least 16 tokens"),
        ({"lengths": []}, ValueError, "lengths must hold at least one number"),
        ({"lengths": 64}, TypeError, "lengths must be a sequence of numbers, got int"),
        ({"lengths": "64"}, TypeError, "lengths must be a sequence of numbers, got str"),
        ({"lengths": [64.0]}, TypeError, "64.0"),
        ({"depths": [1.5]}, ValueError, "depths must be a number from 0 to 1, got 1.5"),
        ({"depths": [50]}, ValueError, "0 to 1, got 50"),
        ({"depths": ["0"]}, TypeError, "depths"),
        ({"form": "poem"}, ValueError, "poem.*pairs, sentence"),
        ({"trials": 0}, ValueError, "trials must be at least 1, got 0"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"haystack": ""}, ValueError, "haystack must be a text, got an empty one"),
        ({"haystack": 3}, TypeError, "haystack must be a str or bytes, got int"),
    ],
)
def test_bad_input(change, error, words):
    given = {"model": Silent(), "tokenizer": None, "lengths": [64], "depths": [0.5], **change}
    with pytest.raises(error, match=words):
        needle(**given)


def test_a_vocabulary_without_the_bytes_is_refused():
    model = Silent()
    model.config = SimpleNamespace(vocab_size=50)
    with pytest.raises(ValueError, match=r"must be ids in 0\.\.49"):
        needle(model, None, [64], [0.5])
