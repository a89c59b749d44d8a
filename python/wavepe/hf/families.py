"""The model families that can be patched, and the names of the parts that a patch changes.

All of them are decoders that call transformers' attention interface and that have a rotary module.
A record leaves windows, softcaps and sinks out: transformers passes them to the attention function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import Phi3ForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..common.spec import TYPE_PREFIX
from . import pairs
from .pairs import Layout
from .rope_config import EACH_BASE, Slot, has_layer_types, layer_bases

# On these devices `ops.attention` is one kernel. On others PyTorch's attention is faster for layers
# whose encoding leaves the scores alone.
FUSED_ON = ("cpu",)
ATTENTION = "wavepe"  # transformers knows the attention and its mask by this name

# The names that the argument for the cache may have: from transformers 5.24 on, before, and in
# layers of GPT-NeoX. A stock model of 5.24 takes the old name, too, and warns.
CACHE_NAMES = ("cache", "past_key_values", "layer_past")


@dataclass(frozen=True)
class Family:
    """A family: its model_type, and what differs from a Llama."""

    model_type: str
    unchanged: str = ""  # the features that a patch leaves as they are, for users
    encoding: str = "rope"  # of the stock models
    rotates: Callable[[Any], bool] | None = None  # whether an attention layer does; None: all do
    layout: Layout = pairs.LLAMA
    is_partial: bool = False  # whether it can rotate a part of each head
    attention: str = "self_attn"  # the attribute of a decoder layer that is its attention
    # From a configuration, the factor by which the model multiplies the embeddings. It does not
    # count where the embedding multiplies by itself (`embed_scale`).
    embedding_scale: Callable[[Any], float] | None = None
    drops_arguments: bool = False  # decoder layers drop those that they do not know
    recomputes_keys: bool = False  # `generate` computes all keys again after the original length
    is_recent: bool = False  # before transformers 5.24 it is missing, or built otherwise

    @property
    def is_rotary(self) -> bool:
        """Whether the stock models rotate."""
        return self.encoding == "rope"


PART = "a bare rope rotates the same part of each head as the model"
NORMS = "norms of queries and keys"

_FAMILIES = (
    Family("llama"),
    Family("mistral", "the sliding window"),
    Family("qwen2"),
    Family("qwen3", f"{NORMS}; the windows of its layer types"),
    Family("smollm3", "its layers without positions keep none", rotates=lambda x: bool(x.use_rope)),
    Family("gemma", "scaling of the embeddings", embedding_scale=lambda c: c.hidden_size**0.5),
    Family(
        "gemma2", "soft cap and scaling of the scores, a window in every second layer",
        embedding_scale=lambda c: c.hidden_size**0.5,
    ),
    Family("gemma3_text", "windows by layer type; a bare rope takes the base of each type"),
    Family("phi3", PART, is_partial=True, recomputes_keys=True),
    Family("olmo2", NORMS),
    Family("gpt_neox", PART, is_partial=True, attention="attention"),
    Family("stablelm", PART, is_partial=True, drops_arguments=True, is_recent=True),
    Family("seed_oss"),
    Family(
        "granite", "scaling of the scores and of the embeddings",
        embedding_scale=lambda c: c.embedding_multiplier,
    ),
    Family(
        "granite_swa", "scalings as in granite; attention sinks, windows, a base for each layer",
        embedding_scale=lambda c: c.embedding_multiplier, is_recent=True,
    ),
    Family("mixtral", "the sliding window; the experts"),
    Family("qwen2_moe", "the experts"),
    Family("qwen3_moe", f"{NORMS}; the experts"),
    Family("olmoe", f"{NORMS}; the experts"),
    Family(
        "olmo3", f"{NORMS}; windows by layer type; a bare rope takes each type's base",
        is_recent=True,
    ),
    Family(
        "ministral3", "the scaling of queries by the logarithm of their position", is_recent=True
    ),
    Family(
        "exaone4", f"{NORMS}; windows; its layers without positions keep none",
        rotates=lambda x: x.sliding_window is None or x.is_sliding,
    ),
    Family(
        "glm4", f"the pairs (2i, 2i+1); {PART}",
        layout=pairs.GLM, is_partial=True, is_recent=True,
    ),
    Family(
        "cohere2", "the pairs (2i, 2i+1); windows; its layers without positions keep none",
        rotates=lambda x: x.sliding_window is not None, layout=pairs.COHERE, is_recent=True,
    ),
    Family(
        "gemma4_text", "head sizes, windows and rope by layer type; layers that reuse others' keys",
        is_recent=True,
    ),
    Family(
        "gpt_oss", "attention sinks, a window in every second layer; the experts",
        layout=pairs.GPT_OSS, is_recent=True,
    ),
    Family(
        "inkling_text",
        "windows, short convolutions, the scaling of queries; its own bare `relative`",
        encoding="relative", is_recent=True,
    ),
    Family(
        "inkling2_text",
        "as in inkling_text; clips, and attention sinks of each token",
        encoding="relative", is_recent=True,
    ),
)  # fmt: skip
_HAS_RECENT = "granite_swa" in CONFIG_MAPPING  # it came with 5.24
FAMILIES = {
    family.model_type: family for family in _FAMILIES if _HAS_RECENT or not family.is_recent
}
# Encoders, decoders or both, which keep their own relative bias: t5.py.
T5_TYPES = ("t5", "mt5", "umt5")
_BY_TYPE = {**FAMILIES, **{TYPE_PREFIX + kind: family for kind, family in FAMILIES.items()}}


def of(config: Any) -> Family:
    """Return the family of a configuration, also of a wavepe_<family>."""
    return _BY_TYPE[config.model_type]


def supported_families() -> dict[str, str]:
    """Return the model types that `patch` takes, and what a patch leaves unchanged in each.

    The list depends on the installed version of transformers.

    Returns
    -------
    dict of str to str
        model_type of transformers, such as "llama", -> the features of the family that stay as they
        are; an empty text if only the weights do.
    """
    supported = {kind: family.unchanged for kind, family in FAMILIES.items()}
    unchanged = "its relative bias: `t5` is the only encoding, and computes it in less memory"
    return supported | (dict.fromkeys(T5_TYPES, unchanged) if _HAS_RECENT else {})


def need_module(model: Any) -> None:
    """Raise TypeError if `model` is not a module, but the name of a model, say."""
    if not isinstance(model, nn.Module):
        name = repr(model) if isinstance(model, str) else "folder"
        raise TypeError(
            f"wavepe.hf needs a model, got {type(model).__name__}: load it first, with "
            f"AutoModelForCausalLM.from_pretrained({name})"
        )


def decoder(model: nn.Module) -> Any:
    """Return the base model of `model`; TypeError unless it is of a family and built like it."""
    need_module(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"wavepe.hf needs a model of transformers, got {type(model).__name__}: if it is a "
            "wrapper, give the model inside it"
        )
    supported = f"wavepe.hf supports the families {', '.join(FAMILIES)} of transformers"
    base, config = model.base_model, model.config
    name = f"{type(model).__name__} (model_type {config.model_type!r})"
    if isinstance(base, PreTrainedModel) and base is not model:
        config = base.config
    if config.model_type not in _BY_TYPE:
        raise TypeError(f"got a {name}, whose family is not supported: {supported}")
    if getattr(config, "use_bidirectional_attention", False) in (True, "all"):
        raise TypeError(f"this {name} attends in both directions; {supported}, if they are causal")
    try:
        layers = attentions(base)
    except AttributeError:
        layers = []
    has_module = hasattr(base, "rotary_emb") or not of(config).is_rotary
    if not layers or not has_module or not all(map(calls_interface, layers)):
        raise TypeError(
            f"this {name} is not built like its family: its attention layers must call "
            "transformers' attention interface, and its rotary_emb must compute the angles; "
            + supported
        )
    return base


def calls_interface(layer: nn.Module) -> bool:
    """Return whether a layer's forward names the table of transformers' attention interface."""
    code = getattr(inspect.unwrap(type(layer).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def is_stock(config: Any) -> bool:
    """Return whether the class of a configuration is transformers' own for its model_type."""
    kind = config.model_type
    return kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] is type(config)


