"""`set_theta`: another base for the rotary embedding of a live model.

Setting the base in the configuration does not change a model in memory. And the keys in a cache
keep the old rotation. `set_theta` changes the rotary modules and guards the caches as well.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..common import checks
from ..encodings import encoding as read_encoding
from . import rope_config
from .cache_guard import CacheGuard
from .families import attentions, need_module
from .install import installed, replace_configs
from .layers import is_hybrid, spec_text
from .rope_config import ALL_LAYERS, Bases, frequency_name
from .rotary import RopeRotation, Rotary
from .rotary_check import check_rotary, frequencies, has_only_a_base, rebuild

M = TypeVar("M", bound=nn.Module)
GUARD = "_wavepe_guard"  # attribute of the module that uses a stock rotary module


def set_theta(model: M, theta: float | Mapping[str, float]) -> M:
    """Change the base (theta) of the rotary embedding of a live model.

    With a larger base at inference, some models can read texts that are longer than those of their
    training. Rope type and scaling stay. The model then equals one that is built from the new
    configuration: compiled forms use the new base, and `save_pretrained` keeps it. The model
    refuses a cache whose keys were rotated with another base.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal model with a rotary embedding, of any family, or a wrapper of one. Its weights do
        not change. Give the outermost model, the one that will be saved. A patched model with a
        "rope", or a wavepe_<family>, keeps the base in its spec: as `inference_theta` if that is a
        number, else as `theta`.
    theta : float or dict
        The base, above 0. If the layer types of a model have different bases (Gemma 3:
        "full_attention" and "sliding_attention"), a dict with those to change.

    Returns
    -------
    transformers.PreTrainedModel
        `model` itself. It gets a copy of its configuration, because other models may share the
        old one.

    Raises
    ------
    TypeError
        `model` is not a module, or `theta` is not a number.
    ValueError
        The base is not finite and above 0, or gives no finite frequencies; `theta` is a number, but
        the layer types have different bases, or a dict that does not fit them; parameters are on
        the meta device; the model has no rotary embedding; or its configuration cannot hold the
        base. The model is unchanged.

    References
    ----------
    Oka et al., "Frequency Bands in RoPE", ICLR 2026.

    Examples
    --------
    >>> import wavepe.hf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    ...     num_attention_heads=2))
    >>> model = wavepe.hf.set_theta(model, 500000.0)
    >>> round(model.model.rotary_emb.inv_freq[-1].item(), 9)
    1.0313e-05
    """
    need_module(model)
    places = _rotary_places(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name} is on the meta device: call set_theta first, then offload or "
                "dispatch the model"
            )
    stock = [place for place in places if not isinstance(place.module, RopeRotation)]
    for place in stock:
        # A base that is only in the configuration, or only in memory, is mended here.
        if not has_only_a_base(place.module, place.module.config):
            check_rotary(place.module, place.module.config)
    old = places[0].module.config
    # Other models may share the configurations. deepcopy keeps the old ones beside their copies, so
    # no id is used again.
    copies: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            copy.deepcopy(module.config, copies)
    new = copies[id(old)]
    _write_theta(places[0].module, new, theta)
    rebuilt = [_rebuild(place.module, new) for place in places]
    names = list(map(_cache_name, stock))
    replace_configs(model, copies)
    _renew_records(model, copies)
    for place, module in zip(places, rebuilt, strict=True):
        _copy_state(place.module, module)
    _guard_caches(stock, names)  # a patched model has a guard already
    return model


class _Place(NamedTuple):
    """A rotary module, and its owner: the module whose forward uses it and gets the cache."""

    module: Any
    owner: nn.Module


def _rotary_places(model: nn.Module) -> list[_Place]:
    """Find the rotary modules of the text layers; ValueError if their base cannot be set."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if any(getattr(part.config, "layer_rope_theta", None) for part in models):
        raise ValueError(
            f"set_theta cannot set the base of a {type(model).__name__}, which has one for each "
            "layer: build it with another layer_rope_theta, or patch it with rope:theta=..."
        )
    places = list(_find_places(model, None))
    configs = {id(p.module.config): p.module.config for p in places}
    if models and len(configs) > 1:  # a text model with parts for images and sound
        of_text = models[0].config.get_text_config(decoder=True)
        configs = {key: config for key, config in configs.items() if config is of_text}
    if not configs:
        raise ValueError(
            f"this {type(model).__name__} has no rotary embedding whose base can be set: set_theta "
            "needs a causal model of transformers with a rotary module that reads its base from "
            "the configuration"
        )
    config = next(iter(configs.values()))
    is_coder = any(getattr(part.config, "is_encoder_decoder", False) for part in models)
    if is_coder or all(part.config is not config for part in models):
        raise ValueError(
            f"set_theta cannot set the base of a {type(model).__name__}: the base must be in the "
            "configuration of one causal model"
        )
    return [place for place in places if place.module.config is config]


