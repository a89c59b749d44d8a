"""Swap the position encoding of one model, or of all Llamas created from now on."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaModel,
    LlamaPreTrainedModel,
)

from ..encodings.wavelet import scale_hint
from . import families, rope_config, t5
from .config import EncodedConfig, OwnConfig
from .install import adopt, install_attention, install_patch, installed, uninstall
from .layers import LayerEncodings, Spec
from .lengths import GENERATE_HOOK, check_lengths

M = TypeVar("M", bound=nn.Module)

# The methods that patch_llama has replaced; empty if it is not in force.
_replaced: dict[str, Callable[..., None]] = {}


def patch(model: M, encoding: Spec, **options: Any) -> M:
    """Swap the position encoding of a live model, and leave its weights as they are.

    With another kind of encoding, you must fine-tune a pretrained model before its output is good
    again. `unpatch` restores the old encoding.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal decoder of a family in `supported_families()`, or a model with a head around one.
        It is changed in place. Give the outermost model, the one that will be saved. A T5, mT5 or
        UMT5 takes "t5" only: it keeps its own relative bias, its parameters and its files, and
        computes the bias without a tensor of queries x keys.
    encoding : str, dict or Encoding
        One encoding, in any form that `wavepe.encoding` takes. A "rope" without theta uses the base
        of the model, without a type its scaling too, and its pairs. A dict of layer ranges makes a
        hybrid, ``{"0-3": "rope", "4": "none"}``: layers that it does not name keep their own
        encoding. Layers that the family leaves without positions (SmolLM3, Cohere 2) keep none,
        unless the dict names them.
    **options
        Options of the encoding.

    Returns
    -------
    transformers.PreTrainedModel
        `model` itself.

    Raises
    ------
    TypeError
        `model` is not a model of a supported family. The message says why it cannot be patched.
    ValueError
        The encoding or a layer range is unknown or does not fit the model; the model is patched
        already; parameters are on the meta device; or the encoding is learned and the parameters
        are sharded.

    Notes
    -----
    `save_pretrained` of a patched model writes the type wavepe_<family> (wavepe_llama,
    wavepe_mistral, ...). A patched model raises if its attention implementation is switched away
    from "wavepe". A larger model that you do not patch as a whole, such as a vision-language model
    around a patched text model, raises in `save_pretrained`.

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
    chosen = LayerEncodings(encoding, **options)
    if t5.is_t5(model):
        t5.install(model, chosen)
        return model
    families.decoder(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name} is on the meta device, and patch needs real parameters: patch "
                "the model first, then offload or dispatch it"
            )
        if hasattr(parameter, "placements") and chosen.learned is not None:
            raise ValueError(
                f"parameter {name} is a DTensor, but the parameters of {chosen} would be plain "
                "tensors: patch the model first, then shard it"
            )
    install_patch(model, chosen)
    check_lengths(model)
    warn_of_misfits(model, chosen)
    return model


def warn_of_misfits(model: nn.Module, chosen: LayerEncodings) -> None:
    """Warn of wavelets that are wide for the trained length, and of a scaling that is replaced."""
    base = families.decoder(model)
    size = max(heads.head_dim for heads in families.sizes(base))
    longest = base.config.max_position_embeddings or math.inf
    for encoding in chosen.encodings:
        if hint := scale_hint(encoding, size, longest):
            warnings.warn(f"{encoding}: {hint}", stacklevel=3)
        kind = getattr(encoding.rotary, "type", None)
        for lost in {*rope_config.rope_types(base.config)} - {"default", kind} if kind else ():
            warnings.warn(
                f"{encoding} replaces the model's scaling {lost}: the model is worse at every "
                "length until it is trained again. rope:self_extend keeps the scaling",
                stacklevel=3,
            )


