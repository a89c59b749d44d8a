"""The rows of a comparison, and the trainings that they need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import wavepe
from wavepe.encodings import Encoding

from ..common.errors import UsageError
from ..training.folder import model_name

# Names, options and values of encodings never contain it.
_EVALUATED_AS = "/"


@dataclass(frozen=True)
class Row:
    """One row of the table, written SPEC, or TRAINED/SPEC to evaluate another row's training.

    `trained` is the encoding of the training, without options that matter at inference only.
    `evaluated` is the encoding of the evaluation, and of any training on longer text.
    """

    name: str
    trained: Encoding
    evaluated: Encoding

    @property
    def continued(self) -> str:
        """Return the name of the training on longer text."""
        return f"{self.trained}{_EVALUATED_AS}{self.evaluated.trained_as()}"

    @classmethod
    def parse(cls, text: str) -> Row:
        """Read a row from text; UsageError if an encoding is wrong."""
        first, slash, second = text.partition(_EVALUATED_AS)
        try:
            trained = wavepe.encoding(first)
            evaluated = wavepe.encoding(second) if slash else trained
        except (ValueError, TypeError) as error:
            raise UsageError(f"`encodings` {text}: {error}") from None
        name = f"{trained}{_EVALUATED_AS}{evaluated}" if slash else str(evaluated)
        return cls(name, trained.trained_as(), evaluated)


@dataclass(frozen=True)
class Model:
    """One training, and the rows that are evaluated with it."""

    spec: str
    seed: int
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        return model_name(self.spec, self.seed)

    @property
    def trainings(self) -> list[str]:
        """Return the names of this training and of the trainings that continue it."""
        return list(dict.fromkeys([self.spec, *(row.continued for row in self.rows)]))


def models_of(rows: Iterable[Row], seeds: int) -> list[Model]:
    """Return the trainings; rows whose encodings train alike share one."""
    by_spec: dict[str, list[Row]] = {}
    for row in rows:
        by_spec.setdefault(str(row.trained), []).append(row)
    return [
        Model(spec, seed, tuple(alike)) for seed in range(seeds) for spec, alike in by_spec.items()
    ]
