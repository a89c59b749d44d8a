"""The model families that can be patched, and the names of the parts that a patch changes.

All of them are decoders that call transformers' attention interface and that have a rotary module.
They differ in names, in the pairs and the number of rotated dims, in layers without positions or
keys of their own, and in windows, softcaps and sinks, which transformers passes to the attention
function.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import Phi3ForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from . import pairs
from .pairs import Layout
from .rope_config import EACH_BASE, Slot, has_layer_types, layer_bases

# On these devices `ops.attention` is one kernel. On others PyTorch's attention is faster for layers
# whose encoding leaves the scores alone.
FUSED_ON = ("cpu",)
ATTENTION = "wavepe"  # transformers knows the attention and its mask by this name
TYPE_PREFIX = "wavepe_"  # the model types whose checkpoints keep the encoding begin so

# The names that the argument for the cache may have: from transformers 5.24 on, before, and in
# layers of GPT-NeoX before. A stock model of 5.24 takes the old name, too, and warns.
CACHE_NAMES = ("cache", "past_key_values", "layer_past")

# model_type -> what a patch does not change. Each family has tests.
SUPPORTED = {
    "llama": "",
    "mistral": "the sliding window",
    "qwen2": "",
    "qwen3": "norms of queries and keys; the windows of its layer types",
    "smollm3": "its layers without positions keep none",
    "gemma2": "soft cap and scaling of the scores, a window in every second layer",
    "gemma3_text": "windows by layer type; a bare rope takes the base of each type",
    "phi3": "a bare rope rotates the same part of each head as the model",
    "olmo2": "norms of queries and keys",
    "gpt_neox": "a bare rope rotates the same part of each head as the model",
    "granite": "scaling of the scores and of the embeddings",
    "granite_swa": "scalings as in granite; attention sinks, windows, a base for each layer",
    "mixtral": "the sliding window; the experts",
    "qwen2_moe": "the experts",
    "qwen3_moe": "norms of queries and keys; the experts",
    "olmoe": "norms of queries and keys; the experts",
    "olmo3": "norms of queries and keys; windows by layer type; a bare rope takes each type's base",
    "ministral3": "the scaling of queries by the logarithm of their position",
    "glm4": "the pairs (2i, 2i+1); a bare rope rotates the same part of each head as the model",
    "cohere2": "the pairs (2i, 2i+1); windows; its layers without positions keep none",
    "gemma4_text": "head sizes, windows and rope by layer type; layers that reuse others' keys",
    "gpt_oss": "attention sinks, a window in every second layer; the experts",
    "inkling_text": "windows, short convolutions, the scaling of queries; its own bare `relative`",
}
_NEW = (
    "granite_swa", "olmo3", "ministral3", "glm4", "cohere2", "gemma4_text", "gpt_oss",
    "inkling_text",
)  # fmt: skip
if _NEW[0] not in CONFIG_MAPPING:  # before 5.24 they are missing, or built otherwise
    for _kind in _NEW:
        del SUPPORTED[_kind]
# Families that can rotate a part of a head's dims.
PARTIAL = ("phi3", "gpt_neox", "glm4")
# Families whose angles have another form than Llama's, or that rotate other pairs.
LAYOUT_OF = {"glm4": pairs.GLM, "cohere2": pairs.COHERE, "gpt_oss": pairs.GPT_OSS}


def supported_families() -> dict[str, str]:
    """Return the model types that `patch` takes, and what a patch leaves unchanged in each.

    The list depends on the installed version of transformers.

    Returns
    -------
    dict of str to str
        model_type of transformers, such as "llama", -> the features of the family that stay as they
        are; an empty text if there are none beyond the weights.

    Examples
    --------
    >>> import wavepe.hf
    >>> wavepe.hf.supported_families()["mistral"]
    'the sliding window'
    """
    return dict(SUPPORTED)


def need_module(model: Any) -> None:
    """Raise TypeError if `model` is no module, such as the name of a model."""
    if not isinstance(model, nn.Module):
        name = repr(model) if isinstance(model, str) else "folder"
        raise TypeError(
            f"wavepe.hf needs a model, got {type(model).__name__}: load it first, with "
            f"AutoModelForCausalLM.from_pretrained({name})"
        )


def decoder(model: nn.Module) -> Any:
    """Return the base model of `model`.

    Raises
    ------
    TypeError
        `model` is of no family that can be patched, or not built like its family.
    """
    need_module(model)
    if not isinstance(model, PreTrainedModel):
        modules = model.named_modules()
        inside = [name for name, part in modules if isinstance(part, PreTrainedModel)]
        advice = "it contains no such model"
        if inside:
            advice = f"pass the model inside it, model.{inside[0]}"
        raise TypeError(
            f"wavepe.hf needs a model of transformers, got {type(model).__name__}: {advice}"
        )
    supported = f"wavepe.hf supports the families {', '.join(SUPPORTED)} of transformers"
    base, config = model.base_model, model.config
    name = f"{type(model).__name__} (model_type {config.model_type!r})"
    if isinstance(base, PreTrainedModel) and base is not model:
        config = base.config
    kind = family(config)
    if kind not in SUPPORTED:
        raise TypeError(f"got a {name}, whose family is not supported: {supported}")
    if getattr(config, "use_bidirectional_attention", False) in (True, "all"):
        raise TypeError(f"this {name} attends in both directions; {supported}, if they are causal")
    try:
        found = attentions(base)
    except AttributeError:
        found = []
    has_module = hasattr(base, "rotary_emb") or not is_rotary(config)
    calls = ["ALL_ATTENTION_FUNCTIONS" in names_in_forward(layer) for layer in found]
    if not found or not all(calls) or not has_module:
        raise TypeError(
            f"this {name} is not built like its family: its attention layers must call "
            "transformers' attention interface, and its rotary_emb must compute the angles; "
            + supported
        )
    return base


def family(config: Any) -> str:
    """Return the model_type in transformers: "llama" for a wavepe_llama."""
    return config.model_type.removeprefix(TYPE_PREFIX)


def stock_encoding(kind: str) -> str:
    """Return the encoding that the stock models of a family have."""
    return "relative" if kind == "inkling_text" else "rope"


def is_rotary(config: Any) -> bool:
    """Return whether the stock models of a family rotate."""
    return stock_encoding(family(config)) == "rope"


def names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """Return the names of globals and attributes in the code of the class's forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def is_stock(config: Any) -> bool:
    """Return whether the class of a configuration is transformers' own for its model_type."""
    kind = config.model_type
    return kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] is type(config)


