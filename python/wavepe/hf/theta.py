"""Another base for the rotary embedding of a live model, for inference at other lengths.

Setting the field of the configuration has no effect on a model that is in memory, and keys in a
cache keep the old rotation: `set_theta` does all that has to be done.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import _checks
from ..encodings import encoding as read_encoding
from . import rope_config
from .cache_guard import CacheGuard, named
from .layers import text
from .rope_config import ALL_LAYERS, Bases
from .rotary import RopeRotation, Rotary

M = TypeVar("M", bound=nn.Module)
GUARD = "_wavepe_guard"  # of the module that uses a stock rotary module


def set_theta(model: M, theta: float | Mapping[str, float]) -> M:
    """Change the base of the rotary embedding of a live model; type and scaling stay.

    The model is then what one built from the new configuration would be: its compiled forms follow,
    and `save_pretrained` keeps the base. It refuses a cache whose keys were rotated with another
    base.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal model with rotary embedding, or a wrapper of one; its weights are untouched. Pass
        the outermost model, the one that will be saved. A model that `patch` gave a "rope", or a
        wavepe_<family>, keeps the base in its spec: as `inference_theta` where that is a number,
        else as `theta`.
    theta : float or dict
        The base, above 0. A model that rotates its layer types with different bases (Gemma 3:
        "full_attention" and "sliding_attention") takes a dict of those to be changed.

    Returns
    -------
    The model. Its configuration is a copy: other models may share the old one.

    Raises
    ------
    TypeError
        Not a model, or `theta` is not a number.
    ValueError
        A base that is not finite and above 0, or gives no finite frequencies; a number for a model
        with different bases; parameters on the meta device; a model without rotary embedding, or
        whose configuration cannot hold the base. The model is as it was.

    Examples
    --------
    >>> import wavepe.hf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    ...     num_attention_heads=2))
    >>> model = wavepe.hf.set_theta(model, 500000.0)
    >>> round(model.model.rotary_emb.inv_freq[-1].item(), 9)
    4.543e-06
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"set_theta needs a model of transformers, got {type(model).__name__}")
    places = _rotating(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name} is on the meta device: set_theta first, then offload or "
                "dispatch the model"
            )
    old = places[0].module.config
    copies = _ConfigCopies(model)
    new = copies.of(old)
    _write_theta(places[0].module, new, theta)
    fresh = [_rebuilt(place, new) for place in places]
    if new.to_dict() == old.to_dict() and all(map(_same, places, fresh)):
        return model
    # A patched model has its guard already.
    stock = [place for place in places if not isinstance(place.module, RopeRotation)]
    before = [_name(place) for place in stock]
    copies.replace(model)
    for place, made in zip(places, fresh, strict=True):
        _take_over(place.module, made)
    _guard_caches(stock, before)
    return model


# ---------------------------------------------------------------- what rotates


class _Place(NamedTuple):
    """A rotary module, and the module whose forward uses it and is given the cache."""

    name: str
    module: Any
    owner: nn.Module

    @property
    def local(self) -> bool:
        """Return whether this is Gemma 3's module for windows, before transformers 5."""
        return self.name.endswith("rotary_emb_local")


def _rotating(model: nn.Module) -> list[_Place]:
    """Find the rotary modules of the text layers; ValueError where none has a base to set."""
    found = list(_all_rotating(model, "", None))
    encodings = {p.module.encoding for p in found if isinstance(p.module, RopeRotation)}
    if len(encodings) > 1:
        raise ValueError(
            f"the layers of this model have different encodings, {', '.join(map(str, encodings))}: "
            "wavepe.hf.unpatch(model), and patch it with the theta that each should have"
        )
    models = list(_models(model))
    configs = {id(p.module.config): p.module.config for p in found if not p.local}
    if models and len(configs) > 1:  # a text model with parts for pictures and sound
        of_text = models[0].config.get_text_config(decoder=True)
        configs = {key: config for key, config in configs.items() if config is of_text}
    if not configs:
        raise ValueError(
            f"set_theta finds no rotary embedding in this {type(model).__name__}: it needs a "
            "causal model of transformers with a rotary module that reads its base from the "
            "configuration"
        )
    key, config = next(iter(configs.items()))
    coder = any(getattr(part.config, "is_encoder_decoder", False) for part in models)
    if coder or all(id(part.config) != key for part in models):
        raise ValueError(
            f"set_theta cannot set the base of a {type(model).__name__}: "
            "it is not in the configuration of one causal model"
        )
    return [place for place in found if place.local or place.module.config is config]


