"""wavepe in Hugging Face Llamas: swap the position encoding of a model, keep it in checkpoints.

`patch` changes a live stock model and `unpatch` restores it; `WavePELlamaForCausalLM` is the model
type "wavepe_llama", which importing this module makes known to the Auto classes.
"""

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"wavepe.hf needs torch and transformers ({error.name} is missing): "
        'pip install "wavepe[hf]"'
    ) from error

from . import attention as _attention
from . import llama as _llama
from .config import WavePELlamaConfig
from .llama import (
    WavePELlamaForCausalLM,
    WavePELlamaForQuestionAnswering,
    WavePELlamaForSequenceClassification,
    WavePELlamaForTokenClassification,
    WavePELlamaModel,
)
from .patching import patch, patch_llama, patched, unpatch, unpatch_llama

__all__ = [
    "WavePELlamaConfig",
    "WavePELlamaForCausalLM",
    "WavePELlamaForQuestionAnswering",
    "WavePELlamaForSequenceClassification",
    "WavePELlamaForTokenClassification",
    "WavePELlamaModel",
    "patch",
    "patch_llama",
    "patched",
    "unpatch",
    "unpatch_llama",
]

_attention.register()
_llama.register()