# ---------------------------------------------------------------- its parts


def attentions(base: Any) -> list[Any]:
    """Return the attention layer of each decoder layer."""
    name = "attention" if family(base.config) == "gpt_neox" else "self_attn"
    return [getattr(layer, name) for layer in base.layers]


def slots(base: Any) -> list[Slot | None]:
    """Return the slot that rotates each layer; None for layers that the family does not rotate."""
    config, layers = base.config, attentions(base)
    if has_layer_types(config):
        return [Slot("rotary_emb", kind) for kind in config.layer_types[: len(layers)]]
    if family(config) == "granite_swa":
        bases = layer_bases(config)
        return [
            Slot(f"{EACH_BASE}{bases.index(theta)}") if theta else None
            for theta in config.layer_rope_theta[: len(layers)]
        ]
    return [Slot() if _rotates(layer) else None for layer in layers]


def _rotates(layer: Any) -> bool:
    """Return whether a layer has positions: Cohere 2 rotates those with a window alone."""
    if family(layer.config) == "cohere2":
        return layer.sliding_window is not None
    return is_rotary(layer.config) and getattr(layer, "use_rope", True)


def gets_no_angles(layer: Any) -> bool:
    """Return whether its model gives this layer no angles: Granite SWA where the base is 0."""
    config = layer.config
    if not is_rotary(config):
        return True
    return family(config) == "granite_swa" and not config.layer_rope_theta[layer.layer_idx]


def layout(config: Any) -> Layout:
    """Return the form of the family's angles."""
    return LAYOUT_OF.get(family(config), pairs.LLAMA)


def rotated_dims(config: Any, stock: nn.Module, slot: Slot, head_dim: int) -> int:
    """Return the number of dims that the family rotates: the first ones of each head."""
    if family(config) not in PARTIAL:
        return head_dim
    name = "inv_freq" if slot.layer_type is None else f"{slot.layer_type}_inv_freq"
    return 2 * getattr(stock, name).numel()


def head_dims(base: Any) -> list[int]:
    """Return the number of dims of a head, in each layer."""
    layers = attentions(base)
    return [layer.head_dim if hasattr(layer, "head_dim") else layer.head_size for layer in layers]


def head_counts(base: Any) -> list[int]:
    """Return the number of query heads, in each layer."""
    layers, heads = attentions(base), base.config.num_attention_heads
    return [getattr(layer, "num_heads", heads) for layer in layers]


def keys_from(base: Any) -> list[int | None]:
    """Return, for each layer, the layer whose keys it reuses (Gemma 4), or None."""
    found: list[int | None] = []
    stores: dict[str, int] = {}
    for index, layer in enumerate(attentions(base)):
        found.append(stores.get(layer.layer_type) if reuses_keys(layer) else None)
        if stores_keys(layer):
            stores[layer.layer_type] = index
    return found


def reuses_keys(layer: Any) -> bool:
    """Return whether an attention layer has no keys of its own."""
    return getattr(layer, "is_kv_shared_layer", False)


def stores_keys(layer: Any) -> bool:
    """Return whether later layers may reuse the keys of an attention layer."""
    return getattr(layer, "store_full_length_kv", False)


def inputs_by_layer(base: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of each layer that a base model looks up by its tokens (Gemma 4), if any.

    It cannot look them up by embeddings that were changed.
    """
    given = kwargs.get("per_layer_inputs")
    if given is not None or not getattr(base, "hidden_size_per_layer_input", 0):
        return {}
    found = base.get_per_layer_inputs(kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    return {"per_layer_inputs": found}


def embedding_scale(base: Any) -> float:
    """Return the factor by which the base model multiplies the embeddings that it looks up."""
    config = base.config
    if family(config) in ("granite", "granite_swa"):
        return float(config.embedding_multiplier)
    scaled = hasattr(base.get_input_embeddings(), "embed_scale")
    if family(config) == "gemma2" and not scaled:
        return float(config.hidden_size) ** 0.5
    return 1.0


# transformers 5.0 to 5.18, at least, then forgets the tokens as well as the keys.
FORGETS_TOKENS = (
    "next_sequence_length"
    not in inspect.unwrap(Phi3ForCausalLM.prepare_inputs_for_generation).__code__.co_consts
)


def recomputes_keys_after(config: Any) -> int:
    """Return the length after which `generate` computes all keys again; 0 if it never does.

    Phi-3 does so, because its frequencies change at that length.
    """
    if family(config) != "phi3":
        return 0
    return config.original_max_position_embeddings


def is_cache(value: Any) -> bool:
    """Return whether this is a cache that attention layers update; a paged one is not."""
    return hasattr(value, "get_seq_length")  # some models have their own cache class


def cache_in(kwargs: Mapping[str, Any]) -> Any:
    """Return the cache among the keyword arguments of a call, or None."""
    return next(filter(is_cache, map(kwargs.get, CACHE_NAMES)), None)


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional arguments of a module's forward."""
    forward = inspect.unwrap(type(module).forward)
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
