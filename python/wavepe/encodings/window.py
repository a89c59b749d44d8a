"""A sliding window as a part of an encoding: far keys are hidden."""

from __future__ import annotations

from .base import Encoding
from .options import integer, option
from .register import register_encoding


@register_encoding
class Window(Encoding):
    """Hide keys at a distance of `size` tokens and more, as Mistral and Gemma do in some layers.

    It is a part to combine with others: "rope@::2+window:size=512@::2". Where the model has a
    window as well, the smaller one counts. A cache keeps all keys.

    Parameters
    ----------
    size : int
        The number of tokens that a query sees, its own token included.

    References
    ----------
    Beltagy et al., "Longformer: the long-document transformer", 2020, arXiv 2004.05150.
    """

    name = "window"

    size: int = option(512, integer(1, 1 << 40))

    @property
    def window(self) -> int:
        return self.size
