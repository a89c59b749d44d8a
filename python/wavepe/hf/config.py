"""Configurations of the model types wavepe_<family>, and of patched stock models.

The configuration of a patched model is the stock model's in memory and a wavepe_<family>'s on disk:
saved as a stock model's, it would come back with RoPE, without an error.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import os
import sys
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from . import rope_config
from .families import NAME, SUPPORTED, TYPE_PREFIX, is_stock
from .layers import Choice, StoredSpec

CLASS_PREFIX = "WavePE"  # WavePELlamaForCausalLM is LlamaForCausalLM with an encoding
PATCHED_PREFIX = "Patched"  # PatchedMistralConfig is the configuration of a patched Mistral
# A stock class that reads the file asks for this attention, which nobody has registered: its error
# shows this text. RoPE instead would be silent.
# transformers < 5 overwrites the first key, and takes the second as it is.
UNKNOWN = "wavepe: import wavepe.hf, and load with AutoModelForCausalLM"
ON_DISK = {"attn_implementation": UNKNOWN, "_attn_implementation": UNKNOWN}

CONFIGS: dict[str, Any] = {}  # wavepe_<family> -> its configuration
MODELS: dict[str, Any] = {}  # name of a class -> the class; model_types.py fills it


class GivesWeights:
    """Lets `output_attentions` be set, which transformers ties to the attention "eager"."""

    _output_attentions: bool | None

    @property
    def output_attentions(self) -> bool | None:
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        self._output_attentions = value

    def validate(self) -> None:
        """Check all else as transformers does before it saves."""
        asked, self._output_attentions = self._output_attentions, False
        try:
            super().validate()  # type: ignore[misc]
        finally:
            self._output_attentions = asked


class EncodedConfig(GivesWeights):
    """What makes a stock configuration one of a type wavepe_<family>."""

    stock: Any
    model_type: Any

    def __setattr__(self, key: str, value: Any) -> None:
        # from_pretrained(folder, position_encoding=...) sets the attribute after construction.
        if key == "position_encoding":
            value = Choice(value).written()
        super().__setattr__(key, value)

    if hasattr(PretrainedConfig, "__post_init__"):  # dataclasses, later than transformers 5.0

        def __post_init__(self, **kwargs: Any) -> None:
            parent: Any = super()
            parent.__post_init__(**{"attn_implementation": NAME, **_checked(kwargs)})

    else:

        def __init__(self, position_encoding: Any = "rope", **kwargs: Any) -> None:
            self.position_encoding = position_encoding
            given = kwargs.pop("rope_parameters", None)
            if given:
                kwargs |= rope_config.for_init(self.stock.model_type, given)
            super().__init__(**{"attn_implementation": NAME, **_checked(kwargs)})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build as transformers does; ValueError for the configuration of another family."""
        own, stock = cls.model_type, cls.stock.model_type
        kind = config_dict.get("model_type", own)
        if kind not in (own, stock):
            raise ValueError(
                f"a {own} is read from the files of a {stock} or a {own}, got model_type {kind!r}: "
                "load it with its own class, then wavepe.hf.patch(model)"
            )
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        tell_peft()
        return {**super().to_dict(), **ON_DISK}  # type: ignore[misc]


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Raise TypeError for `position_encoding` misspelt, which transformers would keep unread."""
    for key in given:
        if difflib.get_close_matches(key, ["position_encoding"], cutoff=0.8):
            raise TypeError(f"unknown argument {key!r}, did you mean 'position_encoding'?")
    stock = {"_attn_implementation"}  # what a file says to stock classes
    if given.get("attn_implementation") == UNKNOWN:
        stock.add("attn_implementation")
    return {key: value for key, value in given.items() if key not in stock}


class PatchedConfig(GivesWeights):
    """What makes a stock configuration that of a patched model."""

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save as transformers does; ValueError for a class that has no counterpart here."""
        config: Any = self
        for name in config.architectures or ():
            if CLASS_PREFIX + name not in MODELS:
                raise ValueError(
                    f"a patched {name} cannot be saved with its position encoding: no "
                    f"{CLASS_PREFIX + name} could read it; wavepe.hf.unpatch(model) first"
                )
        super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        tell_peft()
        output = super().to_dict()  # type: ignore[misc]
        names = [CLASS_PREFIX + name for name in output.get("architectures") or ()]
        own = TYPE_PREFIX + output["model_type"]
        return {**output, "model_type": own, **ON_DISK, "architectures": names or None}


