"""wavepe.analysis.perplexity against losses taken token by token in float64, and needle with models
whose answers are known."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from wavepe.analysis import needle, perplexity

VOCABULARY = 7
BYTES = 256


class Averages(torch.nn.Module):
    """Predicts from the mean of the embeddings seen and the place in the pass: context matters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding = torch.nn.Parameter(torch.randn(VOCABULARY, 4, generator=generator) * 2)
        self.output = torch.nn.Parameter(torch.randn(4, VOCABULARY, generator=generator) * 2)
        self.dropout = torch.nn.Dropout(0.5)
        self.config = SimpleNamespace(vocab_size=VOCABULARY, num_attention_heads=1)
        self.passes = []

    def forward(self, input_ids, use_cache):
        assert not torch.is_grad_enabled()
        assert not use_cache
        self.passes.append(tuple(input_ids.shape))
        place = torch.arange(1, input_ids.shape[1] + 1)[:, None]
        mean = self.embedding[input_ids].cumsum(1) / place
        return SimpleNamespace(logits=(self.dropout(mean) + 0.1 * place.log()) @ self.output)

    def surprise(self, seen, place, token):
        """-log p(token | the first `place` tokens of a pass), in float64."""
        embedding = self.embedding.detach().double().numpy()
        output = self.output.detach().double().numpy()
        logits = (embedding[seen[:place]].mean(0) + 0.1 * math.log(place)) @ output
        return np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token]


def tokens_of(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, VOCABULARY, count))


# ------------------------------------------------------------------ perplexity


def whole(t, length):
    """The pass in which token t of a piece is scored: where it starts and stops, or None."""
    return 0, length


def blocks(window):
    return lambda t, length: (t - t % window, t - t % window + window) if t % window else None


def sliding(window, stride):
    """The first window that holds t behind its first place, or else one that ends just before."""

    def of(t, length):
        starts = range(0, t, stride)
        inside = [start for start in starts if start < t < start + window]
        start = inside[0] if inside else next(i for i in starts if i + window == t)
        return start, start + window

    return of


