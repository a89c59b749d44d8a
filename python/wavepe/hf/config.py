"""Configurations of the model types wavepe_<family>, and of patched stock models.

In memory, a patched model has the configuration class of its family. On disk, it has the model type
wavepe_<family>: a stock class would load a stock type with RoPE, and raise no error.
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
from transformers.utils import CONFIG_NAME

from ..common.runtime import __version__
from ..common.spec import TYPE_PREFIX
from .families import ATTENTION, FAMILIES, Family, is_stock
from .folder import AUTO_CLASSES, OfFolder, auto_map, write_beside
from .layers import LayerEncodings, StoredSpec
from .rotary_check import LIVE

CLASS_PREFIX = "WavePE"  # WavePELlamaForCausalLM is LlamaForCausalLM with an encoding
PATCHED_PREFIX = "Patched"  # PatchedMistralConfig is the configuration of a patched Mistral
# A stock class that reads the file asks for an attention of this name, which does not exist, so its
# error shows this text. Without it, the class would use RoPE and say nothing.
UNKNOWN = "wavepe: import wavepe.hf, and load with AutoModelForCausalLM"
ON_DISK = {
    "attn_implementation": UNKNOWN,
    "_attn_implementation": UNKNOWN,
    "wavepe_version": __version__,  # nothing reads it
}

CONFIGS: dict[str, Any] = {}  # wavepe_<family> -> its configuration
MODELS: dict[str, Any] = {}  # class name -> class; model_types.py fills it


class OwnConfig(OfFolder):
    """Mixin of configurations of wavepe types and patched models, whose folders load anywhere."""

    def to_dict(self) -> dict[str, Any]:
        fill_peft_tables()
        output = super().to_dict()  # type: ignore[misc]
        output.pop(LIVE, None)
        if self.is_of_wavepe():
            kind = TYPE_PREFIX + output["model_type"].removeprefix(TYPE_PREFIX)
            output["auto_map"] = auto_map(kind, output.get("auto_map"))
        return {**output, **ON_DISK}

    def to_json_file(self, json_file_path: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Write the file and, beside a config.json, what lets any program load the folder."""
        if (link := self.__dict__.get(LIVE)) and (live := link()):
            live.before_saving(self)
        super().to_json_file(json_file_path, *args, **kwargs)  # type: ignore[misc]
        folder, name = os.path.split(json_file_path)
        if name == CONFIG_NAME and folder and self.is_of_wavepe():
            config: Any = self
            base = str(config._name_or_path or "").removesuffix(_PATCHED_NAME.removeprefix("{}"))
            write_beside(folder, config.to_dict(), base)


class EncodedConfig(OwnConfig):
    """Mixin of the configurations of the types wavepe_<family>."""

    stock: Any
    model_type: Any

    def __setattr__(self, key: str, value: Any) -> None:
        # from_pretrained(folder, position_encoding=...) sets the attribute after construction.
        if key == "position_encoding":
            value = LayerEncodings(value).stored()
            self.__dict__.setdefault("auto_map", {})  # TRL reads it from any configuration
        super().__setattr__(key, value)

    if hasattr(PretrainedConfig, "__post_init__"):  # dataclasses, later than transformers 5.0

        def __post_init__(self, **kwargs: Any) -> None:
            parent: Any = super()
            parent.__post_init__(**{"attn_implementation": ATTENTION, **_checked(kwargs)})

    else:

        def __init__(self, position_encoding: Any = "rope", **kwargs: Any) -> None:
            self.position_encoding = position_encoding
            rope = kwargs.get("rope_parameters") or {}
            if self.stock.model_type == "gpt_neox" and "partial_rotary_factor" in rope:
                # 5.0 would overwrite it, unless it has its old name, too
                kwargs["rotary_pct"] = rope["partial_rotary_factor"]
            super().__init__(**{"attn_implementation": ATTENTION, **_checked(kwargs)})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a configuration as transformers does; ValueError for that of another family."""
        own_type, stock_type = cls.model_type, cls.stock.model_type
        kind = config_dict.get("model_type", own_type)
        if kind not in (own_type, stock_type):
            raise ValueError(
                f"a {own_type} can be read from the files of a {stock_type} or a {own_type}, got "
                f"model_type {kind!r}: load it with its own class, then call wavepe.hf.patch(model)"
            )
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]


def _checked(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop the entries of a file that are for stock classes; TypeError if `position_encoding` is
    misspelt, which transformers would keep and never read."""
    for key in kwargs:
        if difflib.get_close_matches(key, ["position_encoding"], cutoff=0.8):
            raise TypeError(f"unknown argument {key!r}, did you mean 'position_encoding'?")
    dropped = {"_attn_implementation", "wavepe_version"}
    if kwargs.get("attn_implementation") == UNKNOWN:
        dropped.add("attn_implementation")
    return {key: value for key, value in kwargs.items() if key not in dropped}


