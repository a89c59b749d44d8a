"""What a checkpoint folder holds beside its weights, so that any program can load it.

A module of a few lines imports the classes of wavepe, and `auto_map` in config.json names them. So
a program that does not know wavepe loads the model with ``trust_remote_code=True``. README.md is a
model card.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME

from ..common.files import new_file
from .layers import StoredSpec, spec_text

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


def auto_map(kind: str, present: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the `auto_map` of a config.json: our classes, and what others have entered."""
    ours = {auto: f"{MODULE}.{name}" for auto, name in AUTO_CLASSES[kind].items()}
    return ours | {key: value for key, value in (present or {}).items() if not is_ours(value)}


def is_ours(reference: Any) -> bool:
    """Return whether a value of an `auto_map` names a class of `MODULE`."""
    return isinstance(reference, str) and reference.rpartition("--")[2].startswith(f"{MODULE}.")


def write_beside(folder: str | os.PathLike, config: Mapping[str, Any], base: str = "") -> None:
    """Write the module and the model card beside a config.json, whose content is `config`.

    `base` is the name of the model that this one was made from; "" if it is not known.
    """
    names = sorted(AUTO_CLASSES[config["model_type"]].values())
    module = Path(folder) / f"{MODULE}.py"
    module.write_text(_MODULE_TEXT + "".join(f"    {name},\n" for name in names) + ")\n", "utf-8")
    try:
        _write_card(Path(folder), config, base)
    except OSError as error:  # a card is not worth a lost checkpoint
        warnings.warn(f"wavepe could not write the model card in {folder}: {error}", stacklevel=2)


def note_perplexities(folder: Path, spec: str, perplexities: Mapping[str, float]) -> None:
    """Write perplexities into the model card, if the folder's encoding is `spec`."""
    config = json.loads((folder / CONFIG_NAME).read_text("utf-8"))
    if config.get("position_encoding") == spec:
        _write_card(folder, config, perplexities=perplexities)


def _write_card(
    folder: Path,
    config: Mapping[str, Any],
    base: str = "",
    perplexities: Mapping[str, float] | None = None,
) -> None:
    card = folder / CARD
    if not card.exists() or OURS in card.read_text("utf-8", "replace"):
        with new_file(card) as part:
            part.write_text(model_card(config, base, perplexities), "utf-8")


def model_card(
    config: Mapping[str, Any], base: str = "", perplexities: Mapping[str, float] | None = None
) -> str:
    """Return the text of a model card.

    Parameters
    ----------
    config : mapping
        The content of config.json.
    base : str
        The name of the model that this one was made from.
    perplexities : mapping of str to float, optional
        The perplexity at each length.
    """
    spec: StoredSpec = config["position_encoding"]
    name = (config.get("architectures") or [""])[0]
    auto = next(
        (key for key, value in AUTO_CLASSES[config["model_type"]].items() if value == name),
        "AutoModelForCausalLM",
    )
    is_hub_name = base and not os.path.exists(base) and base.count("/") == 1
    shown = base if is_hub_name else os.path.basename(os.path.normpath(base)) if base else ""
    lines = ["---", "library_name: transformers", "tags:", "- wavepe"]
    lines += [f"base_model: {base}"] if is_hub_name else []
    lines += ["---", OURS, "", f"# A model with the position encoding `{spec_text(spec)}`", ""]
    lines += ["| | |", "|---|---|", f"| position encoding | `{spec_text(spec)}` |"]
    lines += [f"| class | `{name}` |"] if name else []
    lines += [f"| made from | `{shown}` |"] if shown else []
    lines += [f"| trained length | {config['max_position_embeddings']} tokens "
              "(`max_position_embeddings`) |"]  # fmt: skip
    lines += ["| licence | that of the model it was made from: add it here |", ""]
    if perplexities:
        lines += ["| length | perplexity |", "|---:|---:|"]
        lines += [f"| {length} | {value:.4g} |" for length, value in perplexities.items()] + [""]
    lines += ["The model needs wavepe. In the folder of its checkout:", ""]
    lines += ["```", 'pip install ".[hf]"', "```", ""]
    lines += [
        "```python", f"from transformers import {auto}", "import wavepe.hf", "",
        f'model = {auto}.from_pretrained("this folder")', "```", "",
        "A program that does not import wavepe loads it with `trust_remote_code=True`.", "",
    ]  # fmt: skip
    return "\n".join(lines)
