"""wavepe's rotation kernel in the attention layers of stock models with rotary embedding."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .. import _checks, ops
from .families import names_in_forward
from .layers import text
from .rotary import RopeRotation, Rotary, StockRotation

M = TypeVar("M", bound=nn.Module)

APPLY = "apply_rotary_pos_emb"
_numbers = itertools.count()


def use_fused_rope(model: M, enabled: bool = True) -> M:
    """Let a stock model rotate queries and keys with `wavepe.ops.rope_qk`, in one call.

    Cosines and sines remain those of the model's rotary module, so results differ by rounding
    only; weights, caches and checkpoints are untouched. Compiled forms of the model follow.

    Parameters
    ----------
    model : nn.Module
        A model of transformers whose attention layers call `apply_rotary_pos_emb(q, k, cos, sin)`,
        or a wrapper of one: Llama, Mistral, Qwen, Gemma, Phi, OLMo, GPT-NeoX, Cohere, GLM and most
        others; pairs in halves or interleaved, whole heads or a part of them.
    enabled : bool
        False gives the layers back what they had.

    Returns
    -------
    The model. Copies and pickles are fused too; `save_pretrained` writes the stock model.

    Raises
    ------
    TypeError
        Not a model.
    ValueError
        No layer calls `apply_rotary_pos_emb`, the family has another form of it or a second one, a
        layer has a forward of its own already (a hook of accelerate), or `wavepe.hf.patch` has
        given the model an encoding that does not rotate. The model is as it was.

    Examples
    --------
    >>> import torch, wavepe.hf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    ...     num_attention_heads=2))
    >>> tokens = torch.arange(8)[None]
    >>> stock = model(tokens).logits
    >>> fused = wavepe.hf.use_fused_rope(model)(tokens).logits
    >>> torch.allclose(fused, stock, atol=1e-6)
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"use_fused_rope needs a model of transformers, got {type(model).__name__}")
    if not _checks.flag("enabled", enabled):
        for module in model.modules():
            if isinstance(module, Fused):
                module.__class__ = module.stock
        return model
    rotaries = [module for module in model.modules() if isinstance(module, Rotary)]
    rotations = [rotation for rotary in rotaries for rotation in rotary.modules()]
    if rotaries and not any(
        isinstance(rotation, RopeRotation | StockRotation) for rotation in rotations
    ):
        raise ValueError(
            f"this model has the position encoding {text(rotaries[0].spec)!r}, which is not "
            "rotary: there is nothing to rotate"
        )
    layers = [module for module in model.modules() if APPLY in names_in_forward(module)]
    if not layers:
        raise ValueError(
            f"use_fused_rope finds no layer in this {type(model).__name__} that calls {APPLY}: its "
            "family rotates in another way, or not at all"
        )
    layers = [layer for layer in layers if not isinstance(layer, Fused)]
    for layer in layers:
        _check(layer)
    stocks: list[Any] = [type(layer) for layer in layers]
    classes = [_fused_class(stock) for stock in stocks]
    for layer, fused in zip(layers, classes, strict=True):
        layer.__dict__.pop("forward", None)  # the class's own, which hooks of accelerate left
        layer.__class__ = fused
    return model


def _check(layer: nn.Module) -> None:
    """Raise ValueError where a layer cannot be fused."""
    stock = type(layer)
    own = layer.__dict__.get("forward")
    if own is not None and getattr(own, "__func__", None) is not stock.forward:
        raise ValueError(
            f"this {stock.__name__} has a forward of its own, as hooks of accelerate are: "
            "use_fused_rope first, then dispatch the model"
        )
    others = {name for name in names_in_forward(layer) if name.startswith("apply_")} - {APPLY}
    if others:
        raise ValueError(
            f"{stock.__name__} rotates by {', '.join(sorted(others))} beside {APPLY}: a fused form "
            "of it would be used in part only"
        )


# ---------------------------------------------------------------- the class of a fused layer


class Fused:
    """A base of the classes that `_fused_class` makes."""

    stock: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.stock,), self.__dict__


def _rebuild(stock: Any) -> Any:
    fused = _fused_class(stock)
    return fused.__new__(fused)