def patched_config(stock: PretrainedConfig, written: StoredSpec) -> PretrainedConfig:
    """Return a copy of `stock` for one patched model.

    It is a copy, because models built from one configuration share it: set there, the encoding
    would reach the others. TypeError for a class derived from a family's, which would lose its own
    fields when it is saved.
    """
    if not is_stock(stock):
        raise TypeError(
            "a model that is patched needs a configuration of transformers' own class, got "
            f"{type(stock).__name__}, which could not be saved with the encoding"
        )
    config: Any = copy.deepcopy(stock)
    config.__class__ = globals()[PATCHED_PREFIX + type(stock).__name__]
    config.position_encoding = written
    config._attn_implementation = NAME
    return config


def return_changes(config: PretrainedConfig, stock: PretrainedConfig) -> None:
    """Give `stock` what was changed in the copy since (a resized vocabulary, say)."""
    own = ["position_encoding", "_attn_implementation_internal"]
    if stock._attn_implementation != "eager":  # which alone gives weights
        own.append("_output_attentions")
    for key, value in vars(config).items():
        if key not in own:
            stock.__dict__[key] = value


# PEFT's modules with tables by model_type: default target modules, weights that are stored fused.
PEFT_TABLES = {"peft.utils.constants", "peft.utils.transformers_weight_conversion"}
_told: set[str] = set()


def tell_peft() -> None:
    """Copy what PEFT's tables say of a family to its type here, where PEFT is imported.

    PEFT takes the model_type from `to_dict()`, which calls this. So it comes in time whichever of
    PEFT, wavepe and the model was there first.
    """
    for name in (PEFT_TABLES - _told) & sys.modules.keys():
        _told.add(name)
        tables = [x for x in vars(sys.modules[name]).values() if isinstance(x, dict)]
        for table, (kind, config) in itertools.product(tables, CONFIGS.items()):
            if config.stock.model_type in table:
                table.setdefault(kind, table[config.stock.model_type])


# ---------------------------------------------------------------- a class for each family


def _config_class(stock: Any) -> Any:
    return _derived(
        CLASS_PREFIX + stock.__name__,
        (EncodedConfig, stock),
        f"""A {stock.__name__} with a position encoding.

    Parameters
    ----------
    position_encoding : str, dict or Encoding
        As `wavepe.encoding` reads it, or for hybrids a dict of layer ranges,
        ``{{"0-3": "rope", "4": "none"}}``, as `wavepe.hf.patch` takes it; kept as specs. The
        default, "rope", is the encoding of the stock model: base and scaling are those of
        `rope_parameters`. The trained length that an encoding may need is
        `max_position_embeddings`.
    **kwargs
        As for `transformers.{stock.__name__}`.

    Raises
    ------
    ValueError, TypeError
        Where `wavepe.encoding` does.
    """,
        model_type=TYPE_PREFIX + stock.model_type,
        stock=stock,
        position_encoding="rope",
        __annotations__={"position_encoding": str | dict},
    )


def _patched_class(stock: Any) -> Any:
    return _derived(
        PATCHED_PREFIX + stock.__name__,
        (PatchedConfig, stock),
        f"The configuration of a patched {stock.__name__.removesuffix('Config')}.",
        position_encoding="rope",
        __annotations__={"position_encoding": str | dict},
    )


def _derived(name: str, bases: tuple[Any, ...], doc: str, **body: Any) -> Any:
    """Make a class that pickle finds here."""
    made = type(name, bases, {"__module__": __name__, "__doc__": doc, **body})
    globals()[name] = made
    return made


for _kind in SUPPORTED:
    CONFIGS[TYPE_PREFIX + _kind] = _config_class(CONFIG_MAPPING[_kind])
    _patched_class(CONFIG_MAPPING[_kind])
