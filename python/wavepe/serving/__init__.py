"""Serve models with a position encoding: `transformers serve`, and its continuous batching."""

import sys
from types import ModuleType

from ..hf.config import MODELS
from . import batching

__all__ = ["register_names"]


def register_names() -> None:
    """Make the model classes attributes of the module transformers.

    `transformers serve` looks the architecture of a folder up there. It has loaded the
    configuration before, and so this module. While transformers is imported, it puts another module
    object of itself into `sys.modules`; the server may have the first one.
    """
    modules = [x for x in list(sys.modules.values()) if isinstance(x, ModuleType)]
    for module in [sys.modules["transformers"], *(vars(x).get("transformers") for x in modules)]:
        if isinstance(module, ModuleType) and module.__name__ == "transformers":
            vars(module).update(MODELS)


register_names()
batching.register()
