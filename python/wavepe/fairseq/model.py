"""`transformer_lm` with the option ``--pos-enc`` and its shorthands, in fairseq's registries."""

# fairseq reads the types of the fields, and understands Optional only.
# ruff: noqa: UP045
import argparse
from dataclasses import dataclass, field
from typing import Any, Optional

from . import compat  # noqa: F401 - it must come before fairseq

from fairseq import models  # isort: skip
from fairseq.models import transformer_lm  # isort: skip
from hydra.core.config_store import ConfigStore  # isort: skip

from ..encodings import encoding, known_encodings  # isort: skip
from .decoder import language_model_decoder, write_out  # isort: skip

NAME = "transformer_lm"


@dataclass
class WavePELanguageModelConfig(transformer_lm.TransformerLanguageModelConfig):
    """fairseq's options for a language model, and the options of its position encoding."""

    pos_enc: Optional[str] = field(
        default=None,
        metadata={
            "help": "position encoding, written name or name:key=value,key=value; known names: "
            f"{', '.join(known_encodings())} (default: fairseq's own positions)"
        },
    )
    rope_theta: Optional[float] = field(
        default=None, metadata={"help": "base of the rotation, with --pos-enc rope"}
    )
    wavelet_kind: Optional[str] = field(
        default=None, metadata={"help": "mother wavelet, with --pos-enc wavelet"}
    )
    wavelet_scales: Optional[str] = field(
        default=None,
        metadata={"help": "number of scales, or a list as 1+2+8, with --pos-enc wavelet"},
    )


class WavePELanguageModel(transformer_lm.TransformerLanguageModel):
    """fairseq's language model with the decoder that ``--pos-enc`` asks for."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        super().add_args(parser)
        for action in parser._group_actions if hasattr(parser, "_group_actions") else ():
            if action.dest == "pos_enc":
                action.type = _spec

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        write_out(args)
        return super().build_model(args, task)


def _spec(text: str) -> str:
    """Check and normalise the argument of ``--pos-enc``."""
    try:
        return str(encoding(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def register() -> None:
    """Add ``--pos-enc`` to every architecture of `transformer_lm`; a second call does nothing."""
    if models.MODEL_REGISTRY[NAME] is WavePELanguageModel:
        return
    # fairseq's build_model creates its decoder by this name.
    transformer_lm.TransformerDecoder = language_model_decoder
    models.MODEL_REGISTRY[NAME] = WavePELanguageModel
    models.MODEL_DATACLASS_REGISTRY[NAME] = WavePELanguageModelConfig
    # fairseq reads the options from an attribute of this name; a class body would mangle the name.
    setattr(WavePELanguageModel, "__dataclass", WavePELanguageModelConfig)
    for arch, name in models.ARCH_MODEL_NAME_REGISTRY.items():
        if name == NAME:
            models.ARCH_MODEL_REGISTRY[arch] = WavePELanguageModel
    node = WavePELanguageModelConfig()
    node._name = NAME
    ConfigStore.instance().store(name=NAME, group="model", node=node, provider="wavepe")
