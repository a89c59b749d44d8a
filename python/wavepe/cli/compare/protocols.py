"""How perplexity is measured: a protocol of METHODS 6, with its window and stride."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wavepe.analysis._perplexity import PROTOCOLS

from ..errors import UsageError


@dataclass(frozen=True)
class Protocol:
    """whole, blocks:WINDOW, or sliding:WINDOW/STRIDE."""

    name: str
    window: int | None = None
    stride: int | None = None

    @classmethod
    def parse(cls, text: str, train_length: int) -> Protocol:
        """Read it; a window that is not given is the trained length, a stride half the window."""
        name, _, sizes = text.partition(":")
        first, slash, second = sizes.partition("/")
        if name not in PROTOCOLS:
            raise UsageError(f"--protocols {text}: needs {', '.join(PROTOCOLS)}")
        if (name == "whole" and sizes) or (name == "blocks" and slash):
            needs = "no window" if name == "whole" else "a window alone, as blocks:128"
            raise UsageError(f"--protocols {text}: {name} takes {needs}")
        if name == "whole":
            return cls(name)
        window = _size(text, first, 2) if first else train_length
        if name == "blocks":
            return cls(name, window)
        stride = _size(text, second, 1) if slash else max(1, window // 2)
        if stride > window:
            raise UsageError(f"--protocols {text}: needs a stride of at most the window, {window}")
        return cls(name, window, stride)

    def __str__(self) -> str:
        sizes = "/".join(str(size) for size in (self.window, self.stride) if size is not None)
        return f"{self.name}:{sizes}" if sizes else self.name

    @property
    def text(self) -> str:
        """In words, for a title."""
        if self.name == "whole":
            return "whole sequence"
        if self.name == "blocks":
            return f"blocks of {self.window}"
        return f"sliding window of {self.window}, stride {self.stride}"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `wavepe.analysis.perplexity`."""
        return {"protocol": self.name, "window": self.window, "stride": self.stride}


def _size(text: str, word: str, least: int) -> int:
    if not (word.isascii() and word.isdecimal() and int(word) >= least):
        raise UsageError(f"--protocols {text}: needs an integer from {least} on, got {word!r}")
    return int(word)
