"""Swap the position encoding of models of transformers, and keep it in their checkpoints.

`patch` changes a live model of a supported family, and `unpatch` restores it. A patched model saves
itself as the model type "wavepe_<family>" (`WavePELlamaForCausalLM`, `WavePEMistralForCausalLM`,
...). Importing this module registers these types with the Auto classes. `convert` turns the
checkpoint folder of a stock model into one of these types. `adapt` swaps the encoding of a trained
model and trains it on. `set_theta` also works on stock models with a rotary embedding.
"""

import importlib as _importlib
from typing import Any as _Any

from ..common.runtime import command_for

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"wavepe.hf needs torch and transformers ({error.name} is missing): " + command_for("hf")
    ) from error

from . import attention as _attention
from . import model_types as _model_types  # noqa: F401 - it creates the classes
from .config import CONFIGS as _CONFIGS
from .config import MODELS as _MODELS
from .conversion import convert
from .families import supported_families
from .learned import parameter_groups
from .lengths import fix_length
from .patching import encoding_of, patch, patch_llama, patched, unpatch, unpatch_llama
from .theta import set_theta

_attention.register()
_classes = {cls.__name__: cls for cls in (*_CONFIGS.values(), *_MODELS.values())}
globals().update(_classes)
WavePELlamaConfig: _Any  # for type checkers
WavePELlamaForCausalLM: _Any
adapt: _Any
Adapted: _Any
check_rope: _Any
_importlib.import_module("wavepe.serving")  # a room above this one: it completes the above


def __getattr__(name: str) -> _Any:
    if name in ("adapt", "Adapted"):  # at first use: the room of training imports this one
        return getattr(_importlib.import_module("wavepe.training.adapting"), name)
    if name == "check_rope":  # and so does that of analysis
        return _importlib.import_module("wavepe.analysis.rope_check").check_rope
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    *_classes, "Adapted", "adapt", "check_rope", "convert", "encoding_of", "fix_length",
    "parameter_groups", "patch", "patch_llama", "patched", "set_theta", "supported_families",
    "unpatch", "unpatch_llama",
]  # fmt: skip
