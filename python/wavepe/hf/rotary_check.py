"""Compare stock rotary modules in memory with their configuration.

A program may change a configuration after the model was built, or scale the frequencies of a model
in place. Then the two disagree, and "the model's own rotation" has two meanings.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from . import rope_config


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
    follows = rope_config.any_follows_length(config)
    return frequencies(module) if follows else frequencies(module, "inv_freq")


def has_only_a_base(module: Any, config: Any) -> bool:
    """Return whether the frequencies are those of some base, without any scaling."""
    for live in _in_use(module, config):
        x = live.detach().double().cpu()
        geometric = x[-1:] ** (torch.arange(len(x)) / max(len(x) - 1, 1))
        if x.isnan().any() or not torch.allclose(x, geometric, 16 * torch.finfo(live.dtype).eps, 0):
            return False
    factors = [value for key, value in vars(module).items() if key.endswith("attention_scaling")]
    return all(value == 1 for value in factors)


def check_rotary(module: Any, config: Any) -> None:
    """Raise ValueError if a stock module does not rotate as its configuration says.

    Dynamic scaling does not count as a difference.
    """
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
