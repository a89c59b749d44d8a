"""Configurations: that of the model type wavepe_llama, and the one that a patched Llama holds."""

from __future__ import annotations

import copy
import os
from typing import Any

from transformers import LlamaConfig

from ..encodings import Encoding, encoding
from .names import CLASS_PREFIX, MODEL_TYPE, NAME

# The heads of Llama that have a counterpart with an encoding.
STOCK_CLASSES = (
    "LlamaModel",
    "LlamaForCausalLM",
    "LlamaForSequenceClassification",
    "LlamaForTokenClassification",
    "LlamaForQuestionAnswering",
)
# A stock Llama class that reads the file asks for this attention: it does not know it, or where
# wavepe.hf is imported, the attention finds no encoding. Both raise; RoPE instead would be silent.
ON_DISK = {"attn_implementation": NAME}


class WavePELlamaConfig(LlamaConfig):
    """A Llama's configuration with a position encoding of its own.

    Parameters
    ----------
    position_encoding : str, dict or Encoding
        As `wavepe.encoding` reads it; kept as its spec. The default, "rope", is the encoding of a
        stock Llama: base and scaling are those of `rope_parameters`. The trained length that an
        encoding may need is `max_position_embeddings`.
    **kwargs
        As for `transformers.LlamaConfig`.

    Raises
    ------
    ValueError, TypeError
        Where `wavepe.encoding` does.
    """

    model_type = MODEL_TYPE
    position_encoding: str = "rope"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**{"attn_implementation": NAME, **kwargs})

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), **ON_DISK}

    def __setattr__(self, key: str, value: Any) -> None:
        # from_pretrained(folder, position_encoding=...) sets the attribute after construction.
        if key == "position_encoding":
            value = str(encoding(value))
        super().__setattr__(key, value)


class PatchedLlamaConfig(LlamaConfig):
    """The configuration of a patched stock Llama: in memory a Llama's, on disk a wavepe_llama's.

    A patched model saved as plain Llama would come back with RoPE, without an error.
    """

    position_encoding: str = "rope"

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """As of transformers; ValueError for a class that has no counterpart here."""
        for name in self.architectures or ():
            if name not in STOCK_CLASSES:
                raise ValueError(
                    f"a patched {name} cannot be saved with its position encoding: there is a "
                    f"{MODEL_TYPE} form of {', '.join(STOCK_CLASSES)} only; "
                    "wavepe.hf.unpatch(model) first"
                )
        super().save_pretrained(save_directory, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        output |= {"model_type": MODEL_TYPE, **ON_DISK}
        names = output.get("architectures") or ()
        output["architectures"] = [CLASS_PREFIX + name for name in names] or None
        return output


def patched_config(stock: LlamaConfig, encoding: Encoding) -> PatchedLlamaConfig:
    """A copy of `stock` for one patched model.

    A copy, because models built from one configuration share it: set there, the encoding would
    reach the others. TypeError for a class derived from LlamaConfig: saved as a wavepe_llama's, it
    would lose its own fields.
    """
    if type(stock) is not LlamaConfig:
        raise TypeError(
            f"a model that is patched needs a LlamaConfig, got {type(stock).__name__}, which could "
            "not be saved with the encoding"
        )
    config = copy.deepcopy(stock)
    config.__class__ = PatchedLlamaConfig
    config.position_encoding = str(encoding)
    config._attn_implementation = NAME
    return config


def return_changes(config: PatchedLlamaConfig, stock: LlamaConfig) -> None:
    """Give `stock` what was changed in the copy since (a resized vocabulary, say)."""
    own = ("position_encoding", "_attn_implementation_internal")
    for key, value in vars(config).items():
        if key not in own:
            stock.__dict__[key] = value
