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

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wavepe.analysis import STATEMENT_LENGTH, STATEMENT_SIGNS

_KEYS, _VALUES = [*string.ascii_letters], [*STATEMENT_SIGNS]


class Examples(NamedTuple):
    tokens: np.ndarray  # int64 (count, length)
    questions: np.ndarray  # the number of the question that each token answers; 0 for others


class _Drawn(NamedTuple):
    statements: list[str]
    questions: list[str]  # statements, too; their right sides are the answers
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
        statements, asked, any_order = self.draw(generator)
        room = length - len("".join([*statements, *asked]))
        start = generator.integers(0, len(text) - room + 1)
        hay = text[start : start + room].tobytes()
        cuts = np.sort(generator.integers(0, room + 1, size=len(statements)))
        if any_order:
            statements = [statements[number] for number in generator.permutation(len(statements))]
        tokens, last = b"", 0
        for cut, statement in zip(cuts, statements, strict=True):
            tokens += hay[last:cut] + statement.encode()
            last = cut
        tokens += hay[last:]
        questions = np.zeros(length, np.int64)
        for number, question in enumerate(asked, 1):
            answer = len(tokens) + question.index("=") + 1
            tokens += question.encode()
            questions[answer : len(tokens) - 1] = number  # the ; at its end does not count
        return np.frombuffer(tokens, np.uint8).astype(np.int64), questions


def _values(generator: np.random.Generator, count: int, size: int) -> list[str]:
    return ["".join(generator.choice(_VALUES, size)) for _ in range(count)]


def _needle(generator: np.random.Generator) -> _Drawn:
    statements = [f"$n={value};" for value in _values(generator, 1, STATEMENT_LENGTH)]
    return _Drawn(statements, statements, True)


def _keys(generator: np.random.Generator) -> _Drawn:
    names, values = generator.choice(_KEYS, 8, replace=False), _values(generator, 8, 2)
    statements = [f"${name}={value};" for name, value in zip(names, values, strict=True)]
    return _Drawn(statements, [statements[n] for n in generator.permutation(8)], True)


def _tracking(generator: np.random.Generator) -> _Drawn:
    names, values = generator.choice(_KEYS, 6, replace=False), _values(generator, 2, 2)
    chains, questions = [], []
    for chain, value in enumerate(values):
        first, second, third = names[chain::2]
        chains.append(iter((f"${first}={value};", f"${second}=${first};", f"${third}=${second};")))
        questions.append(f"${third}={value};")
    # The chains are mixed at random, but each keeps its own order.
    of_chain = generator.permutation([0, 0, 0, 1, 1, 1])
    return _Drawn([next(chains[chain]) for chain in of_chain], questions, False)


_ALL = (Task("needle", _needle, 16), Task("keys", _keys, 96), Task("tracking", _tracking, 48))
TASKS = {task.name: task for task in _ALL}
