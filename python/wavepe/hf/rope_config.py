"""Read and write the rope configuration of a model, in the form of transformers 4 or 5.

transformers 5 has `config.rope_parameters`; some families have one dict for each layer type in it.
transformers 4 has `config.rope_theta` and `config.rope_scaling`, and for Gemma 3 also
`rope_local_base_freq`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import transformers

from ..arrays.rope_frequencies import ROPE_TYPES
from ..encodings.spec import write_value

TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5

Bases = dict[str, float]
# GPT-NeoX has other names for them before transformers 5.
NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
EACH_BASE = "rotary_embs."  # the modules of Granite SWA, one for each base
ALL_LAYERS = ""  # the layer type of a model with one base for all layers


class Slot(NamedTuple):
    """The module of the base model that rotates a layer, and its layer type if it has several."""

    module: str = "rotary_emb"
    layer_type: str | None = None


def has_layer_types(config: Any) -> bool:
    """Return whether each layer type has its own rope parameters (transformers 5)."""
    given = getattr(config, "rope_parameters", None) or {}
    return any(isinstance(value, Mapping) for value in given.values())


def parameters(config: Any, slot: Slot) -> dict[str, Any]:
    """Return base and scaling of a slot, in the form of transformers 5."""
    if TRANSFORMERS_5:
        given = config.rope_parameters
        if slot.module.startswith(EACH_BASE):
            base = layer_bases(config)[int(slot.module.removeprefix(EACH_BASE))]
            return {**given, "rope_theta": base}
        return dict(given if slot.layer_type is None else given[slot.layer_type])
    if slot.module == "rotary_emb_local":
        return {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
    given = {"rope_theta": config.rope_theta} | (getattr(config, "rope_scaling", None) or {})
    kind = given.pop("type", "default")  # the old name of rope_type, which Phi-3 still uses
    if given.setdefault("rope_type", kind) == "longrope":
        # transformers reads this length from the configuration alone, and then ignores the factor.
        given.pop("original_max_position_embeddings", None)
        original = getattr(config, "original_max_position_embeddings", None)
        if original is not None:
            given.pop("factor", None)
            given["original_max_position_embeddings"] = original
    return given


def follows_length(config: Any, slot: Slot) -> bool:
    """Return whether the model's own frequencies depend on the sequence length."""
    kind = parameters(config, slot).get("rope_type", "default")
    return kind in ROPE_TYPES and ROPE_TYPES[kind].follows_length


def any_follows_length(config: Any) -> bool:
    """Return whether frequencies of some layers depend on the sequence length."""
    return any(follows_length(config, Slot(layer_type=kind or None)) for kind in bases(config))


def for_init(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `rope_parameters` of transformers 5 into arguments of a stock configuration class.

    transformers 4 and 5.0 need this: their configurations are not dataclasses.
    """
    names = NEOX if kind == "gpt_neox" else {}
    if TRANSFORMERS_5:
        # 5.0 overwrites GPT-NeoX's partial_rotary_factor, unless it is given as rotary_pct.
        return {"rope_parameters": given} | {
            names[key]: given[key] for key in names if key in given
        }
    if any(isinstance(value, Mapping) for value in given.values()):  # Gemma 3
        local = given["sliding_attention"]["rope_theta"]
        return {**for_init(kind, given["full_attention"]), "rope_local_base_freq": local}
    scaling = dict(given)
    own = ("rope_theta", "partial_rotary_factor")
    found = {names.get(key, key): scaling.pop(key) for key in own if key in scaling}
    return {**found, "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}


def layer_bases(config: Any) -> list[float]:
    """Return the bases of Granite SWA in rising order; a base of 0 says that a layer has none."""
    return sorted({base for base in config.layer_rope_theta if base})


def of_slot(config: Any, slot: Slot) -> Any:
    """Return the configuration that the stock module of a slot is built with."""
    if slot.module == "rotary_emb_local":  # Gemma 3 in transformers 4
        config = copy.deepcopy(config)
        config.rope_theta = config.rope_local_base_freq
        config.rope_scaling = {"rope_type": "default"}
    elif slot.module.startswith(EACH_BASE):
        found = parameters(config, slot)
        config = copy.deepcopy(config)
        config.rope_parameters = found
    return config


def bases(config: Any) -> Bases:
    """Return the base of each layer type; one base for all layers has the key `ALL_LAYERS`."""
    if has_layer_types(config):
        given = config.rope_parameters.items()
        return {key: value["rope_theta"] for key, value in given if isinstance(value, Mapping)}
    if TRANSFORMERS_5:
        return {ALL_LAYERS: config.rope_parameters["rope_theta"]}
    if hasattr(config, "rope_local_base_freq"):
        local = config.rope_local_base_freq
        return {"full_attention": config.rope_theta, "sliding_attention": local}
    return {ALL_LAYERS: config.rope_theta}


def write_bases(config: Any, new: Bases) -> None:
    """Write new bases into a configuration.

    Raises
    ------
    ValueError
        The configuration would not keep them in a file.
    """
    if has_layer_types(config):
        given = config.rope_parameters
        changed = {key: {**given[key], "rope_theta": base} for key, base in new.items()}
        config.rope_parameters = {**given, **changed}
    elif TRANSFORMERS_5:
        config.rope_parameters = {**config.rope_parameters, "rope_theta": new[ALL_LAYERS]}
    elif ALL_LAYERS not in new:
        config.rope_theta = new["full_attention"]
        config.rope_local_base_freq = new["sliding_attention"]
    else:
        config.rope_theta = new[ALL_LAYERS]
        if hasattr(config, "rotary_emb_base"):  # GPT-NeoX reads this one from a file
            config.rotary_emb_base = new[ALL_LAYERS]
    if bases(type(config).from_dict(config.to_dict())) != new:
        raise ValueError(
            f"a {type(config).__name__} cannot keep the base {describe(new)}: a saved and loaded "
            "configuration would have another one"
        )


def describe(given: Bases) -> str:
    """Write bases on one line: ``theta=10000``, ``full_attention theta=1e6, ...``."""
    return ", ".join(f"{key} theta={write_value(base)}".lstrip() for key, base in given.items())