PROTOCOLS = [
    ({}, whole),
    *(({"protocol": "blocks", "window": w}, blocks(w)) for w in (2, 3, 4, 5, 8, 16, 17, 30)),
    *(
        ({"protocol": "sliding", "window": w, "stride": s}, sliding(w, s))
        for w, s in (
            (2, 1), (2, 2), (4, 1), (4, 3), (4, 4), (5, 2), (5, 5), (16, 4), (17, 17), (30, 3),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("length", [17, 3])
@pytest.mark.parametrize(
    ("options", "pass_of"), PROTOCOLS, ids=lambda x: str(x) if isinstance(x, dict) else ""
)
def test_every_protocol(options, pass_of, length):
    """Each token is scored once, in a pass no longer than the window; a remainder is dropped.

    The passes of float32 differ from the expected loss by rounding alone.
    """
    model, tokens, losses = Averages(), tokens_of(60), []
    for piece in tokens.numpy()[: 60 // length * length].reshape(-1, length):
        for t in range(1, length):
            if (bounds := pass_of(t, length)) is not None:
                start, stop = bounds
                losses.append(model.surprise(piece[start:stop], t - start, piece[t]))
    expected = pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert perplexity(model, tokens, length, **options) == expected
    assert all(width <= options.get("window", length) for _, width in model.passes)


@pytest.mark.parametrize("protocol", ["whole", "blocks", "sliding"])
def test_progress_counts_the_tokens_run(protocol):
    model, steps = Averages(), []
    model.config.vocab_size = 1 << 20  # one piece in a pass
    options = {"protocol": protocol, "window": 7, "stride": 3}
    perplexity(model, tokens_of(60), 17, progress=lambda *at: steps.append(at), **options)
    counts = [rows * width for rows, width in model.passes]
    assert steps == [(sum(counts[: i + 1]), sum(counts)) for i in range(len(counts))]


def test_equal_pieces_share_a_pass_within_bounds():
    model = Averages()
    perplexity(model, tokens_of(16 * 50), 16)
    assert model.passes == [(50, 16)]
    model.passes.clear()
    model.config.vocab_size = 1 << 20  # 16 tokens' logits fill the budget
    perplexity(model, tokens_of(16 * 3), 16)
    assert model.passes == [(1, 16)] * 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integer_dtype_and_stride(dtype):
    model, tokens = Averages(), tokens_of(40)
    strided = tokens.to(dtype).repeat_interleave(3)[::3]
    assert perplexity(model, strided, 8) == perplexity(model, tokens, 8)


def test_impossible_tokens_give_infinity():
    model = Averages()
    with torch.no_grad():
        model.output[:, 0] -= 1e6
        model.embedding.abs_()
    assert perplexity(model, torch.zeros(8, dtype=torch.int64), 8) == math.inf


ZEROS = torch.zeros(8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"tokens": list(range(6))}, TypeError, "list"),
        ({"tokens": torch.zeros(8)}, TypeError, "float32"),
        ({"tokens": torch.zeros(8, dtype=torch.bool)}, TypeError, "bool"),
        ({"tokens": ZEROS.view(2, 4)}, ValueError, r"\(2, 4\)"),
        ({"tokens": ZEROS[:3]}, ValueError, " 4, got 3"),
        ({"tokens": ZEROS + VOCABULARY}, ValueError, r"0\.\.6, got 7\.\.7"),
        ({"tokens": ZEROS - 1}, ValueError, r"0\.\.6, got -1\.\.-1"),
        ({"length": 1}, ValueError, "at least 2, got 1"),
        ({"length": 4.0}, TypeError, "an integer, got 4.0"),
        ({"protocol": "half"}, ValueError, "half.*sliding"),
        ({"protocol": None}, TypeError, "whole.*got None"),
        ({"protocol": "blocks"}, ValueError, "window="),
        ({"protocol": "blocks", "window": 1}, ValueError, "window must be at least 2, got 1"),
        ({"protocol": "sliding", "window": 4, "stride": 0}, ValueError,
         "stride must be at least 1, got 0"),
        ({"protocol": "sliding", "window": 4, "stride": 5}, ValueError,
         "stride must be at most the window, 4, got 5"),
    ],
)  # fmt: skip
def test_bad_input_of_perplexity(change, error, words):
    with pytest.raises(error, match=words):
        perplexity(Averages(), **{"tokens": ZEROS, "length": 4, **change})


# ------------------------------------------------------------------ needle


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
        match = re.search(rb"([a-z]{4}=)(\d*)$", seen)
        if match is None:
            return 0
        key, digits = match.groups()
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


class AlmostRight(Copier):
    """A model that never gets the last digit right."""

    def next(self, seen):
        return super().next(seen) + bool(re.search(rb"=\d{4}$", seen))


class Forgets(Copier):
    """A model that forgets a fact that is more than 60 bytes back."""

    def next(self, seen):
        return super().next(seen[-60:])


@pytest.mark.parametrize(
    ("model", "lengths", "depths", "options", "expected"),
    [
        (Copier, [40, 100, 163], [0, 0.5, 1], {"trials": 3}, np.ones((3, 3))),
        (Silent, [40, 100, 163], [0, 0.5, 1], {"trials": 3}, np.zeros((3, 3))),
        (Forgets, [44, 200], [0, 0.5, 1], {"trials": 4}, [[1, 1, 1], [0, 0, 1]]),
        (AlmostRight, [80], [0.5], {}, [[0]]),
        (Remembers, [150, 300], [0, 1], {"trials": 2, "form": "sentence"}, np.ones((2, 2))),
    ],
)
def test_what_a_model_finds(model, lengths, depths, options, expected):
    shares = needle(model(), None, lengths, depths, **options)
    np.testing.assert_array_equal(shares, expected)
    assert shares.dtype == np.float64


def test_sentences_of_a_given_text():
    text = "It was dark. Nobody spoke.\n"
    model = Remembers()
    assert needle(model, None, [200], [0.5], form="sentence", haystack=text, trials=1) == 1
    assert b"Nobody spoke" in model.contexts[0]
    assert b"grass" not in model.contexts[0]


@pytest.mark.parametrize("length", range(100, 140, 3))
def test_the_context_has_the_length(length):
    """Its beginning is cut, which may be more than one line of the text."""
    model, text = Silent(), "One.\nTwo.\n" + 60 * "a longer line, " + "\n"
    needle(model, None, [length], [0.5], form="statement", haystack=text, trials=2)
    assert {len(context) for context in model.contexts} == {length + len("7kq3") - 1}


def test_statements_are_those_of_the_task():
    """A model that reads the task of `wavepe compare` reads them, too."""
    tasks = pytest.importorskip("wavepe.experiments.tasks")

    class Reads(Model):
        def next(self, seen):
            statement = re.search(rb"\$n=(\w{4});", seen)
            answered = re.search(rb"\$n=(\w{0,3})$", seen)
            return statement[1][len(answered[1])] if statement and answered else 0

    np.testing.assert_array_equal(
        needle(Reads(), None, [40, 200], [0, 1], form="statement", trials=3), np.ones((2, 2))
    )
    text = np.frombuffer(b"It was dark. " * 50, np.uint8)
    drawn = tasks.TASKS["needle"].examples(text, [0], 1, 200)
    first = int(drawn.questions[0].argmax())
    seen = bytes(drawn.tokens[0, :first].astype(np.uint8))
    assert Reads().next(seen) == drawn.tokens[0, first]


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
        needle(model, None, [50, 50], [0.5, 0.5], trials=4, seed=seed)
    assert first.contexts == second.contexts
    assert len(set(first.contexts)) == 2 * 2 * 4
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
    shares = needle(model, words, [80, 120], [0.5], trials=2)
    assert shares.shape == (2, 1)
    for ids, length in zip(model.given, (80, 120), strict=True):
        assert ids.shape == (2, length + 3 - 1)  # the answer's last token is never shown
        assert (ids[:, 0] == 0).all()
        assert (ids[:, 1:] != 0).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": None}, TypeError, "model must be .* got NoneType"),
        ({"model": Averages()}, ValueError, r"must be ids in 0\.\.6"),
        ({"tokenizer": "gpt2"}, TypeError, "tokenizer must be .* None for bytes; got str"),
        ({"lengths": [10]}, ValueError, "lengths must be at least 16 tokens"),
        ({"lengths": []}, ValueError, "lengths and depths must each hold at least one number"),
        ({"lengths": None}, TypeError, "lengths must be an integer, got None"),
        ({"lengths": [64.0]}, TypeError, "64.0"),
        ({"depths": [1.5]}, ValueError, "depths must be a number from 0 to 1, got 1.5"),
        ({"depths": ["0"]}, TypeError, "depths"),
        ({"form": "poem"}, ValueError, "poem.*pairs, sentence"),
        ({"trials": 0}, ValueError, "trials must be at least 1, got 0"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"haystack": ""}, ValueError, "haystack must be a text, got an empty one"),
        ({"haystack": 3}, TypeError, "haystack must be a str or bytes, got int"),
    ],
)
def test_bad_input_of_needle(change, error, words):
    arguments = {"model": Silent(), "tokenizer": None, "lengths": [64], "depths": [0.5], **change}
    with pytest.raises(error, match=words):
        needle(**arguments)
