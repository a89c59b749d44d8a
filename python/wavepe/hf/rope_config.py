"""A model's rope configuration, read and written as either version of transformers has it.

transformers 5 has `config.rope_parameters`, for some families a dict for each layer type. Versions
before have `config.rope_theta` and `config.rope_scaling`, Gemma 3 also `rope_local_base_freq`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import transformers

from .._rope_frequencies import ROPE_TYPES
from ..encodings.spec import write_value

TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5

Bases = dict[str, float]
# What GPT-NeoX calls them, before transformers 5.
NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
ALL_LAYERS = ""  # the layer type of a model with one base for all layers


class Slot(NamedTuple):
    """What rotates a layer: a module of the base model, and its layer type where it has several."""

    module: str = "rotary_emb"
    layer_type: str | None = None


def has_layer_types(config: Any) -> bool:
    """Return whether each layer type has rope parameters of its own, in transformers 5."""
    given = getattr(config, "rope_parameters", None) or {}
    return any(isinstance(value, Mapping) for value in given.values())


def parameters(config: Any, slot: Slot) -> dict[str, Any]:
    """Return base and scaling of a slot, as transformers 5 writes them."""
    if TRANSFORMERS_5:
        given = config.rope_parameters
        return dict(given if slot.layer_type is None else given[slot.layer_type])
    if slot.module == "rotary_emb_local":
        return {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
    given = {"rope_theta": config.rope_theta} | (getattr(config, "rope_scaling", None) or {})
    kind = given.pop("type", "default")  # its old name, which some families keep (Phi-3)
    if given.setdefault("rope_type", kind) == "longrope":
        # The length is read from the configuration only, and where it is there, the factor is not.
        given.pop("original_max_position_embeddings", None)
        original = getattr(config, "original_max_position_embeddings", None)
        if original is not None:
            given.pop("factor", None)
            given["original_max_position_embeddings"] = original
    return given


def follows_length(config: Any, slot: Slot) -> bool:
    """Tell whether the frequencies of a model's own layers follow the length of the sequence."""
    kind = parameters(config, slot).get("rope_type", "default")
    return kind in ROPE_TYPES and ROPE_TYPES[kind].follows_length


def for_init(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters`, as transformers 5 writes them, as arguments of a configuration.

    Of a stock model_type, where configurations are no dataclasses: in transformers 4 and 5.0.
    """
    names = NEOX if kind == "gpt_neox" else {}
    if TRANSFORMERS_5:  # 5.0 overwrites GPT-NeoX's share of a head, unless it has the old name
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


def of_local_layers(config: Any) -> Any:
    """Return a copy for the second rotary module of Gemma 3, before transformers 5."""
    config = copy.deepcopy(config)
    config.rope_theta = config.rope_local_base_freq
    config.rope_scaling = {"rope_type": "default"}
    return config


def bases(config: Any) -> Bases:
    """Return the base of each layer type; the key is `ALL_LAYERS` where there is one for all."""
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
    """Let a configuration have other bases.

    Raises
    ------
    ValueError
        It would lose them in a file.
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
            f"a {type(config).__name__} with the base {describe(new)} comes back from a file with "
            "another one"
        )


def describe(given: Bases) -> str:
    """Write bases for messages: ``theta=10000``, ``full_attention theta=1e6, ...``."""
    return ", ".join(f"{key} theta={write_value(base)}".lstrip() for key, base in given.items())