def _find_places(module: nn.Module, owner: nn.Module | None) -> Iterator[_Place]:
    """Find the rotary modules in use; the stock modules that a `Rotary` keeps are not."""
    owner_or_self: Any = module if owner is None else owner
    if isinstance(module, Rotary):
        rotations = [part for part in module.modules() if isinstance(part, RopeRotation)]
        encodings = {str(rotation.encoding) for rotation in rotations}
        spec = owner_or_self.config.position_encoding
        if len(encodings) != 1 or rotations[0].encoding.in_scores or is_hybrid(spec):
            raise ValueError(
                f"this model has the position encoding {spec_text(spec)!r}, and set_theta "
                "needs one rope for all layers, which does not act in the scores, too: call "
                "wavepe.hf.unpatch(model), and patch it with the theta that each layer should have"
            )
        yield from (_Place(rotation, owner_or_self) for rotation in rotations)
    elif (
        hasattr(module, "rope_type")
        and hasattr(module, "config")
        and any(key.endswith("inv_freq") for key, _ in module.named_buffers(recurse=False))
    ):
        yield _Place(module, owner_or_self)
    else:
        if not isinstance(module, nn.ModuleDict | nn.ModuleList):  # these two have no forward
            owner = module
        for child in module.children():
            yield from _find_places(child, owner)


def _write_theta(rotary: Any, config: Any, theta: float | Mapping[str, float]) -> None:
    """Write the base into `config`; if the model is patched, into its spec."""
    if not isinstance(rotary, RopeRotation):
        rope_config.write_bases(config, _new_bases(theta, rope_config.bases(config)))
        return
    encoding: Any = rotary.encoding
    key = "theta" if encoding.inference_theta in (None, "scaled") else "inference_theta"
    base = _new_bases(theta, {ALL_LAYERS: getattr(encoding, key)})[ALL_LAYERS]
    if base != getattr(encoding, key):  # else the spec stays short
        changed = dataclasses.replace(encoding, **{key: base})
        spec = read_encoding(config.position_encoding)
        config.position_encoding = str(spec.with_parts(lambda x: changed if x.rotates else x))


def _new_bases(theta: float | Mapping[str, float], present: Bases) -> Bases:
    """Return the new base of every layer type."""
    now = rope_config.describe(present)
    if not isinstance(theta, Mapping):
        base = checks.positive("theta", theta)
        if len(set(present.values())) > 1:
            raise ValueError(
                f"the layer types of this model have different bases, {now}: give a dict with "
                f"those to change, got {theta!r}"
            )
        return dict.fromkeys(present, base)
    if ALL_LAYERS in present:
        raise ValueError(
            f"this model has one base for all layers, {now}: give a number, got {dict(theta)!r}"
        )
    unknown = [key for key in theta if key not in present]
    if unknown or not theta:
        raise ValueError(
            f"theta must be a dict with some of the bases of this model, {now}; got {dict(theta)!r}"
        )
    return present | {key: checks.positive(f"theta[{key!r}]", theta[key]) for key in theta}


def _renew_records(model: nn.Module, copies: dict[int, Any]) -> None:
    """Let a patched model have the copies of its configurations, with their encoding."""
    for module in model.modules():
        if (record := installed(module)) is not None and id(record.config) in copies:
            record.config = copies[id(record.config)]
            record.spec = record.config.position_encoding
            for layer in attentions(module):
                layer.wavepe.rope = layer.wavepe.rope and {}  # its base is in the spec
            record.live.note(record.config)


def _rebuild(module: Any, config: Any) -> Any:
    """Build a rotary module anew with the configuration `config`."""
    try:
        if isinstance(module, RopeRotation):
            rope: Any = read_encoding(config.position_encoding).rotary
            with torch.inference_mode(False), torch.device("cpu"):
                built: Any = RopeRotation(config, module.slot, module.dims, rope)
                built.fix(module.rotation.length)
                return built
        built = rebuild(module, config)
    except ArithmeticError as error:  # a base of 1 has no logarithm to divide by
        raise ValueError(f"theta must give finite frequencies: {error}") from error
    if not all(x.isfinite().all() for x in frequencies(built)):
        raise ValueError("theta must give finite frequencies, and this one does not")
    return built


def _copy_state(module: Any, rebuilt: Any) -> None:
    """Copy the state of a new module to the live one, which keeps its hooks and wrappers."""
    for key, value in {**vars(rebuilt), **dict(rebuilt.named_buffers(recurse=False))}.items():
        if key.startswith("_") or key == "training":
            continue
        live = getattr(module, key, None)
        if isinstance(value, Tensor) and isinstance(live, Tensor):
            value = value.to(live.device, live.dtype)
        setattr(module, key, value)
    # A forward pass over a long sequence may have left these.
    for key in [key for key in vars(module) if key not in vars(rebuilt)]:
        if key.endswith(("long_inv_freq", "max_seq_len_cached")):
            delattr(module, key)


def _guard_caches(places: list[_Place], names: list[str]) -> None:
    """Let owners of stock rotary modules refuse keys of other frequencies than those of `names`."""
    added = False
    for owner in {id(place.owner): place.owner for place in places}.values():
        indices = [i for i, place in enumerate(places) if place.owner is owner]
        guard = owner.__dict__.get(GUARD)
        if guard is None:
            guard = owner.__dict__[GUARD] = CacheGuard("; ".join(names[i] for i in indices))
            guard.attach(owner)
            added = True
        guard.current = "; ".join(_cache_name(places[i]) for i in indices)
    if added and "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compiled code would not call the new hooks


def _cache_name(place: _Place) -> str:
    """Name the frequencies of a stock rotary module."""
    values = [x.double().cpu().numpy().tobytes() for x in frequencies(place.module)]
    return frequency_name(rope_config.describe(rope_config.bases(place.module.config)), *values)
