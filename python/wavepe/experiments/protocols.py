"""A protocol for perplexity (METHODS 6), with its window and stride."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wavepe.analysis._perplexity import PROTOCOLS

from .errors import UsageError


@dataclass(frozen=True)
class Protocol:
    """A protocol, written whole, blocks:WINDOW or sliding:WINDOW/STRIDE."""

    name: str
    window: int | None = None
    stride: int | None = None

    @classmethod
    def parse(cls, text: str, train_length: int) -> Protocol:
        """Read a protocol from text; `of` fills in sizes that are not given."""
        name, _, sizes = text.partition(":")
        first, slash, second = sizes.partition("/")
        if name not in PROTOCOLS:
            raise UsageError(f"--protocols {text}: needs {', '.join(PROTOCOLS)}")
        if (name == "whole" and sizes) or (name == "blocks" and slash):
            needs = "no window" if name == "whole" else "a window alone, as blocks:128"
            raise UsageError(f"--protocols {text}: {name} takes {needs}")
        window = _size(text, first, 2) if first else None
        stride = _size(text, second, 1) if slash else None
        found = cls.of(name, window, stride, train_length)
        if not found.fits:
            raise UsageError(
                f"--protocols {text}: needs a stride of at most the window, {found.window}"
            )
        return found

    @classmethod
    def of(cls, name: str, window: int | None, stride: int | None, train_length: int) -> Protocol:
        """Return the protocol with the sizes that it uses.

        The default window is the trained length, and the default stride half the window.
        """
        if name == "whole":
            return cls(name)
        window = train_length if window is None else window
        if name == "blocks":
            return cls(name, window)
        return cls(name, window, max(1, window // 2) if stride is None else stride)

    @property
    def fits(self) -> bool:
        """Return whether the windows cover all tokens."""
        return self.window is None or self.stride is None or self.stride <= self.window

    def __str__(self) -> str:
        sizes = "/".join(str(size) for size in (self.window, self.stride) if size is not None)
        return f"{self.name}:{sizes}" if sizes else self.name

    @property
    def text(self) -> str:
        """Return the protocol in words, for a title."""
        if self.name == "whole":
            return "whole sequence"
        if self.name == "blocks":
            return f"blocks of {self.window}"
        return f"sliding window of {self.window}, stride {self.stride}"

    @property
    def used(self) -> dict[str, Any]:
        """Return the options that the protocol uses."""
        return {key: value for key, value in self.options.items() if value is not None}

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments for `wavepe.analysis.perplexity`."""
        return {"protocol": self.name, "window": self.window, "stride": self.stride}


def _size(text: str, word: str, least: int) -> int:
    if not (word.isascii() and word.isdecimal() and int(word) >= least):
        raise UsageError(f"--protocols {text}: needs an integer from {least} on, got {word!r}")
    return int(word)