def unpatch(model: M) -> M:
    """Undo `patch`: the model computes bit for bit what it computed before.

    Weights that were trained in between keep their new values. The parameters of a learned encoding
    are removed.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model that was given to `patch`. It is changed in place.

    Returns
    -------
    transformers.PreTrainedModel
        `model` itself.

    Raises
    ------
    TypeError
        `model` is not a model of a supported family.
    ValueError
        The model is not patched, or it was patched as part of a larger model.
    """
    if t5.is_t5(model):
        t5.uninstall(model)
        return model
    uninstall(model)
    model.__dict__.pop(GENERATE_HOOK, None)
    return model


@contextmanager
def patched(model: M, encoding: Spec, **options: Any) -> Iterator[M]:
    """Patch a model for the time of a with block; arguments and errors are those of `patch`.

    The block gets `model` itself, which is restored at its end, also after an exception.

    Examples
    --------
    >>> import torch, wavepe.hf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    ...     num_attention_heads=2))
    >>> with wavepe.hf.patched(model, "alibi"):
    ...     wavepe.hf.encoding_of(model)
    'alibi'
    >>> wavepe.hf.encoding_of(model) is None
    True
    """
    patch(model, encoding, **options)
    base = model if t5.is_t5(model) else families.decoder(model)
    record = installed(base)
    try:
        yield model
    finally:
        if installed(base) is record:  # else the block has unpatched it
            unpatch(model)


def encoding_of(model: nn.Module) -> str | dict[str, str] | None:
    """Return the position encoding that wavepe has given a model.

    Parameters
    ----------
    model : nn.Module
        A patched model, a model of a type wavepe_<family>, or a wrapper of one.

    Returns
    -------
    str, dict or None
        The spec of the encoding. For a hybrid, a dict with a spec for each range of layers. None
        for a stock model.

    Raises
    ------
    TypeError
        `model` is not a module.
    """
    families.need_module(model)
    records = (installed(module) for module in model.modules())
    return next((record.spec for record in records if record is not None), None)


def patch_llama(encoding: Spec, **options: Any) -> None:
    """Patch every stock Llama that is created or loaded until `unpatch_llama`.

    Use it where other code creates the model. The models keep the encoding after `unpatch_llama`;
    `unpatch(model)` removes it from one of them. Models that exist already do not change, nor do
    models of the type wavepe_llama. A `LlamaAttention` that is created alone computes its own
    angles and ignores the position embeddings that the caller gives.

    Parameters
    ----------
    encoding, **options
        As for `patch`, but one encoding for all layers.

    Raises
    ------
    ValueError
        The encoding is unknown, or `patch_llama` is in force already. An encoding that does not fit
        a model is reported when the model is created. So is a configuration class other than
        LlamaConfig (TypeError).

    Examples
    --------
    >>> import wavepe.hf
    >>> from transformers import LlamaConfig, LlamaModel
    >>> wavepe.hf.patch_llama("alibi")
    >>> model = LlamaModel(LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    ...     num_attention_heads=2))
    >>> wavepe.hf.unpatch_llama()
    >>> wavepe.hf.encoding_of(model)
    'alibi'
    """
    chosen = LayerEncodings(encoding, **options)
    if chosen.everywhere is None:
        raise ValueError(
            "patch_llama takes one encoding for all layers, got a dict of layer ranges: call "
            "wavepe.hf.patch(model, ...) for a hybrid"
        )
    if _replaced:
        raise ValueError("patch_llama is in force already: call wavepe.hf.unpatch_llama() first")
    make_attention, finish_model = LlamaAttention.__init__, LlamaPreTrainedModel.post_init
    _replaced.update(make_attention=make_attention, finish_model=finish_model)

    @functools.wraps(make_attention)
    def patched_init(self: LlamaAttention, *args: Any, **kwargs: Any) -> None:
        make_attention(self, *args, **kwargs)
        if not isinstance(self.config, OwnConfig):
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
    """End `patch_llama`: Llamas that are created from now on are stock models again.

    ValueError if `patch_llama` is not in force.
    """
    if not _replaced:
        raise ValueError("patch_llama is not in force: there is nothing to undo")
    LlamaAttention.__init__ = _replaced["make_attention"]
    del LlamaPreTrainedModel.post_init  # the class inherits its own
    _replaced.clear()