@functools.cache
def _fused_class(stock: Any) -> Any:
    """Return a subclass of an attention layer's class, for that family and no other model of it.

    A layer calls `apply_rotary_pos_emb` as a global of its modelling file. The subclass has the
    same forward with other globals. They belong to a module of their own that can be imported:
    torch.compile reads the globals of a function from the module that they name.
    """
    forward: Any = inspect.unwrap(stock.forward)
    name = f"wavepe_fused_rope_{next(_numbers)}"
    scope = types.ModuleType(name, f"{stock.__module__} with another {APPLY}")
    scope.__dict__.update(sys.modules[stock.__module__].__dict__)
    scope.__dict__.update({"__name__": name, APPLY: _fused_apply(forward.__globals__[APPLY])})
    sys.modules[name] = scope
    fused = types.FunctionType(
        forward.__code__, scope.__dict__, "forward", forward.__defaults__, forward.__closure__
    )
    fused.__kwdefaults__ = forward.__kwdefaults__
    body = {"forward": fused, "stock": stock, "__module__": stock.__module__}
    return type(stock.__name__, (Fused, stock), body)


# ---------------------------------------------------------------- what a family's function does


class _Layout(NamedTuple):
    """How a family holds its pairs and its angles.

    Attributes
    ----------
    interleaved : bool
        Pairs are (2i, 2i+1), else (i, i + h).
    widen, narrow : callable
        Of one value a pair, (..., h), the table that the family's rotary module makes, and back.
    """

    interleaved: bool
    widen: Callable[[Tensor], Tensor]
    narrow: Callable[[Tensor], Tensor]


def _first_half(table: Tensor) -> Tensor:
    return table[..., : table.shape[-1] // 2]


def _every_second(table: Tensor) -> Tensor:
    return table[..., ::2]


LAYOUTS = [
    _Layout(interleaved, widen, narrow)
    for interleaved in (False, True)
    for widen, narrow in (
        (lambda pairs: torch.cat((pairs, pairs), -1), _first_half),  # Llama; GLM interleaved
        (lambda pairs: pairs.repeat_interleave(2, -1), _every_second),  # Cohere
        (lambda pairs: pairs, lambda table: table),  # GPT-OSS
    )
]


def _fused_apply(apply: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that does what `apply(q, k, cos, sin)` does, in one call.

    What that is, is found by trying it out: families differ in the order of the pairs, in the form
    of the angles, and in whether queries keep their dtype where it is lower than that of the angles
    (autocast).

    Raises
    ------
    ValueError
        It is no rotation of pairs that is known here.
    """
    layout = next((layout for layout in LAYOUTS if _agrees(layout, apply)), None)
    if layout is None:
        raise ValueError(
            f"{apply.__module__}.{APPLY} is not a rotation of pairs (i, i + h) or (2i, 2i + 1) by "
            "(q, k, cos, sin): there is no fused form of it"
        )
    interleaved, narrow = layout.interleaved, layout.narrow
    q, k, pairs = _sample()
    table = layout.widen(pairs)
    keeps_dtype = apply(q.bfloat16(), k.bfloat16(), table, table)[0].dtype == torch.bfloat16

    def fused(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1 or any(isinstance(value, int) for value in rest):
            return apply(q, k, cos, sin, *rest, unsqueeze_dim=unsqueeze_dim)
        if not keeps_dtype:
            q = q.to(torch.promote_types(q.dtype, cos.dtype))
            k = k.to(torch.promote_types(k.dtype, cos.dtype))
        return ops.rope_qk(q, k, narrow(cos), narrow(sin), interleaved=interleaved)

    return fused


def _sample() -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (2, 3, 5, 8), keys (2, 1, 5, 8) and angles (2, 5, 4), none like another."""
    with torch.device("cpu"), torch.inference_mode(False):
        q, k, angles = (torch.arange(n, dtype=torch.float32) for n in (240, 80, 40))
        return q.sin().view(2, 3, 5, 8), k.cos().view(2, 1, 5, 8), 1 + angles.view(2, 5, 4)


@torch.no_grad()
def _agrees(layout: _Layout, apply: Callable[..., Any]) -> bool:
    q, k, angles = _sample()
    cos, sin = angles.cos(), angles.sin()
    wanted = ops.rope_qk(q, k, cos, sin, interleaved=layout.interleaved)
    try:
        got = apply(q, k, layout.widen(cos), layout.widen(sin))
        return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted, strict=True))
    except Exception:  # whatever a foreign function does with arguments that it does not take
        return False
