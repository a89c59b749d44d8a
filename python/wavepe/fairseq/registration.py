"""Puts wavepe's language model where fairseq looks for `transformer_lm` and its architectures."""

from __future__ import annotations

from . import compat  # noqa: F401 - fairseq cannot be imported before

from fairseq import models  # isort: skip
from fairseq.models import transformer_lm  # isort: skip
from hydra.core.config_store import ConfigStore  # isort: skip

from .decoder import language_model_decoder  # isort: skip
from .model import WavePELanguageModel, WavePELanguageModelConfig  # isort: skip

NAME = "transformer_lm"


def register() -> None:
    """Let every architecture of `transformer_lm` take ``--pos-enc``; again does nothing."""
    if models.MODEL_REGISTRY[NAME] is WavePELanguageModel:
        return
    # fairseq's own build_model looks its decoder up by this name.
    transformer_lm.TransformerDecoder = language_model_decoder
    models.MODEL_REGISTRY[NAME] = WavePELanguageModel
    models.MODEL_DATACLASS_REGISTRY[NAME] = WavePELanguageModelConfig
    # fairseq reads the options from an attribute of this very name; in a class it would be mangled.
    setattr(WavePELanguageModel, "__dataclass", WavePELanguageModelConfig)
    for arch, name in models.ARCH_MODEL_NAME_REGISTRY.items():
        if name == NAME:
            models.ARCH_MODEL_REGISTRY[arch] = WavePELanguageModel
    node = WavePELanguageModelConfig()
    node._name = NAME
    ConfigStore.instance().store(name=NAME, group="model", node=node, provider="wavepe")
