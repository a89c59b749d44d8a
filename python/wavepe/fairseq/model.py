"""`transformer_lm` with the options ``--pos-enc`` and its shorthands."""

# fairseq reads the types of the fields, and knows Optional alone.
# ruff: noqa: UP045
import argparse
from dataclasses import dataclass, field
from typing import Any, Optional
from unittest import mock

from . import compat  # noqa: F401 - fairseq cannot be imported before

from fairseq.models import transformer_lm  # isort: skip

from ..encodings import Encoding, encoding, known_encodings  # isort: skip
from ..encodings.spec import read_value  # isort: skip
from .decoder import decoder_with  # isort: skip

# Option of the command line -> encoding and its option.
SHORTHANDS = {
    "rope_theta": ("rope", "theta"),
    "wavelet_kind": ("wavelet", "kind"),
    "wavelet_scales": ("wavelet", "scales"),
}


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
    """fairseq's language model; without ``--pos-enc`` it is built by fairseq alone."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        super().add_args(parser)
        for action in parser._group_actions if hasattr(parser, "_group_actions") else ():
            if action.dest == "pos_enc":
                action.type = _spec

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        chosen = chosen_encoding(args)
        if chosen is None:
            return super().build_model(args, task)
        # fairseq's own method names the class of its decoder
        with mock.patch.object(transformer_lm, "TransformerDecoder", decoder_with(chosen)):
            return super().build_model(args, task)


def chosen_encoding(args: Any) -> Optional[Encoding]:
    """The encoding that the options name; None for fairseq's own.

    Raises
    ------
    ValueError
        Unknown encoding or option, one given twice, or a shorthand of another encoding.
    """
    spec = getattr(args, "pos_enc", None)
    base = None if spec is None else encoding(spec)
    options: dict[str, Any] = {}
    for key, (name, option) in SHORTHANDS.items():
        given = getattr(args, key, None)
        if given is None:
            continue
        if base is None or base.name != name:
            flag = "--" + key.replace("_", "-")
            raise ValueError(
                f"{flag} {given} goes with --pos-enc {name}, got "
                + ("no --pos-enc" if spec is None else f"--pos-enc {spec}")
            )
        options[option] = given
    if spec is None:
        return None
    if "scales" in options:
        options["scales"] = read_value(options["scales"])
    return encoding(spec, **options)


def _spec(text: str) -> str:
    """The argument of ``--pos-enc``, checked while the command line is read."""
    try:
        return str(encoding(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
