"""wavepe in models of transformers: swap their position encoding, keep it in checkpoints.

`patch` changes a live stock model of the Llama family and `unpatch` restores it;
`WavePELlamaForCausalLM` is the model type "wavepe_llama", which importing this module makes known
to the Auto classes, and `convert` turns a Llama's folder into one. `set_theta` and `use_fused_rope`
are for any model with rotary embedding.
"""

from .._runtime import command_for

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"wavepe.hf needs torch and transformers ({error.name} is missing): " + command_for("hf")
    ) from error

from . import attention as _attention
from . import llama as _llama
from .config import WavePELlamaConfig
from .conversion import convert
from .fused_rope import use_fused_rope
from .llama import (
    WavePELlamaForCausalLM,
    WavePELlamaForQuestionAnswering,
    WavePELlamaForSequenceClassification,
    WavePELlamaForTokenClassification,
    WavePELlamaModel,
)
from .patching import patch, patch_llama, patched, unpatch, unpatch_llama
from .theta import set_theta

__all__ = [
    "WavePELlamaConfig",
    "WavePELlamaForCausalLM",
    "WavePELlamaForQuestionAnswering",
    "WavePELlamaForSequenceClassification",
    "WavePELlamaForTokenClassification",
    "WavePELlamaModel",
    "convert",
    "patch",
    "patch_llama",
    "patched",
    "set_theta",
    "unpatch",
    "unpatch_llama",
    "use_fused_rope",
]

_attention.register()
_llama.register()
