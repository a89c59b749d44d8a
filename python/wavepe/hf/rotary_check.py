"""Compare a model in memory with its configuration: its rotary modules, and its layers.

A program may change a configuration after the model was built, or scale the frequencies in place.
Then masks, caches and files follow the configuration, and layers and rotations do not.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..arrays.rope_frequencies import ROPE_TYPES
from ..common.spec import TYPE_PREFIX
from . import families, rope_config
from .families import ATTENTION
from .layers import LayerEncodings, StoredSpec, spec_text

LIVE = "_wavepe_live"  # attribute of the configuration of a live model: a `Link`
NOT_COMPARED = {"attention_dropout", "layer_idx", "training"}  # attributes of a layer


def rebuild(module: Any, config: Any) -> Any:
    """Build a stock rotary module anew for `config`, of its slot (`rope_config.of_slot`)."""
    others = {
        key: getattr(module, key)
        for key in inspect.signature(type(module).__init__).parameters
        if key not in ("self", "config", "device") and hasattr(module, key)
    }
    with torch.inference_mode(False), torch.device("cpu"):
        return type(module)(config=config, **others)


def frequencies(module: Any, end: str = "original_inv_freq") -> list[Tensor]:
    """Return the frequencies whose names end so; by default those of any sequence length."""
    named = {**vars(module), **dict(module.named_buffers(recurse=False))}
    return [named[key] for key in sorted(named) if key.endswith(end)]


def _in_use(module: Any, config: Any) -> list[Tensor]:
    """Return all frequencies; those before scaling alone, where scaling follows the length."""
    known = [ROPE_TYPES[kind] for kind in rope_config.rope_types(config) if kind in ROPE_TYPES]
    follows = any(kind.follows_length for kind in known)
    return frequencies(module) if follows else frequencies(module, "inv_freq")


def has_only_a_base(module: Any, config: Any) -> bool:
    """Return whether the frequencies are those of some base, without any scaling."""
    for live in _in_use(module, config):
        x = live.detach().double().cpu()
        geometric = x[-1:] ** (torch.arange(len(x)) / max(len(x) - 1, 1))
        if x.isnan().any() or not torch.allclose(x, geometric, 16 * torch.finfo(live.dtype).eps, 0):
            return False
    return all(x == 1 for key, x in vars(module).items() if key.endswith("attention_scaling"))


def check_rotary(module: Any, config: Any) -> None:
    """Raise ValueError if a stock module does not rotate as configured, but for dynamic scaling."""
    lives = _in_use(module, config)
    if any(x.is_meta for x in lives):
        return
    if None in rope_config.bases(config).values():
        slowest = f"its slowest pairs turn by {float(lives[0][-1]):.6g}"
        raise _differs(f"{slowest} in memory, and {config.rope_parameters} has no rope_theta")
    fresh = rebuild(module, config)
    for live, new in zip(lives, _in_use(fresh, config), strict=True):
        live = live.detach().cpu()
        # A model may be cast to a narrow dtype, and its frequencies computed on a device.
        tolerance = 4 * torch.finfo(live.dtype).eps
        if live.shape != new.shape or not torch.allclose(live.double(), new.double(), tolerance, 0):
            raise _differs(_values("its slowest pairs turn by", float(live[-1]), float(new[-1])))
    for key in sorted(key for key in vars(fresh) if key.endswith("attention_scaling")):
        live, new = getattr(module, key), getattr(fresh, key)
        if live != new:
            raise _differs(_values(f"{key} is", live, new))


def _values(what: str, live: float, configured: float) -> str:
    return f"{what} {live:.6g} in memory and {configured:.6g} by the configuration"


def _differs(how: str) -> ValueError:
    return ValueError(
        f"the rotary embedding of this model is not what its configuration gives: {how}, so its "
        "own rotation is not known. Load the model with the configuration that you want, set a "
        "base by wavepe.hf.set_theta(model, theta), or name the rotation: rope:theta=..."
    )


def check_layers(base: Any, config: Any, attention: Any) -> None:
    """Raise ValueError if a number or a word that the forward of a layer reads, such as its window,
    is not what the configuration gives; `attention` is the class of the layers."""
    # A user's own class may be built otherwise.
    attention = next(x for x in attention.__mro__ if x.__module__.startswith("transformers."))
    names = {*inspect.unwrap(attention.forward).__code__.co_names} - NOT_COMPARED
    for index, layer in enumerate(families.attentions(base)[: config.num_hidden_layers]):
        with torch.inference_mode(False), torch.device("meta"):
            fresh = attention(config=config, layer_idx=index)
        for name in sorted(names):
            live, new = (getattr(x, name, None) for x in (layer, fresh))
            if isinstance(new, int | float | str | None) and live != new:
                raise ValueError(
                    f"layer {index} of this model is not what its configuration gives: {name} is "
                    f"{live!r} in memory and {new!r} by the configuration. Masks, caches and files "
                    "follow a configuration that is changed after loading, and layers do not: load "
                    "the model with the configuration that you want"
                )


def check_rope(layer: Any, config: Any, index: int) -> None:
    """Raise ValueError if the rope parameters of a patched layer are no longer what it uses."""
    slot, before = families.slot(config, layer, index), layer.wavepe.rope
    now: Any = None if slot is None else rope_config.parameters(config, slot) if before else {}
    if now != before:
        before, now = before or "its own", "no positions" if now is None else now
        raise ValueError(
            f"the rope parameters of a live model were changed from {before} to {now} in layer "
            f"{index}, which has no effect: call wavepe.hf.set_theta(model, theta), or unpatch the "
            "model and load it with the new configuration"
        )


def check_config(config: Any, spec: StoredSpec) -> None:
    """Raise ValueError if a configuration names another attention, or another encoding."""
    if config._attn_implementation != ATTENTION:
        raise ValueError(
            f"the position encoding {spec_text(spec)!r} of this model needs "
            f"attn_implementation={ATTENTION!r}, got {config._attn_implementation!r}: call "
            f"model.set_attn_implementation({ATTENTION!r}), or wavepe.hf.unpatch(model) first"
        )
    if config.position_encoding != spec:
        raise ValueError(
            f"config.position_encoding of a live model was changed from {spec_text(spec)!r} to "
            f"{spec_text(config.position_encoding)!r}, which has no effect: give it to "
            "from_pretrained, or patch a stock model with it"
        )


class LiveCheck:
    """Notices a configuration that no longer says what its patched model does."""

    def __init__(self, base: Any, config: Any) -> None:
        self.base, self.layers = base, len(base.layers)
        self.attention = type(families.attentions(base)[0])
        self.note(config)

    def note(self, config: Any) -> None:
        """Take `config` for that of the model as it is now, and let its files be checked."""
        self.spec: StoredSpec = config.position_encoding
        vars(config)[LIVE] = Link(self)
        self._seen = _copied(vars(config))

    def before_pass(self, config: Any, compiling: bool) -> None:
        """Raise ValueError if the configuration has changed, and the model has not."""
        if compiling:
            check_config(config, self.spec)  # a compiler guards these two
        self._check_changes()

    @torch.compiler.assume_constant_result
    def _check_changes(self) -> None:
        config = self.base.config
        try:
            changed = vars(config) != self._seen
        except (RuntimeError, ValueError):  # another tensor or array, which has no truth value
            changed = True
        if changed:
            self._check()
            self._seen = _copied(vars(config))

    def _check(self, loaded: Any = None) -> None:
        """Compare all; `loaded` is the configuration that a file would give."""
        config = self.base.config
        check_config(config, self.spec)
        for index, layer in enumerate(families.attentions(self.base)[: config.num_hidden_layers]):
            check_rope(layer, config, index)
        check_layers(self.base, loaded or config, self.attention)

    def before_saving(self, config: Any) -> None:
        """Raise ValueError if the model of the saved file would be another one."""
        if self.base.config is not config:
            return  # a copy, which may be changed
        whole = LayerEncodings(self.spec).everywhere
        names_layers = whole is None or any(whole.layers)  # their number and order matter
        if self.layers != config.num_hidden_layers and names_layers:
            raise ValueError(
                f"the position encoding {spec_text(self.spec)!r} names layers of {self.layers}, "
                f"and num_hidden_layers is {config.num_hidden_layers} now: call "
                "wavepe.hf.unpatch(model), and patch it with the layers that each part has now"
            )
        saved = CONFIG_MAPPING[TYPE_PREFIX + families.of(config).model_type]
        self._check(saved.from_dict(config.to_dict()))


class Link(weakref.ref):
    """The reference of a configuration to its `LiveCheck`. A copy of the model has its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Link | None:
        return (check := memo.get(id(self()))) and Link(check)

    def __reduce__(self) -> Any:
        return type(None), ()


def _copied(value: Any) -> Any:
    """Copy dicts and lists, and keep what they hold."""
    if isinstance(value, dict):
        return {key: _copied(x) for key, x in value.items()}
    return list(map(_copied, value)) if isinstance(value, list) else value
