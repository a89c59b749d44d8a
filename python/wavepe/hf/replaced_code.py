"""Notice what other programs have replaced in a patched model.

Unsloth, Liger and others replace the forward of a class or of a module, or the function that
rotates. A forward that still calls transformers' attention interface is fine. Any other forward
drops the encoding without an error. So a `Pass` records that a layer has begun, and that the
attention "wavepe" has run. This module checks that record, and the function that rotates.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from . import families, pairs
from .layers import spec_text
from .pairs import APPLY
from .passes import Pass

# Attention class -> its forward, that function's globals, and the function that rotates, as the
# last check found them.
_checked: dict[type, tuple[Any, dict[str, Any], Any]] = {}


def replaced(what: str, config: Any) -> ValueError:
    """Return the error for a model in which a program has replaced something."""
    spec = spec_text(config.position_encoding)
    return ValueError(
        f"{what} is not that of transformers, and leaves the position encoding {spec!r} out: "
        "another program (Unsloth, Liger, a kernel of the Hub) has replaced it. Let that program "
        "change nothing of attention, or call wavepe.hf.unpatch(model) first"
    )


def check_before(pass_: Pass, attention: Any, base: Any) -> None:
    """Raise ValueError if the function that rotates ignores the angles of wavepe."""
    if pass_.compiling:
        if not torch.compiler.is_exporting():
            _check_rotation(attention, base)
        return
    forward, names, apply = _checked.get(attention, (None, {}, None))
    if attention.forward is not forward or names.get(APPLY) is not apply:
        _check_rotation(attention, base)


def check_after(pass_: Pass, attention: type, base: Any) -> None:
    """Raise ValueError if a forward that is not transformers' has left all attention out.

    It runs if the last layer did not reach the attention, or if no layer has run. Single layers may
    be left out as a whole: then there is no attention without positions.
    """
    if pass_.waiting:
        raise replaced(f"the forward of this {attention.__name__}", base.config)
    if pass_.compiling or not base.layers:
        return
    for module in (base, *base.layers):
        if "forward" in module.__dict__ or not _is_of_transformers(type(module).forward):
            raise replaced(f"a forward of this {type(base).__name__}", base.config)


def _is_of_transformers(function: Any) -> bool:
    """Return whether a function is that of transformers, or one that wavepe put in its place."""
    home = getattr(function, "__module__", None) or ""
    return home.startswith(("transformers.", "wavepe"))


@torch.compiler.assume_constant_result
def _check_rotation(attention: Any, base: Any) -> None:
    """Raise ValueError if the function that rotates queries and keys ignores angles of wavepe."""
    forward: Any = inspect.unwrap(attention.forward)
    apply, layout = forward.__globals__.get(APPLY), families.of(base.config).layout
    if apply is not None and not _is_of_transformers(apply):
        device = next(base.parameters()).device
        if device.type == "meta":
            return
        if not pairs.agrees(layout, apply, device):
            raise replaced(f"the function {APPLY} of {forward.__module__}", base.config)
    _checked[attention] = attention.forward, forward.__globals__, apply
