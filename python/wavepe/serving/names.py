"""The names by which `transformers serve` finds the classes of wavepe's folders."""

from __future__ import annotations

import sys

from ..hf.config import MODELS


def register() -> None:
    """Make the model classes attributes of the module transformers.

    `transformers serve` looks up the architecture of a configuration there, once the configuration
    is loaded, and so this module is.
    """
    for name, model_class in MODELS.items():
        setattr(sys.modules["transformers"], name, model_class)
