"""A row of a comparison: the encoding of the training, and that of the evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import wavepe
from wavepe.encodings import Encoding

from ..common.errors import UsageError

# Names, options and values of encodings never contain it.
_READ_AS = "/"


@dataclass(frozen=True)
class Row:
    """One row of the table, written SPEC, or TRAINED/SPEC to evaluate another row's training.

    `trained` is the encoding of the training, without options that matter at inference only.
    `read` is the encoding of the evaluation, and of any training on longer text.
    """

    name: str
    trained: Encoding
    read: Encoding

    @property
    def continued(self) -> str:
        """Return the name of the training on longer text."""
        return f"{self.trained}{_READ_AS}{self.read.trained_as()}"

    @classmethod
    def parse(cls, text: str) -> Row:
        """Read a row from text; UsageError if an encoding is wrong."""
        first, slash, second = text.partition(_READ_AS)
        try:
            trained = wavepe.encoding(first)
            read = wavepe.encoding(second) if slash else trained
        except (ValueError, TypeError) as error:
            raise UsageError(f"--encodings {text}: {error}") from None
        name = f"{trained}{_READ_AS}{read}" if slash else str(read)
        return cls(name, trained.trained_as(), read)
