"""A fact hidden in a long context: does the model find it again?

The published test ("needle in a haystack") and, for small models, its form with keys and values.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _checks
from ._models import (
    Progress,
    check_integer,
    check_model,
    check_tokens,
    device_of,
    evaluating,
    last_logits,
    need_torch,
)

if TYPE_CHECKING:
    import torch

FORMS = ("pairs", "sentence", "statement")
FACT = "The secret number is {}. Remember it.\n"
QUESTION = "What is the secret number? The secret number is"
# Of Mohtashami and Jaggi, "Landmark attention", arXiv 2305.16300.
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
KEY_LETTERS, DIGITS = 4, 5
# As in the tasks of `wavepe compare`.
STATEMENT_SIGNS, STATEMENT_LENGTH = "abcdefghijklmnopqrstuvwxyz0123456789", 4
# Longer pieces would keep a fact far from its depth.
_PIECE = 200
_MOST = 1000  # lengths, or depths
_MOST_TRIALS = 100_000
# One batch holds at most so many tokens, and so many attention scores of a layer.
_TOKENS, _SCORES = 1 << 12, 1 << 24


def needle(
    model: torch.nn.Module,
    tokenizer: Any,
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    form: str | None = None,
    haystack: str | bytes | None = None,
    trials: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
) -> np.ndarray:
    """Return how often the model finds a fact again, by length of the context and depth in it.

    The context begins with text, holds the fact at the given depth, and ends with the question for
    it. A trial succeeds where greedy decoding continues with the right answer, token for token.
    Nothing is sampled: facts and text follow from `seed`, and are the same for every model with the
    same tokenizer.

    Parameters
    ----------
    model : torch.nn.Module
        A Hugging Face causal language model. Its training mode is restored.
    tokenizer : callable or None
        Of transformers. None: tokens are bytes, and the vocabulary has at least 256.
    lengths : sequence of int
        Tokens of the whole context, question included. They may be longer than the model was
        trained for.
    depths : sequence of float
        Where the fact stands, from 0 (at the beginning) to 1 (just before the question).
    form : {"sentence", "pairs", "statement"}, optional
        "sentence": the fact is a sentence with a secret number of five digits, in prose. "pairs":
        the context is lines ``key=value``, and one key is asked for; for small models and models of
        bytes. "statement": ``$n=7kq3;`` in prose, as models of ``wavepe compare --task needle``
        have learned it. By default "pairs" without a tokenizer, else "sentence".
    haystack : str or bytes, optional
        The text around the fact, repeated where it is too short. By default lines of other keys
        and values, or a few sentences over and over.
    trials : int
        Facts tried at each length and depth.
    seed : int
        Of the facts.
    progress : callable, optional
        Called as progress(done, total) with the number of trials.

    Returns
    -------
    ndarray, float64 (lengths, depths)
        The share of the trials that succeeded.

    Raises
    ------
    TypeError
        `model` is no module, or an argument has another type.
    ValueError
        A length that does not hold fact and question, a depth outside 0..1, no lengths or depths.
    """
    need_torch("needle")
    import torch

    check_model(model)
    if tokenizer is not None and not callable(tokenizer):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}: needs one of transformers, or None for "
            "bytes"
        )
    sizes = [check_integer("lengths", length, 1) for length in _several("lengths", lengths)]
    places = [_checks.zero_to_one("depths", depth) for depth in _several("depths", depths)]
    form = ("pairs" if tokenizer is None else "sentence") if form is None else form
    _checks.choice("form", form, FORMS)
    trials = check_integer("trials", trials, 1)
    if trials > _MOST_TRIALS:
        raise ValueError(f"trials is {trials}: needs at most {_MOST_TRIALS}")
    seed = check_integer("seed", seed, 0)
    text = _Text(tokenizer, form, haystack)
    for length in sizes:  # before the first pass
        context, answer = text.context(length, 0.0, np.random.default_rng(seed))
        check_tokens(model, torch.tensor(context + answer), 1, "one")
    grid = np.zeros((len(sizes), len(places)))
    done, total = 0, grid.size * trials
    with evaluating(model):
        for (row, length), (column, depth) in itertools.product(
            enumerate(sizes), enumerate(places)
        ):
            generator = np.random.default_rng([seed, row, column])
            tried = [text.context(length, depth, generator) for _ in range(trials)]
            for batch in _batches(model, tried):
                grid[row, column] += _found(model, batch) / trials
                done += len(batch)
                if progress is not None:
                    progress(done, total)
    return grid


def _several(name: str, values: Any) -> list[Any]:
    try:
        if isinstance(values, (str, bytes, Mapping)):
            raise TypeError
        found = list(values) if len(values) <= _MOST else None
    except (TypeError, OverflowError, RuntimeError):  # no container, range(2**70), sparse tensors
        kind = type(values).__name__
        raise TypeError(f"{name} is a {kind}: needs a sequence of numbers") from None
    if found is None:
        raise ValueError(f"{name} holds {len(values)}: needs at most {_MOST} numbers")
    if not found:
        raise ValueError(f"{name} is empty: needs at least one")
    return found


class _Text:
    """Makes contexts of tokens: text, a fact in it, and a question."""

    def __init__(self, tokenizer: Any, form: str, haystack: str | bytes | None) -> None:
        self.tokenizer, self.form = tokenizer, form
        if isinstance(haystack, (bytes, bytearray)):
            haystack = bytes(haystack).decode("utf-8", "surrogateescape")
        if haystack is not None and not isinstance(haystack, str):
            raise TypeError(f"haystack is a {type(haystack).__name__}: needs a text")
        if haystack == "":
            raise ValueError("haystack is empty: needs a text")
        prose = haystack is not None or form != "pairs"
        self.sentences = _sentences(haystack or FILLER) if prose else None
        self.begin = [] if tokenizer is None else _begin(tokenizer)

    def ids(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return list(text.encode("utf-8", "surrogateescape"))
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def context(
        self, length: int, depth: float, generator: np.random.Generator
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a context, `length` of them, and those of its answer."""
        pairs = _pairs(generator)
        key, value = next(pairs)
        if self.form == "pairs":
            fact, question, answer = f"{key}={value}\n", f"{key}=", value
        elif self.form == "statement":
            answer = "".join(generator.choice([*STATEMENT_SIGNS], STATEMENT_LENGTH))
            fact, question = f"$n={answer};", "$n="
        else:
            fact, question, answer = FACT.format(value), QUESTION, f" {value}"
        tail, answer_ids = self._asked(question, answer)
        middle = self.ids(fact)
        room = length - len(self.begin) - len(middle) - len(tail)
        if room < 0:
            raise ValueError(
                f"lengths holds {length}: needs at least {length - room} tokens, for the fact and "
                "the question"
            )
        pieces, count = [], 0
        for piece in self._pieces(pairs):
            if count >= room:
                break
            pieces.append(self.ids(piece))
            count += len(pieces[-1])
        if pieces:
            pieces[0] = pieces[0][count - room :]  # the beginning of a text may be cut
        ends = list(itertools.accumulate(map(len, pieces), initial=0))
        place = min(range(len(ends)), key=lambda index: abs(ends[index] - depth * room))
        before, after = itertools.chain(*pieces[:place]), itertools.chain(*pieces[place:])
        return [*self.begin, *before, *middle, *after, *tail], answer_ids

    def _asked(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the tokens of the question, and of the answer as they follow it."""
        alone, both = self.ids(question), self.ids(question + answer)
        ends = range(min(len(alone), len(both)), 0, -1)
        same = next((end for end in ends if alone[:end] == both[:end]), 0)
        return both[:same], both[same:]

    def _pieces(self, pairs: Iterator[tuple[str, str]]) -> Iterator[str]:
        """Yield the text around the fact, without end."""
        if self.sentences is not None:
            return itertools.cycle(self.sentences)
        return (f"{key}={value}\n" for key, value in pairs)


def _begin(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts before every text."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    starts = range(len(whole) - len(plain) + 1)
    found = (at for at in starts if whole[at : at + len(plain)] == plain)
    return whole[: next(found, 0)]


def _pairs(generator: np.random.Generator) -> Iterator[tuple[str, str]]:
    """Yield keys, none twice, and values of digits."""
    used = set()
    while True:
        key = "".join(map(chr, generator.integers(97, 123, KEY_LETTERS)))
        value = "".join(map(str, generator.integers(0, 10, DIGITS)))
        if key not in used:
            used.add(key)
            yield key, value


def _sentences(text: str) -> list[str]:
    """Cut a text behind sentences and lines."""
    pieces = re.split(r"(?<=\n)|(?<=[.!?] )", text)
    return [
        piece[first : first + _PIECE] for piece in pieces for first in range(0, len(piece), _PIECE)
    ]


Trial = tuple[list[int], list[int]]


def _batches(model: torch.nn.Module, trials: list[Trial]) -> Iterator[list[Trial]]:
    """Yield trials of one shape, as many at once as keep memory small."""
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None) or 1
    shape: Callable[[Trial], tuple[int, int]] = lambda trial: (len(trial[0]), len(trial[1]))  # noqa: E731
    for (context, answer), alike in itertools.groupby(sorted(trials, key=shape), shape):
        size = context + answer
        most = max(1, min(_TOKENS // size, _SCORES // (heads * size * size)))
        same = list(alike)
        for first in range(0, len(same), most):
            yield same[first : first + most]


def _found(model: torch.nn.Module, batch: list[Trial]) -> int:
    """Return how many of the answers greedy decoding gives.

    It gives an answer where each of its tokens is the likeliest one after those before it, so one
    pass over context and answer tells.
    """
    import torch

    answers = torch.tensor([answer for _, answer in batch])
    ids = torch.tensor([[*context, *answer] for context, answer in batch]).to(device_of(model))
    guessed = last_logits(model, ids[:, :-1], answers.shape[1]).argmax(dim=-1).cpu()
    return int((guessed == answers).all(dim=1).sum())
