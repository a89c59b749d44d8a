"""A row of a comparison: what is trained, and the encoding that it is read with."""

from __future__ import annotations

from dataclasses import dataclass

import wavepe
from wavepe.encodings import Encoding

from ..errors import UsageError

# No name, option or value of an encoding holds it.
_READ_AS = "/"


@dataclass(frozen=True)
class Row:
    """One line of the table, written SPEC, or TRAINED/SPEC where the training was another's.

    `trained` is the encoding of the training, without what matters at inference alone; `read` the
    one of the evaluation, and of the training on longer text where there is one.
    """

    name: str
    trained: Encoding
    read: Encoding

    @property
    def continued(self) -> str:
        """The name of the training that goes on, from the trained one."""
        return f"{self.trained}{_READ_AS}{self.read.trained_as()}"

    @classmethod
    def parse(cls, text: str) -> Row:
        """Read what the user wrote; UsageError where it names no encoding."""
        first, slash, second = text.partition(_READ_AS)
        try:
            trained = wavepe.encoding(first)
            read = wavepe.encoding(second) if slash else trained
        except (ValueError, TypeError) as error:
            raise UsageError(f"--encodings {text}: {error}") from None
        name = f"{trained}{_READ_AS}{read}" if slash else str(read)
        return cls(name, trained.trained_as(), read)
