"""Swapping the position encoding of one model, or of all Llamas that are made for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaModel,
    LlamaPreTrainedModel,
)

from . import families
from .cache_guard import mark_stock_caches
from .config import EncodedConfig
from .install import adopt, install_attention, install_patch, installed, uninstall
from .layers import Choice, Spec
from .lengths import METHOD, check_lengths

M = TypeVar("M", bound=nn.Module)

# What patch_llama replaced; empty where it is not in force.
_replaced: dict[str, Callable[..., None]] = {}


def patch(model: M, encoding: Spec, **options: Any) -> M:
    """Swap the position encoding of a live model; its weights are untouched.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder of the Llama family, or a model on one: Llama, Mistral, Qwen2, Qwen3, SmolLM3,
        Gemma 2, Gemma 3 (text), Phi-3, OLMo 2, GPT-NeoX, Granite, Mixtral, Qwen2-MoE, Qwen3-MoE,
        OLMoE. Patched in place. Patch the outermost model, the one that will be saved.
    encoding : str, dict or Encoding
        As `wavepe.encoding` reads it. A "rope" without theta takes the model's own base, and
        without a type its scaling too. A dict of layer ranges makes a hybrid,
        ``{"0-3": "rope", "4": "none"}``: layers that it does not name keep their own encoding.
        Layers that the family leaves without positions (SmolLM3) keep none, unless named.
    **options
        Options of the encoding.

    Returns
    -------
    The model.

    Raises
    ------
    TypeError
        Another family, or not a model; the message says why it cannot be patched.
    ValueError
        An unknown encoding or layer range, one that does not fit the model, a model patched
        already, parameters on the meta device, or a learned encoding for sharded parameters.

    Notes
    -----
    A patched model saves itself as the type wavepe_<family> (wavepe_llama, wavepe_mistral, ...). A
    patched model raises when its attention implementation is switched away from "wavepe". A head
    around a model that was patched inside of it does not know, and saves a stock model.

    Examples
    --------
    >>> import torch, wavepe.hf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...     num_attention_heads=2))
    >>> model = wavepe.hf.patch(model, "wavelet:scales=4")
    >>> tuple(model(torch.arange(8)[None]).logits.shape)
    (1, 8, 64)
    >>> wavepe.hf.unpatch(model).config.model_type
    'llama'
    """
    chosen = Choice(encoding, **options)
    families.decoder(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name} is on the meta device: patch the model first, then offload or "
                "dispatch it"
            )
        if _is_sharded(parameter) and any(e.learned for e in chosen.encodings):
            raise ValueError(
                f"parameter {name} is a DTensor, and those of {chosen} would belong to no mesh: "
                "patch the model first, then shard it"
            )
    install_patch(model, chosen)
    check_lengths(model)
    mark_stock_caches()
    return model


def _is_sharded(parameter: nn.Parameter) -> bool:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def unpatch(model: M) -> M:
    """Take the encoding out again: the model is bit for bit what it was before `patch`.

    Returns
    -------
    The model.

    Raises
    ------
    ValueError
        The model is not patched, or was patched as part of a larger one.
    """
    uninstall(model)
    model.__dict__.pop(METHOD, None)
    return model


@contextmanager
def patched(model: M, encoding: Spec, **options: Any) -> Iterator[M]:
    """Patch a model for the time of a with block, which may end by an exception; see `patch`."""
    patch(model, encoding, **options)
    record = installed(families.decoder(model))
    try:
        yield model
    finally:
        if installed(families.decoder(model)) is record:  # not if the block has unpatched it
            unpatch(model)


def encoding_of(model: nn.Module) -> str | dict[str, str] | None:
    """Return the position encoding that wavepe has given a model.

    Parameters
    ----------
    model : nn.Module
        A patched model, one of a type wavepe_<family>, or a wrapper of one.

    Returns
    -------
    str, dict or None
        A spec; of a hybrid, a spec for each range of layers; None for a stock model.

    Examples
    --------
    >>> import wavepe.hf
    >>> config = wavepe.hf.WavePELlamaConfig(position_encoding="alibi", num_hidden_layers=1)
    >>> wavepe.hf.encoding_of(wavepe.hf.WavePELlamaModel(config))
    'alibi'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"encoding_of needs a model, got {type(model).__name__}")
    found = (installed(module) for module in model.modules())
    return next((record.spec for record in found if record is not None), None)


def patch_llama(encoding: Spec, **options: Any) -> None:
    """Give the encoding to every stock Llama made or loaded until `unpatch_llama`.

    Models made in between keep it afterwards (`unpatch(model)` takes it out of one). Those made
    before, and those of the type wavepe_llama, are not concerned. A `LlamaAttention` made alone
    rotates by itself, or not at all, whatever position embeddings it is given.

    Parameters
    ----------
    encoding, **options
        As for `patch`.

    Raises
    ------
    ValueError
        An unknown encoding, or `patch_llama` is in force already. What does not fit a model, and
        a model with another configuration class than LlamaConfig (TypeError), is found as it is
        made.
    """
    chosen = Choice(encoding, **options)
    if chosen.everywhere is None:
        raise ValueError("patch_llama takes one encoding for all layers; patch(model) takes a dict")
    if _replaced:
        raise ValueError("patch_llama is in force already: wavepe.hf.unpatch_llama() first")
    make_attention, finish_model = LlamaAttention.__init__, LlamaPreTrainedModel.post_init
    _replaced.update(make_attention=make_attention, finish_model=finish_model)

    @functools.wraps(make_attention)
    def patched_init(self: LlamaAttention, *args: Any, **kwargs: Any) -> None:
        make_attention(self, *args, **kwargs)
        if not isinstance(self.config, EncodedConfig):
            install_attention(self, chosen)

    @functools.wraps(finish_model)
    def patched_post_init(self: LlamaPreTrainedModel) -> None:
        finish_model(self)
        if isinstance(self, LlamaModel) and not isinstance(self.config, EncodedConfig):
            install_patch(self, chosen)
        elif type(self.config) is LlamaConfig and isinstance(self.base_model, LlamaModel):
            adopt(self)
            check_lengths(self)

    LlamaAttention.__init__ = patched_init
    LlamaPreTrainedModel.post_init = patched_post_init


def unpatch_llama() -> None:
    """End `patch_llama`: Llamas made from now on are stock again.

    Raises
    ------
    ValueError
        `patch_llama` is not in force.
    """
    if not _replaced:
        raise ValueError("patch_llama is not in force: there is nothing to undo")
    LlamaAttention.__init__ = _replaced["make_attention"]
    del LlamaPreTrainedModel.post_init  # it is inherited
    _replaced.clear()