class PatchedConfig(OwnConfig):
    """Mixin that turns a stock configuration class into that of a patched model."""

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save as transformers does; ValueError for a model class that wavepe.hf cannot load."""
        config: Any = self
        for name in config.architectures or ():
            if CLASS_PREFIX + name not in MODELS:
                raise ValueError(
                    f"a patched {name} cannot be saved with its position encoding: no class "
                    f"{CLASS_PREFIX + name} could load it. Call wavepe.hf.unpatch(model) first"
                )
        super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        names = [CLASS_PREFIX + name for name in output.get("architectures") or ()]
        kind = TYPE_PREFIX + output["model_type"]
        return {**output, "model_type": kind, "architectures": names or None}


def patched_config(stock: PretrainedConfig, stored: StoredSpec) -> PretrainedConfig:
    """Return a copy of `stock` for a patched model; TypeError if a file would lose fields."""
    if not is_stock(stock):
        raise TypeError(
            "patch needs a model whose configuration has a class of transformers, got "
            f"{type(stock).__name__}, which could not be saved with the encoding"
        )
    config: Any = copy.deepcopy(stock)
    config.__class__ = globals()[PATCHED_PREFIX + type(stock).__name__]
    config.position_encoding = stored
    config._attn_implementation = ATTENTION
    if config._name_or_path:
        config._name_or_path = _PATCHED_NAME.format(config._name_or_path)
    return config


# TRL loads a reference model by the name of the trained one, and PEFT the base of an adapter. For a
# patched model that would be the stock model. So its name belongs to no model, and the program's
# error shows it.
_PATCHED_NAME = (
    "{} (patched by wavepe in memory: give the tokenizer and any reference model yourself, load an "
    "adapter onto a model that is patched so again, or save the model and load that folder)"
)


def return_changes(config: PretrainedConfig, stock: PretrainedConfig) -> None:
    """Write later changes of the copy to `stock`, such as a resized vocabulary."""
    kept = ["position_encoding", "_attn_implementation_internal", "_name_or_path", LIVE]
    for key, value in vars(config).items():
        if key not in kept:
            stock.__dict__[key] = value


# Modules of PEFT with tables by model_type: default target modules, and weights stored fused.
PEFT_TABLES = {"peft.utils.constants", "peft.utils.transformers_weight_conversion"}
_filled: set[str] = set()


def fill_peft_tables() -> None:
    """Add our types to PEFT's tables, if PEFT is imported; it reads them after a `to_dict()`."""
    for name in (PEFT_TABLES - _filled) & sys.modules.keys():
        _filled.add(name)
        tables = [x for x in vars(sys.modules[name]).values() if isinstance(x, dict)]
        for table, (kind, config) in itertools.product(tables, CONFIGS.items()):
            if config.stock.model_type in table:
                table.setdefault(kind, table[config.stock.model_type])


_DOC = """Configure a {name} with a position encoding.

    Parameters
    ----------
    position_encoding : str, dict or Encoding
        One encoding, in any form that `wavepe.encoding` takes. Or a dict of layer ranges, as
        `wavepe.hf.patch` takes it: ``{{"0-3": "rope", "4": "none"}}``. The attribute holds specs.
        The default "rope" is the encoding of the stock model: its base and scaling are those of
        `rope_parameters`. An encoding that depends on the trained length takes it from
        `max_position_embeddings`.
    **kwargs
        As for `transformers.{name}Config`.

    Raises
    ------
    ValueError, TypeError
        `wavepe.encoding` does not accept the encoding.
    """


def _derive(prefix: str, mixin: Any, family: Family, doc: str, **body: Any) -> Any:
    """Create a configuration class, and put it where pickle looks for it."""
    stock = CONFIG_MAPPING[family.model_type]
    name = prefix + stock.__name__
    body |= {
        "__module__": __name__,
        "__doc__": doc.format(name=stock.__name__.removesuffix("Config")),
        "__annotations__": {"position_encoding": str | dict},
        "position_encoding": family.encoding,
    }
    globals()[name] = type(name, (mixin, stock), body)
    return globals()[name]


for _family in FAMILIES.values():
    _kind, _stock = TYPE_PREFIX + _family.model_type, CONFIG_MAPPING[_family.model_type]
    CONFIGS[_kind] = _derive(
        CLASS_PREFIX, EncodedConfig, _family, _DOC, model_type=_kind, stock=_stock
    )
    AUTO_CLASSES[_kind] = {"AutoConfig": CONFIGS[_kind].__name__}
    _derive(PATCHED_PREFIX, PatchedConfig, _family, "Configuration of a patched {name}.")
