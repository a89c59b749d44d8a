"""Needle in a haystack: does a model find a fact in a long context?

There is the published form with sentences, and a form with keys and values for small models.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common import checks
from ..common.errors import require
from ._models import Progress, batches, check_tokens, device_of, evaluating, outputs

if TYPE_CHECKING:
    import torch

FORMS = ("pairs", "sentence", "statement")
FACT = "The secret number is {}. Remember it.\n"
QUESTION = "What is the secret number? The secret number is"
# From Mohtashami and Jaggi, "Landmark attention", 2023, arXiv 2305.16300.
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
KEY_LETTERS, DIGITS = 4, 5
# The tasks of `wavepe compare` use them too.
STATEMENT_SIGNS, STATEMENT_LENGTH = "abcdefghijklmnopqrstuvwxyz0123456789", 4
# Text is inserted in pieces. Longer ones would put a fact far from its depth.
_PIECE = 200


def needle(
    model: torch.nn.Module, tokenizer: Any, lengths: Sequence[int], depths: Sequence[float], *,
    form: str | None = None, haystack: str | bytes | None = None, trials: int = 10, seed: int = 0,
    progress: Progress | None = None,
) -> np.ndarray:  # fmt: skip
    """Return how often a model finds a fact in a context, by the context's length and its depth.

    The context consists of text, with the fact at the given depth, and it ends with the question. A
    trial succeeds if greedy decoding continues with the right answer, token for token. Facts and
    text depend on `seed` alone, so they are the same for all models with the same tokenizer.

    Parameters
    ----------
    model : torch.nn.Module
        A Hugging Face causal language model.
    tokenizer : callable or None
        A tokenizer of transformers. None: tokens are bytes, and the model's vocabulary must have at
        least 256 entries.
    lengths : sequence of int
        Lengths of the whole context in tokens, with the question. They may exceed the trained
        length; ValueError if one is too short for fact and question.
    depths : sequence of float
        Positions of the fact, from 0 (the beginning) to 1 (just before the question).
    form : {"sentence", "pairs", "statement"}, optional
        "sentence": the fact is a sentence with a secret number of five digits, in prose. "pairs":
        the context is lines ``key=value``, and the question is one of the keys; for small models
        and models of bytes. "statement": the fact is ``$n=7kq3;``, in prose, as in the training of
        ``wavepe compare --task needle``. By default "pairs" without a tokenizer, else "sentence".
    haystack : str or bytes, optional
        Text around the fact, repeated if it is too short. By default lines of other keys and
        values, or a few sentences, repeated.
    trials : int
        Number of facts for each length and depth.
    seed : int
        Seed of the generator that draws facts and text.
    progress : callable, optional
        Called as progress(done, total) with numbers of trials.

    Returns
    -------
    ndarray, float64 (lengths, depths)
        The share of successful trials, from 0 to 1.

    Examples
    --------
    >>> import wavepe.hf
    >>> from wavepe.analysis import needle
    >>> config = wavepe.hf.WavePELlamaConfig(
    ...     position_encoding="alibi", vocab_size=256, hidden_size=32, intermediate_size=48,
    ...     num_hidden_layers=1, num_attention_heads=2)
    >>> model = wavepe.hf.WavePELlamaForCausalLM(config)
    >>> needle(model, None, lengths=[64, 128], depths=[0, 0.5, 1], trials=2).shape
    (2, 3)
    """
    require("wavepe.analysis.needle", torch="torch")
    import torch

    if tokenizer is not None and not callable(tokenizer):
        raise TypeError(
            "tokenizer must be one of transformers, or None for bytes; got "
            f"{type(tokenizer).__name__}"
        )
    sizes = [checks.integer("lengths", length, 1) for length in np.ravel(lengths).tolist()]
    places = [checks.zero_to_one("depths", depth) for depth in np.ravel(depths).tolist()]
    if not (sizes and places):
        raise ValueError("lengths and depths must each hold at least one number, got none")
    form = ("pairs" if tokenizer is None else "sentence") if form is None else form
    checks.choice("form", form, FORMS)
    trials = checks.integer("trials", trials, 1)
    seed = checks.integer("seed", seed, 0)
    text = _Text(tokenizer, form, haystack)
    for length in sizes:  # raise errors before the first pass
        context, answer = text.context(length, 0.0, np.random.default_rng(seed))
        check_tokens(model, torch.tensor(context + answer), 1, "one")
    grid = np.zeros((len(sizes), len(places)))
    done, total = 0, grid.size * trials
    with evaluating(model):
        for row, column in np.ndindex(grid.shape):
            generator, at = np.random.default_rng([seed, row, column]), (sizes[row], places[column])
            for batch in _batches(model, [text.context(*at, generator) for _ in range(trials)]):
                grid[row, column] += _count_right(model, batch) / trials
                done += len(batch)
                if progress is not None:
                    progress(done, total)
    return grid


class _Text:
    """Builds contexts of tokens: text, a fact in it, and a question."""

    def __init__(self, tokenizer: Any, form: str, haystack: str | bytes | None) -> None:
        self.tokenizer, self.form = tokenizer, form
        if isinstance(haystack, (bytes, bytearray)):
            haystack = bytes(haystack).decode("utf-8", "surrogateescape")
        if haystack is not None and not isinstance(haystack, str):
            raise TypeError(f"haystack must be a str or bytes, got {type(haystack).__name__}")
        if haystack == "":
            raise ValueError("haystack must be a text, got an empty one")
        self.sentences = None
        if haystack is not None or form != "pairs":
            cut = re.split(r"(?<=\n)|(?<=[.!?] )", haystack or FILLER)
            starts = [(x, first) for x in cut for first in range(0, len(x), _PIECE)]
            self.sentences = [x[first : first + _PIECE] for x, first in starts]
        self.begin = [] if tokenizer is None else _prefix(tokenizer)

    def ids(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return list(text.encode("utf-8", "surrogateescape"))
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def context(
        self, length: int, depth: float, generator: np.random.Generator
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a context with `length` tokens, and the tokens of its answer."""
        pairs = _pairs(generator)
        key, value = next(pairs)
        if self.form == "pairs":
            fact, question, answer = f"{key}={value}\n", f"{key}=", value
        elif self.form == "statement":
            answer = "".join(generator.choice([*STATEMENT_SIGNS], STATEMENT_LENGTH))
            fact, question = f"$n={answer};", "$n="
        else:
            fact, question, answer = FACT.format(value), QUESTION, f" {value}"
        # The tokens of the question, and those of the answer when it follows.
        alone, both = self.ids(question), self.ids(question + answer)
        counts = range(min(len(alone), len(both)), 0, -1)
        same = next((count for count in counts if alone[:count] == both[:count]), 0)
        tail, answer_ids = both[:same], both[same:]
        middle = self.ids(fact)
        room = length - len(self.begin) - len(middle) - len(tail)
        if room < 0:
            raise ValueError(
                f"lengths must be at least {length - room} tokens, for the fact and the question; "
                f"got {length}"
            )
        texts: Iterator[str] = (f"{key}={value}\n" for key, value in pairs)
        if self.sentences is not None:
            texts = itertools.cycle(self.sentences)
        hay, ends = list[int](), [0]
        while len(hay) < room:
            hay += self.ids(next(texts))
            ends.append(len(hay))
        extra = len(hay) - room  # cut from the beginning
        hay, ends = hay[extra:], [max(0, end - extra) for end in ends]
        place = min(ends, key=lambda end: abs(end - depth * room))
        return [*self.begin, *hay[:place], *middle, *hay[place:], *tail], answer_ids


