"""Configurations: that of the model type wavepe_llama, and the one that a patched model holds."""

from __future__ import annotations

import copy
import difflib
import functools
import os
from typing import Any

import transformers
from transformers import LlamaConfig, PretrainedConfig

from . import families, rope_config
from .layers import Choice, Spec, Written
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
# transformers < 5 overwrites the first key, and takes the second as it is.
ON_DISK = {"attn_implementation": NAME, "_attn_implementation": NAME}
PATCHED = "Patched"  # PatchedMistralConfig is the class of a patched Mistral's configuration


class _SpecAttribute:
    """A configuration that keeps `position_encoding` as it is written in files."""

    def __setattr__(self, key: str, value: Any) -> None:
        # from_pretrained(folder, position_encoding=...) sets the attribute after construction.
        if key == "position_encoding":
            value = Choice(value).written()
        super().__setattr__(key, value)


class WavePELlamaConfig(_SpecAttribute, LlamaConfig):
    """A Llama's configuration with a position encoding of its own.

    Parameters
    ----------
    position_encoding : str, dict or Encoding
        As `wavepe.encoding` reads it, or for hybrids a dict of layer ranges,
        ``{"0-3": "rope", "4": "none"}``, as `wavepe.hf.patch` takes it; kept as specs. The default,
        "rope", is the encoding of a stock Llama: base and scaling are those of `rope_parameters`.
        The trained length that an encoding may need is `max_position_embeddings`.
    **kwargs
        As for `transformers.LlamaConfig`.

    Raises
    ------
    ValueError, TypeError
        Where `wavepe.encoding` does.
    """

    model_type = MODEL_TYPE
    position_encoding: str | dict = "rope"

    if rope_config.TRANSFORMERS_5:  # configurations are dataclasses since

        def __post_init__(self, **kwargs: Any) -> None:
            super().__post_init__(**{"attn_implementation": NAME, **_checked(kwargs)})

    else:

        def __init__(
            self,
            position_encoding: Spec = "rope",
            rope_parameters: dict[str, Any] | None = None,
            **kwargs: Any,
        ) -> None:
            self.position_encoding = position_encoding  # type: ignore[assignment] # it is written
            if rope_parameters:  # of a file that transformers 5 has written
                kwargs |= rope_config.for_transformers_4(rope_parameters)
            super().__init__(**{"attn_implementation": NAME, **_checked(kwargs)})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As of transformers; ValueError for the configuration of another family."""
        kind = config_dict.get("model_type", MODEL_TYPE)
        if kind not in (MODEL_TYPE, LlamaConfig.model_type):
            raise ValueError(
                f"a {MODEL_TYPE} is read from the files of a llama or a {MODEL_TYPE}, got "
                f"model_type {kind!r}: load it with its own class, then wavepe.hf.patch(model)"
            )
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), **ON_DISK}


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """What transformers would keep unread: TypeError for `position_encoding` misspelt."""
    for key in given:
        if difflib.get_close_matches(key, ["position_encoding"], cutoff=0.8):
            raise TypeError(f"unknown argument {key!r}, did you mean 'position_encoding'?")
    # Of a file, for stock classes.
    return {key: value for key, value in given.items() if key != "_attn_implementation"}


class PatchedLlamaConfig(LlamaConfig):
    """The configuration of a patched stock Llama: in memory a Llama's, on disk a wavepe_llama's.

    A patched model saved as plain Llama would come back with RoPE, without an error.
    """

    position_encoding: str | dict = "rope"

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


class _Unsaved:
    """The configuration of a patched model whose family has no type that keeps the encoding."""

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """ValueError: on disk it would be a stock model's."""
        kind = type(self).__name__.removeprefix(PATCHED).removesuffix("Config")
        raise ValueError(
            f"a patched {kind} cannot be saved with its position encoding, there is a {MODEL_TYPE} "
            "form of Llama only: torch.save(model.state_dict(), file) keeps the weights, for a "
            "model that is patched in the same way (after wavepe.hf.unpatch(model), which drops "
            "what an encoding has learned, save_pretrained writes the stock model)"
        )


@functools.cache
def _patched_class(stock: Any) -> Any:
    if stock is LlamaConfig:
        return PatchedLlamaConfig
    name = PATCHED + stock.__name__
    body: dict[str, Any] = {"__module__": __name__, "__qualname__": name}
    body |= {"position_encoding": "rope", "__annotations__": {"position_encoding": str | dict}}
    return type(name, (_Unsaved, stock), body)


def __getattr__(name: str) -> Any:
    """Where pickle finds the classes that were made for a patch."""
    stock = getattr(transformers, name.removeprefix(PATCHED), None)
    if not name.startswith(PATCHED) or not isinstance(stock, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _patched_class(stock)


def patched_config(stock: PretrainedConfig, written: Written) -> PretrainedConfig:
    """A copy of `stock` for one patched model.

    A copy, because models built from one configuration share it: set there, the encoding would
    reach the others. TypeError for a class derived from a family's: saved as a wavepe_llama's, it
    would lose its own fields.
    """
    if not families.is_stock(stock):
        raise TypeError(
            "a model that is patched needs a configuration of transformers' own class, got "
            f"{type(stock).__name__}, which could not be saved with the encoding"
        )
    config: Any = copy.deepcopy(stock)
    config.__class__ = _patched_class(stock.__class__)
    config.position_encoding = written
    config._attn_implementation = NAME
    return config


def return_changes(config: PretrainedConfig, stock: PretrainedConfig) -> None:
    """Give `stock` what was changed in the copy since (a resized vocabulary, say)."""
    own = ("position_encoding", "_attn_implementation_internal")
    for key, value in vars(config).items():
        if key not in own:
            stock.__dict__[key] = value