def _all_rotating(module: nn.Module, name: str, owner: nn.Module | None) -> Iterator[_Place]:
    """Find rotary modules, but for the stock module that one of ours keeps for the way back."""
    owner_or_self = module if owner is None else owner
    if isinstance(module, Rotary):
        for rotation in _rotated(module):
            yield _Place(name, rotation, owner_or_self)
        return
    if (
        hasattr(module, "rope_type")
        and hasattr(module, "config")
        and any(key.endswith("inv_freq") for key, _ in module.named_buffers(recurse=False))
    ):
        yield _Place(name, module, owner_or_self)
        return
    if not isinstance(module, nn.ModuleDict | nn.ModuleList):  # these have no forward
        owner = module
    for key, child in module.named_children():
        yield from _all_rotating(child, f"{name}.{key}", owner)


def _rotated(rotary: Rotary) -> list[RopeRotation]:
    """Return the rotations of a patched model; ValueError where theta is not one for all."""
    if not isinstance(rotary.spec, str):
        raise ValueError(
            f"this model has the position encodings {text(rotary.spec)!r}, by layer: unpatch it, "
            "and patch it with the theta that each should have"
        )
    found = [module for module in rotary.modules() if isinstance(module, RopeRotation)]
    if not found:
        raise ValueError(
            f"this model has the position encoding {rotary.spec!r}, which is not rotary: "
            "there is no theta to set"
        )
    return found


def _models(model: nn.Module) -> Iterator[PreTrainedModel]:
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


# ---------------------------------------------------------------- configurations


def _write_theta(rotary: Any, config: Any, theta: float | Mapping[str, float]) -> None:
    """Write the base into `config`: in its spec where the encoding is one of ours."""
    if not isinstance(rotary, RopeRotation):
        rope_config.write_bases(config, _wanted(theta, rope_config.bases(config)))
        return
    encoding: Any = rotary.encoding
    follows = encoding.inference_theta in (None, "scaled")
    key = "theta" if follows else "inference_theta"
    base = _wanted(theta, {ALL_LAYERS: getattr(encoding, key)})[ALL_LAYERS]
    if base != getattr(encoding, key):  # else the spec stays as short as it was
        config.position_encoding = str(dataclasses.replace(encoding, **{key: base}))


def _wanted(theta: float | Mapping[str, float], present: Bases) -> Bases:
    """Return the bases that the user asks for, all of them."""
    now = rope_config.describe(present)
    if not isinstance(theta, Mapping):
        base = _checks.positive("theta", theta)
        if len(set(present.values())) > 1:
            raise ValueError(
                f"the layer types of this model have different bases, {now}: give a dict of those "
                "to be changed"
            )
        return dict.fromkeys(present, base)
    if ALL_LAYERS in present:
        raise ValueError(
            f"this model has one base for all layers, {now}: give a number, got {dict(theta)!r}"
        )
    unknown = [key for key in theta if key not in present]
    if unknown or not theta:
        raise ValueError(f"the bases of this model are {now}; got {dict(theta)!r}")
    return present | {key: _checks.positive(f"theta[{key!r}]", theta[key]) for key in theta}


