"""Retrieval tasks that need far tokens, for models of bytes, after RULER.

RULER is Hsieh et al., 2024, arXiv 2404.06654. A sequence is text with statements such as ``$k=7q;``
at random places. It ends with questions: statements whose right side the model must write.

    needle      one statement, at any depth
    keys        eight statements with different keys, and a question for each
    tracking    two chains of three variables, ``$a=7q;`` ``$b=$a;`` ``$c=$b;``, and a question for
                the last variable of each

Their number is the same at every length, so that a longer sequence differs in distances alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wavepe.analysis import STATEMENT_LENGTH, STATEMENT_SIGNS

_KEYS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", np.uint8)
_VALUES = np.frombuffer(STATEMENT_SIGNS.encode(), np.uint8)


class Examples(NamedTuple):
    tokens: np.ndarray  # int64 (count, length)
    questions: np.ndarray  # the number of the question that each token answers; 0 for others


class _Drawn(NamedTuple):
    statements: list[bytes]
    questions: list[tuple[bytes, bytes]]  # each with its answer
    any_order: bool  # of the statements


@dataclass(frozen=True)
class Task:
    """A task: `draw` draws the statements of one example, which needs at least `least` bytes."""

    name: str
    draw: Callable[[np.random.Generator], _Drawn]
    least: int

    def examples(self, text: np.ndarray, seed: list[int], count: int, length: int) -> Examples:
        """Draw `count` sequences of `length` bytes, around pieces of `text`, from `seed` alone."""
        generator = np.random.default_rng(seed)
        rows = [self._example(generator, text, length) for _ in range(count)]
        return Examples(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))

    def _example(
        self, generator: np.random.Generator, text: np.ndarray, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        drawn = self.draw(generator)
        room = length - sum(map(len, drawn.statements))
        room -= sum(len(question) + len(answer) for question, answer in drawn.questions)
        start = generator.integers(0, len(text) - room + 1)
        hay = text[start : start + room].tobytes()
        cuts = np.sort(generator.integers(0, room + 1, size=len(drawn.statements)))
        order = drawn.statements
        if drawn.any_order:
            order = [order[number] for number in generator.permutation(len(order))]
        tokens, last = b"", 0
        for cut, statement in zip(cuts, order, strict=True):
            tokens += hay[last:cut] + statement
            last = cut
        tokens += hay[last:]
        questions = np.zeros(length, np.int64)
        for number, (question, answer) in enumerate(drawn.questions, 1):
            tokens += question
            # the ; at the end of an answer does not count
            questions[len(tokens) : len(tokens) + len(answer) - 1] = number
            tokens += answer
        return np.frombuffer(tokens, np.uint8).astype(np.int64), questions


def _values(generator: np.random.Generator, count: int, size: int) -> list[bytes]:
    return [generator.choice(_VALUES, size).tobytes() for _ in range(count)]


def _names(generator: np.random.Generator, count: int) -> list[bytes]:
    return [bytes([key]) for key in generator.choice(_KEYS, count, replace=False)]


def _needle(generator: np.random.Generator) -> _Drawn:
    (value,) = _values(generator, 1, STATEMENT_LENGTH)
    return _Drawn([b"$n=" + value + b";"], [(b"$n=", value + b";")], True)


def _keys(generator: np.random.Generator) -> _Drawn:
    names, values = _names(generator, 8), _values(generator, 8, 2)
    pairs = [(b"$" + name + b"=", value + b";") for name, value in zip(names, values, strict=True)]
    asked = [pairs[number] for number in generator.permutation(len(pairs))]
    return _Drawn([left + right for left, right in pairs], asked, True)


def _tracking(generator: np.random.Generator) -> _Drawn:
    names, values = _names(generator, 6), _values(generator, 2, 2)
    statements, questions = [], []
    for chain, value in enumerate(values):
        first, second, third = names[chain::2]
        statements += [
            b"$" + first + b"=" + value + b";",
            b"$" + second + b"=$" + first + b";",
            b"$" + third + b"=$" + second + b";",
        ]
        questions.append((b"$" + third + b"=", value + b";"))
    # The chains are mixed at random, but each keeps its own order.
    of_chain = generator.permutation([0, 0, 0, 1, 1, 1])
    steps = [iter(statements[:3]), iter(statements[3:])]
    return _Drawn([next(steps[chain]) for chain in of_chain], questions, False)


_ALL = (Task("needle", _needle, 16), Task("keys", _keys, 96), Task("tracking", _tracking, 48))
TASKS = {task.name: task for task in _ALL}
