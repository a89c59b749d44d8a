"""Read and write `config.rope_parameters`: one dict, or a dict for each layer type."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..common.spec import write_value

Bases = dict[str, Any]  # layer type -> base; None where the configuration has none
EACH_BASE = "rotary_embs."  # the modules of Granite SWA, one for each base
ALL_LAYERS = ""  # the layer type of a model with one base for all layers


class Slot(NamedTuple):
    """The module of the base model that rotates a layer, and its layer type if it has several."""

    module: str = "rotary_emb"
    layer_type: str | None = None


def has_layer_types(config: Any) -> bool:
    """Return whether each layer type has its own rope parameters."""
    whole = getattr(config, "rope_parameters", None) or {}
    return any(isinstance(value, Mapping) for value in whole.values())


def parameters(config: Any, slot: Slot) -> dict[str, Any]:
    """Return base and scaling of a slot."""
    whole = config.rope_parameters or {}
    if slot.module.startswith(EACH_BASE):
        base = layer_bases(config)[int(slot.module.removeprefix(EACH_BASE))]
        return {**whole, "rope_theta": base}
    return dict(whole if slot.layer_type is None else whole[slot.layer_type])


def rope_types(config: Any) -> list[str]:
    """Return the type of RoPE of each layer type."""
    slots = (Slot(layer_type=kind or None) for kind in bases(config))
    return [parameters(config, slot).get("rope_type", "default") for slot in slots]


def layer_bases(config: Any) -> list[float]:
    """Return the bases of Granite SWA in rising order; a layer with the base 0 has no positions."""
    return sorted({base for base in getattr(config, "layer_rope_theta", ()) if base})


def of_slot(config: Any, slot: Slot) -> Any:
    """Return the configuration that the stock module of a slot is built with."""
    if slot.module.startswith(EACH_BASE):
        kept, config = parameters(config, slot), copy.deepcopy(config)
        config.rope_parameters = kept
    return config


def bases(config: Any) -> Bases:
    """Return the base of each layer type; one base for all layers has the key `ALL_LAYERS`."""
    whole = config.rope_parameters or {}
    if not has_layer_types(config):
        return {ALL_LAYERS: whole.get("rope_theta")}
    return {key: x.get("rope_theta") for key, x in whole.items() if isinstance(x, Mapping)}


def write_bases(config: Any, new: Bases) -> None:
    """Write new bases into a configuration; ValueError if a file would not keep them."""
    whole = config.rope_parameters
    if has_layer_types(config):
        changed: dict[str, Any] = {k: {**whole[k], "rope_theta": x} for k, x in new.items()}
    else:
        changed = {"rope_theta": new[ALL_LAYERS]}
    config.rope_parameters = {**whole, **changed}
    if bases(type(config).from_dict(config.to_dict())) != new:
        raise ValueError(
            f"a {type(config).__name__} cannot keep the base {describe(new)}: a saved and loaded "
            "configuration would have another one"
        )


def describe(written: Bases) -> str:
    """Write bases on one line: ``theta=10000``, ``full_attention theta=1e6, ...``."""
    return ", ".join(f"{key} theta={write_value(base)}".lstrip() for key, base in written.items())


def frequency_name(label: str, *frequencies: bytes) -> str:
    """Return a name for messages; equal names mean equal frequencies."""
    digest = hashlib.sha256(b"".join(frequencies)).hexdigest()
    return f"{label} (frequencies {digest[:12]})"