class _ConfigCopies:
    """Copies of a model's configurations: other models may share them, and not the base."""

    def __init__(self, model: nn.Module) -> None:
        self.memo: dict[int, Any] = {}
        self.held = {id(part.config): part.config for part in _models(model)}
        for config in self.held.values():
            copy.deepcopy(config, self.memo)

    def of(self, config: Any) -> Any:
        return self.memo[id(config)]

    def replace(self, model: nn.Module) -> None:
        """Let every part of the model hold the copies."""
        for module in model.modules():
            for key, value in vars(module).items():
                if id(value) in self.held:
                    setattr(module, key, self.of(value))
            if isinstance(module, Rotary):
                module.spec = module.config.position_encoding
            installed = vars(module).get("_wavepe")
            if installed is not None and id(installed.config) in self.held:
                installed.config = self.of(installed.config)
                installed.spec = installed.config.position_encoding


# ---------------------------------------------------------------- rotary modules


def _rebuilt(place: _Place, config: Any) -> Any:
    """Build the rotary module that a model of `config` would have."""
    module = place.module
    if place.local:
        config = rope_config.of_local_layers(config)
    given = {
        key: getattr(module, key)
        for key in inspect.signature(type(module).__init__).parameters
        if key not in ("self", "config", "device") and hasattr(module, key)
    }
    try:
        with torch.inference_mode(False), torch.device("cpu"):
            if isinstance(module, RopeRotation):
                encoding = read_encoding(config.position_encoding)
                rotation = RopeRotation(config, module.slot, module.dims, encoding)
                rotation.fix(module.rotation.length)
                return rotation
            made = type(module)(config=config, **given)
    except ArithmeticError as error:  # a base of 1 has no logarithm to divide by
        raise ValueError(f"this theta gives no frequencies: {error}") from error
    if not all(frequencies.isfinite().all() for frequencies in _frequencies(made)):
        raise ValueError("this theta gives no finite frequencies")
    return made


def _frequencies(module: Any) -> list[Tensor]:
    """Return the frequencies that do not depend on the sequence length."""
    if isinstance(module, RopeRotation):
        return [module.rotation.at(1, training).inv_freq for training in (True, False)]
    named = {**vars(module), **dict(module.named_buffers(recurse=False))}
    return [named[key] for key in sorted(named) if key.endswith("original_inv_freq")]


def _same(place: _Place, made: Any) -> bool:
    """Return whether the model rotates with these frequencies, whatever its configuration says."""
    pairs = zip(_frequencies(place.module), _frequencies(made), strict=True)
    return all(torch.equal(live.cpu(), new.to(live.dtype)) for live, new in pairs)


def _take_over(module: Any, made: Any) -> None:
    """Give the live module the state of a new one; hooks and wrappers of its own stay."""
    for key, value in {**vars(made), **dict(made.named_buffers(recurse=False))}.items():
        if key.startswith("_") or key == "training":
            continue
        live = getattr(module, key, None)
        if isinstance(value, Tensor) and isinstance(live, Tensor):
            value = value.to(live.device, live.dtype)
        setattr(module, key, value)
    # What a forward pass over a long sequence has left there.
    for key in [key for key in vars(module) if key not in vars(made)]:
        if key.endswith(("long_inv_freq", "max_seq_len_cached")):
            delattr(module, key)


# ---------------------------------------------------------------- caches


def _guard_caches(places: list[_Place], before: list[str]) -> None:
    """Let the modules that use stock rotary modules refuse keys of other frequencies.

    `before` names those of each place before the change.
    """
    added = False
    for owner in {id(place.owner): place.owner for place in places}.values():
        own = [i for i, place in enumerate(places) if place.owner is owner]
        guard = owner.__dict__.get(GUARD)
        if guard is None:
            guard = owner.__dict__[GUARD] = CacheGuard("; ".join(before[i] for i in own))
            guard.attach(owner)
            added = True
        guard.current = "; ".join(_name(places[i]) for i in own)
    if added and "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # what was compiled does not look for new hooks


def _name(place: _Place) -> str:
    """Name the frequencies of a stock rotary module."""
    held = [
        frequencies.double().cpu().numpy().tobytes() for frequencies in _frequencies(place.module)
    ]
    return named(rope_config.describe(rope_config.bases(place.module.config)), *held)
