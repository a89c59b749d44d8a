"""The plug-in for vLLM: it registers the model types wavepe_<family>. See model.py."""

from __future__ import annotations

from typing import Any

from wavepe.common.runtime import command_for
from wavepe.hf.config import CLASS_PREFIX

VERSIONS = ("0.32.0",)
# Classes of vLLM whose decoder layers have a `self_attn` that calls `rotary_emb`, then `attn`.
STOCK = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "GemmaForCausalLM", "GraniteForCausalLM", "MixtralForCausalLM",
)  # fmt: skip


def register() -> None:
    """Register our model classes with vLLM, which calls this in each of its processes."""
    from vllm import ModelRegistry

    for stock in STOCK:
        name = CLASS_PREFIX + stock
        ModelRegistry.register_model(name, f"{__name__}:{name}")


def __getattr__(name: str) -> Any:
    stock = name.removeprefix(CLASS_PREFIX)
    if stock == name or stock not in STOCK:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm

    if vllm.__version__ not in VERSIONS:
        raise ImportError(
            f"wavepe's plug-in is tested with vLLM {' and '.join(VERSIONS)} only, and this is vLLM "
            f"{vllm.__version__}: {command_for('vllm')}"
        )
    from .model import served_class

    return served_class(stock)
