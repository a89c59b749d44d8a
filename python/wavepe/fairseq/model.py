"""`transformer_lm` with the options ``--pos-enc`` and its shorthands, put where fairseq looks."""

# fairseq reads the types of the fields, and knows Optional alone.
# ruff: noqa: UP045
import argparse
from dataclasses import dataclass, field
from typing import Any, Optional

from . import compat  # noqa: F401 - fairseq cannot be imported before

from fairseq import models  # isort: skip
from fairseq.models import transformer_lm  # isort: skip
from hydra.core.config_store import ConfigStore  # isort: skip

from ..encodings import encoding, known_encodings  # isort: skip
from .decoder import language_model_decoder  # isort: skip
from .options import write_out  # isort: skip

NAME = "transformer_lm"


@dataclass
class WavePELanguageModelConfig(transformer_lm.TransformerLanguageModelConfig):
    """fairseq's options of a language model, and those of its position encoding."""

    pos_enc: Optional[str] = field(
        default=None,
        metadata={
            "help": "position encoding in place of fairseq's: a name or name:key=value,key=value "
            f"(known: {', '.join(known_encodings())})"
        },
    )
    rope_theta: Optional[float] = field(
        default=None, metadata={"help": "base of the rotation, for --pos-enc rope"}
    )
    wavelet_kind: Optional[str] = field(
        default=None, metadata={"help": "mother wavelet, for --pos-enc wavelet"}
    )
    wavelet_scales: Optional[str] = field(
        default=None,
        metadata={"help": "number of scales, or scales written 1+2+8, for --pos-enc wavelet"},
    )


class WavePELanguageModel(transformer_lm.TransformerLanguageModel):
    """fairseq's language model, whose decoder `register` chooses by ``--pos-enc``."""

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
    """Check the argument of ``--pos-enc`` while the command line is read."""
    try:
        return str(encoding(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
