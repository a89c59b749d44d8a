"""A protocol for perplexity (METHODS 6), with its window and stride."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from wavepe.analysis import PROTOCOLS

from ..common.errors import UsageError


@dataclass(frozen=True)
class Protocol:
    """A protocol, written whole, blocks:WINDOW or sliding:WINDOW/STRIDE."""

    protocol: str
    window: int | None = None
    stride: int | None = None

    @classmethod
    def parse(cls, text: str, train_length: int, argument: str = "protocols") -> Protocol:
        """Read a protocol; by default the window is the trained length, and the stride half of it.

        UsageError names the argument.
        """
        name, _, sizes = text.partition(":")
        first, slash, second = sizes.partition("/")
        place = f"`{argument}` {text}"
        if name not in PROTOCOLS:
            raise UsageError(f"{place}: needs {', '.join(PROTOCOLS)}")
        if (name == "whole" and sizes) or (name == "blocks" and slash):
            needs = "no window" if name == "whole" else "a window alone, as blocks:128"
            raise UsageError(f"{place}: {name} takes {needs}")
        if name == "whole":
            return cls(name)
        window = _size(place, first, 2) if first else train_length
        if name == "blocks":
            return cls(name, window)
        stride = _size(place, second, 1) if slash else max(1, window // 2)
        if stride > window:
            raise UsageError(f"{place}: needs a stride of at most the window, {window}")
        return cls(name, window, stride)

    def __str__(self) -> str:
        sizes = "/".join(str(size) for size in (self.window, self.stride) if size is not None)
        return f"{self.protocol}:{sizes}" if sizes else self.protocol

    @property
    def text(self) -> str:
        """Return the protocol in words, for a title."""
        return {
            "whole": "whole sequence",
            "blocks": f"blocks of {self.window}",
            "sliding": f"sliding window of {self.window}, stride {self.stride}",
        }[self.protocol]

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments for `wavepe.analysis.perplexity`."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def _size(place: str, word: str, least: int) -> int:
    if not (word.isascii() and word.isdecimal() and int(word) >= least):
        raise UsageError(f"{place}: needs an integer from {least} on, got {word!r}")
    return int(word)
