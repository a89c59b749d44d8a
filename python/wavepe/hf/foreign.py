"""Notice what other programs have replaced in a patched model.

Unsloth, Liger and others replace the forward of a class or of a module, or the function that
rotates. A forward that still calls transformers' attention interface is fine. Another one leaves
the encoding out. So a layer checks that the attention "wavepe" has run (attention.py). This module
watches what stands above the layers, and the function that rotates.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import nn

from . import families, pairs
from .layers import spec_text
from .pairs import APPLY

# Of a pass through a model that has forwards of others: the attention layers that ran.
_passing = threading.local()
_ours: dict[Any, bool] = {}  # a function -> whether it is transformers' or ours
_rotations: set[Any] = set()  # pairs of a layout and a function that rotates so


def replaced(what: str, config: Any) -> ValueError:
    """Return the error for a model in which a program has replaced something."""
    spec = spec_text(config.position_encoding)
    return ValueError(
        f"{what} is not that of transformers, and leaves the position encoding {spec!r} out: "
        "another program (Unsloth, Liger, a kernel of the Hub) has replaced it. Let that program "
        "change nothing of attention, or call wavepe.hf.unpatch(model) first"
    )


def note(attention: nn.Module) -> None:
    """Note that an attention layer runs in the pass of this thread."""
    if not torch.compiler.is_compiling() and (ran := getattr(_passing, "ran", None)) is not None:
        ran.add(id(attention))


class Watch:
    """Watches one base model, whose layers may be removed or wrapped meanwhile."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.attention = type(families.attentions(base)[0])

    def before(self) -> None:
        """Look at a model before a pass; ValueError if its function that rotates is another one."""
        if torch.compiler.is_exporting():
            return
        _check_rotation(self.attention, self.base)
        if torch.compiler.is_compiling():
            return
        _passing.ran = None if all(map(_is_stock, (self.base, *self.base.layers))) else set()

    def after(self) -> None:
        """Raise ValueError if a forward that is not transformers' has left all attention out.

        Single layers may be left out as a whole: then there is no attention without positions.
        """
        if torch.compiler.is_compiling() or (ran := getattr(_passing, "ran", None)) is None:
            return
        _passing.ran = None
        if not ran and self.base.layers and not any(map(_is_compiled, self.base.modules())):
            raise replaced(f"a forward of this {type(self.base).__name__}", self.base.config)


def _is_stock(module: nn.Module) -> bool:
    return _is_of_transformers(type(module).forward) and "forward" not in module.__dict__


def _is_compiled(module: Any) -> bool:
    """Return whether a module is compiled: then `note` does not run."""
    forward = module.__dict__.get("forward")
    return bool(
        module._compiled_call_impl
        or type(module).__name__ == "OptimizedModule"
        or hasattr(forward, "_torchdynamo_orig_callable")
    )


def _is_of_transformers(function: Any) -> bool:
    """Return whether a function is that of transformers, or one that wavepe put in its place."""
    found = _ours.get(function)
    if found is None:
        home = getattr(function, "__module__", None) or ""
        found = _ours[function] = home.startswith(("transformers.", "wavepe"))
    return found


@torch.compiler.assume_constant_result
def _check_rotation(attention: Any, base: Any) -> None:
    """Raise ValueError if the function that rotates queries and keys ignores angles of wavepe."""
    forward: Any = inspect.unwrap(attention.forward)
    apply, layout = forward.__globals__.get(APPLY), families.layout(base.config)
    if apply is None or _is_of_transformers(apply) or (layout, apply) in _rotations:
        return
    device = next(base.parameters()).device
    if device.type == "meta":
        return
    if not pairs.agrees(layout, apply, device):
        raise replaced(f"the function {APPLY} of {forward.__module__}", base.config)
    _rotations.add((layout, apply))