def _prefix(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer puts before every text."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    ids = list(tokenizer("a")["input_ids"])
    starts = (i for i in range(len(ids)) if ids[i : i + len(plain)] == plain)
    return ids[: next(starts, 0)]


def _pairs(generator: np.random.Generator) -> Iterator[tuple[str, str]]:
    """Yield different keys, each with a value of digits."""
    used = set()
    while True:
        key = "".join(map(chr, generator.integers(97, 123, KEY_LETTERS)))
        value = "".join(map(str, generator.integers(0, 10, DIGITS)))
        if key not in used:
            used.add(key)
            yield key, value


Trial = tuple[list[int], list[int]]


def _batches(model: torch.nn.Module, trials: list[Trial]) -> Iterator[list[Trial]]:
    """Yield batches of trials of one shape."""
    by_shape: dict[tuple[int, ...], list[Trial]] = {}
    for trial in trials:
        by_shape.setdefault(tuple(map(len, trial)), []).append(trial)
    for shape, alike in sorted(by_shape.items()):
        yield from batches(model, alike, sum(shape))


def _count_right(model: torch.nn.Module, batch: list[Trial]) -> int:
    """Return how many answers of the batch greedy decoding gives.

    One pass is enough: each token of a right answer is the most probable one after those before it.
    """
    import torch

    answers = torch.tensor([answer for _, answer in batch])
    ids = torch.tensor([[*context, *answer] for context, answer in batch]).to(device_of(model))
    count = answers.shape[1]
    guessed = outputs(model, ids[:, :-1], count).logits[:, -count:].argmax(dim=-1).cpu()
    return int((guessed == answers).all(dim=1).sum())