def attentions(base: Any) -> list[Any]:
    """Return the attention layer of each decoder layer."""
    name = of(base.config).attention
    return [getattr(layer, name) for layer in base.layers]


def slot(config: Any, layer: Any, index: int) -> Slot | None:
    """Return the slot that rotates an attention layer; None if the family does not rotate it."""
    family = of(config)
    if not family.is_rotary or not (family.rotates is None or family.rotates(layer)):
        return None
    if has_layer_types(config):
        return Slot(layer_type=config.layer_types[index])
    if bases := layer_bases(config):
        base = config.layer_rope_theta[index]
        return Slot(f"{EACH_BASE}{bases.index(base)}") if base else None
    return Slot()


def rotated_dims(config: Any, stock: nn.Module, slot: Slot, head_dim: int) -> int:
    """Return the number of dims that the family rotates: the first ones of each head."""
    if not of(config).is_partial:
        return head_dim
    name = "inv_freq" if slot.layer_type is None else f"{slot.layer_type}_inv_freq"
    return 2 * getattr(stock, name).numel()


class Size(NamedTuple):
    """The heads of a layer: the dims of each, and the number for queries."""

    head_dim: int
    heads: int


def sizes(base: Any) -> list[Size]:
    """Return the heads of each layer."""
    heads = base.config.num_attention_heads
    return [
        Size(x.head_dim if hasattr(x, "head_dim") else x.head_size, getattr(x, "num_heads", heads))
        for x in attentions(base)
    ]


def keys_from(base: Any) -> list[int | None]:
    """Return, for each layer, the layer whose keys it reuses (Gemma 4), or None."""
    sources: list[int | None] = []
    stored_by: dict[str, int] = {}
    for index, layer in enumerate(attentions(base)):
        sources.append(stored_by.get(layer.layer_type) if reuses_keys(layer) else None)
        if stores_keys(layer):
            stored_by[layer.layer_type] = index
    return sources


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
    looks_up = getattr(base, "hidden_size_per_layer_input", 0)
    if not looks_up or kwargs.get("per_layer_inputs") is not None:
        return {}
    inputs = base.get_per_layer_inputs(kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    return {"per_layer_inputs": inputs}


def embedding_scale(base: Any) -> float:
    """Return the factor by which the base model multiplies the embeddings that it looks up."""
    scale = of(base.config).embedding_scale
    if scale is None or hasattr(base.get_input_embeddings(), "embed_scale"):
        return 1.0
    return float(scale(base.config))


# transformers 5.0 to 5.18, at least, then forgets the tokens as well as the keys.
FORGETS_TOKENS = (
    "next_sequence_length"
    not in inspect.unwrap(Phi3ForCausalLM.prepare_inputs_for_generation).__code__.co_consts
)


def recomputes_keys_after(config: Any) -> int:
    """Return the length after which `generate` computes all keys again, as Phi-3 does where its
    frequencies change; 0 if it never does."""
    return config.original_max_position_embeddings if of(config).recomputes_keys else 0


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional arguments of a module's forward."""
    forward = inspect.unwrap(type(module).forward)
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
