"""`use_fused_rope`: wavepe's rotation kernel in the attention layers of stock models."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import ops
from ..common import checks
from . import pairs
from .families import names_in_forward, need_module
from .layers import spec_text
from .rotary import RopeRotation, Rotary, StockRotation

M = TypeVar("M", bound=nn.Module)

APPLY = "apply_rotary_pos_emb"
_numbers = itertools.count()


def use_fused_rope(model: M, enabled: bool = True) -> M:
    """Rotate the queries and keys of a stock model with one call of `wavepe.ops.rope_qk`.

    The model's own rotary module still computes cosines and sines, so results differ by rounding
    alone. Weights, caches and checkpoints do not change. Compiled forms of the model use the new
    rotation too.

    Parameters
    ----------
    model : nn.Module
        A model of transformers whose attention layers call `apply_rotary_pos_emb(q, k, cos, sin)`,
        or a wrapper of one. Llama, Mistral, Qwen, Gemma, Phi, OLMo, GPT-NeoX, Cohere, GLM and most
        others do. The pairs may be halves (i, i + h) or interleaved (2i, 2i + 1), and may cover
        whole heads or a part of them.
    enabled : bool
        True puts the fused rotation in; False takes it out again.

    Returns
    -------
    nn.Module
        `model` itself. Copies and pickles are fused too; `save_pretrained` writes a stock model.

    Raises
    ------
    TypeError
        `model` is not a module, or `enabled` is not a bool.
    ValueError
        No layer calls `apply_rotary_pos_emb`, or a layer calls another form of it or a second such
        function. A layer has its own forward already, such as a hook of accelerate. Or the model
        was patched with an encoding that does not rotate. The model is unchanged.

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
    need_module(model)
    if not checks.flag("enabled", enabled):
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
            f"this model has the position encoding {spec_text(rotaries[0].spec)!r}, which is not "
            "rotary: there is nothing to rotate"
        )
    layers = [module for module in model.modules() if APPLY in names_in_forward(module)]
    if not layers:
        raise ValueError(
            f"no layer of this {type(model).__name__} calls {APPLY}: its family rotates in another "
            "way, or not at all"
        )
    layers = [layer for layer in layers if not isinstance(layer, Fused)]
    for layer in layers:
        _check(layer)
    stocks: list[Any] = [type(layer) for layer in layers]
    classes = [_fused_class(stock) for stock in stocks]
    for layer, fused in zip(layers, classes, strict=True):
        layer.__dict__.pop("forward", None)  # equals the class's; a hook of accelerate left it
        layer.__class__ = fused
    return model


def _check(layer: nn.Module) -> None:
    """Raise ValueError if a layer cannot be fused."""
    stock = type(layer)
    own = layer.__dict__.get("forward")
    if own is not None and getattr(own, "__func__", None) is not stock.forward:
        raise ValueError(
            f"this {stock.__name__} has its own forward, such as a hook of accelerate: call "
            "use_fused_rope first, then dispatch the model"
        )
    others = {name for name in names_in_forward(layer) if name.startswith("apply_")} - {APPLY}
    if others:
        raise ValueError(
            f"{stock.__name__} rotates with {', '.join(sorted(others))} as well as {APPLY}, and "
            "only the latter has a fused form"
        )


# ---------------------------------------------------------------- the class of a fused layer


class Fused:
    """Base class of the classes that `_fused_class` creates."""

    stock: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.stock,), self.__dict__


def _rebuild(stock: Any) -> Any:
    fused = _fused_class(stock)
    return fused.__new__(fused)


@functools.cache
def _fused_class(stock: Any) -> Any:
    """Return a subclass of an attention layer's class that calls the fused rotation.

    A layer calls `apply_rotary_pos_emb` as a global of its modelling file. The subclass has the
    same forward, with other globals. These globals belong to a new module that can be imported,
    because torch.compile reads the globals of a function from the module that they name. Other
    models of the same family keep the stock class.
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


# ---------------------------------------------------------------- the function of a family


def _fused_apply(apply: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function with the results of `apply(q, k, cos, sin)` that calls one operator.

    Families differ in the order of the pairs and in the form of the angles. They also differ in
    the dtype of the result if the angles have a higher precision than the queries (autocast). This
    function calls `apply` on small tensors to learn which case it is.

    Raises
    ------
    ValueError
        `apply` is not a rotation of pairs in a known layout.
    """
    layout = next((layout for layout in pairs.LAYOUTS if pairs.agrees(layout, apply)), None)
    if layout is None:
        raise ValueError(
            f"{apply.__module__}.{APPLY} has no fused form: it does not rotate pairs (i, i + h) or "
            "(2i, 2i + 1) given (q, k, cos, sin)"
        )
    interleaved, narrow = layout.interleaved, layout.narrow
    q, k, angles = pairs.sample()
    table = layout.widen(angles)
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
