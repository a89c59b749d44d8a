"""The files beside the weights of a checkpoint folder, with which any program can load it.

A module of a few lines imports the classes of wavepe, and `auto_map` in config.json names them. So
a program that does not know wavepe loads the model with ``trust_remote_code=True``. README.md is a
model card.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.files import new_file
from .layers import spec_text

MODULE = "modeling_wavepe"
CARD = "README.md"
_MODULE_TEXT = '''"""The classes of this model, for programs that do not import wavepe.

Transformers reads this file if it is given trust_remote_code=True.
"""

from wavepe.hf import (  # noqa: F401
'''
# A card with this line is written anew; any other README.md stays as it is.
OURS = "<!-- written by wavepe: remove this line to keep your changes -->"

# wavepe_<family> -> {Auto class: its class}; config.py and model_types.py fill it.
AUTO_CLASSES: dict[str, dict[str, str]] = {}


class OfFolder:
    """Mixin of the classes that `MODULE` imports; a user's subclass is not one of them."""

    @classmethod
    def is_of_wavepe(cls) -> bool:
        return cls.__module__.startswith("wavepe.")

    @classmethod
    def register_for_auto_class(cls, *args: Any, **kwargs: Any) -> None:
        if not cls.is_of_wavepe():
            super().register_for_auto_class(*args, **kwargs)  # type: ignore[misc]


def auto_map(kind: str, present: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the `auto_map` of a config.json: our classes, and what others have entered."""
    ours = {auto: f"{MODULE}.{name}" for auto, name in AUTO_CLASSES[kind].items()}
    return ours | {key: value for key, value in (present or {}).items() if not is_ours(value)}


def is_ours(reference: Any) -> bool:
    """Return whether a value of an `auto_map` names a class of `MODULE`."""
    return isinstance(reference, str) and reference.rpartition("--")[2].startswith(f"{MODULE}.")


def write_beside(folder: str | os.PathLike, config: Mapping[str, Any], base: str = "") -> None:
    """Write module and model card beside a config.json; `base` names the model it comes from."""
    names = sorted(AUTO_CLASSES[config["model_type"]].values())
    module = Path(folder) / f"{MODULE}.py"
    module.write_text(_MODULE_TEXT + "".join(f"    {name},\n" for name in names) + ")\n", "utf-8")
    card = Path(folder) / CARD
    try:
        if not card.exists() or OURS in card.read_text("utf-8", "replace"):
            with new_file(card) as part:
                part.write_text(model_card(config, base), "utf-8")
    except OSError as error:  # a card is not worth a lost checkpoint
        warnings.warn(f"wavepe could not write the model card in {folder}: {error}", stacklevel=2)


def model_card(config: Mapping[str, Any], base: str = "") -> str:
    """Return the text of a model card; the arguments are those of `write_beside`."""
    spec = spec_text(config["position_encoding"])
    name = (config.get("architectures") or [""])[0]
    autos = {cls: auto for auto, cls in AUTO_CLASSES[config["model_type"]].items()}
    auto = autos.get(name, "AutoModelForCausalLM")
    is_hub_name = base and not os.path.exists(base) and base.count("/") == 1
    source = base if is_hub_name or not base else os.path.basename(os.path.normpath(base))
    length = f"{config['max_position_embeddings']} tokens (`max_position_embeddings`)"
    lines = [
        "---", "library_name: transformers", "tags:", "- wavepe",
        f"base_model: {base}" if is_hub_name else None,
        "---", OURS, "", f"# A model with the position encoding `{spec}`", "",
        "| | |", "|---|---|", f"| position encoding | `{spec}` |",
        f"| class | `{name}` |" if name else None,
        f"| made from | `{source}` |" if source else None,
        f"| trained length | {length} |",
        "| licence | that of the model it was made from: add it here |", "",
        "The model needs wavepe. In the folder of its checkout:", "",
        "```", 'pip install ".[hf]"', "```", "",
        "```python", f"from transformers import {auto}", "import wavepe.hf", "",
        f'model = {auto}.from_pretrained("this folder")', "```", "",
        "A program that does not import wavepe loads it with `trust_remote_code=True`.", "",
    ]  # fmt: skip
    return "\n".join(line for line in lines if line is not None)
