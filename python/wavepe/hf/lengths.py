"""Encodings that depend on the sequence length, in models that generate token by token.

Such an encoding has different frequencies or vectors at each length. The keys in a cache keep those
of the length at which they were computed, so they do not fit a longer sequence.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar

import transformers
from torch import nn

from ..common import checks
from . import families
from .install import installed

M = TypeVar("M", bound=nn.Module)
GENERATE_HOOK = "_prepare_cache_for_generation"  # `generate` calls it before its first token


def fix_length(model: M, length: int | None) -> M:
    """Fix the length that an encoding uses, so that `generate` can use a cache.

    Some encodings depend on the sequence length: ``rope`` with ``inference_theta=scaled``,
    ``type=dynamic`` or ``type=longrope``, ``normalised``, and ``sinusoidal`` with ``theta=length``
    or ``reversed=true``. After this call, every pass uses the frequencies or vectors of `length`
    tokens. Other encodings do not change. The length is not saved with the model, and `unpatch`
    removes it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A patched model, or a model of a type wavepe_<family>.
    length : int or None
        Number of tokens, prompt and new ones together. Longer sequences use it too. None makes the
        encoding follow the length of each call again.

    Returns
    -------
    transformers.PreTrainedModel
        `model` itself. It refuses a cache that was filled with other frequencies.

    Raises
    ------
    TypeError
        `model` is not a model of a family that `patch` takes, or `length` is not an integer.
    ValueError
        `length` is below 1, or `model` is a stock model.

    Examples
    --------
    >>> import torch, wavepe.hf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    ...     num_attention_heads=2, max_position_embeddings=16, eos_token_id=None))
    >>> model = wavepe.hf.patch(model, "rope:inference_theta=scaled").eval()
    >>> model = wavepe.hf.fix_length(model, 40)
    >>> tuple(model.generate(torch.arange(1, 9)[None], max_new_tokens=32, do_sample=False).shape)
    (1, 40)
    """
    present = installed(families.decoder(model))
    if present is None:
        raise ValueError(
            f"fix_length needs a model with a position encoding of wavepe, but this "
            f"{type(model).__name__} is a stock model: call wavepe.hf.patch(model) first"
        )
    if length is not None:
        length = checks.integer("length", length, 1)
    for follower in present.length_parts:
        follower.fix(length)
    return model


def _checked_cache(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the method `GENERATE_HOOK`, unless the keys of the prompt would not fit the last token.

    `generate` does so before the first token, so it fails at once and not halfway.
    """
    method = getattr(type(model), GENERATE_HOOK)
    arguments = inspect.signature(method).bind(model, *args, **kwargs).arguments
    config, inputs = arguments["generation_config"], arguments["model_kwargs"]
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if config.use_cache and (mask is not None or positions is not None):
        if mask is None:  # the mask had no zeros, and transformers dropped it
            longest = columns = int(positions.max()) + 1
        else:
            longest, columns = int(mask.sum(1).max()), mask.shape[1]
        first = min(longest, config.prefill_chunk_size or longest)
        last = arguments["max_cache_length"] - (columns - longest)
        if last >= longest:  # else the ids continue a cache, and the whole length is unknown
            _check_spans(families.decoder(model), first, longest, last)
    return method(model, *args, **kwargs)


def _check_spans(base: Any, first: int, prompt: int, last: int) -> None:
    """Check the lengths of the longest row at the first call, the prompt and the last call."""
    recomputed = families.recomputes_keys_after(base.config)
    spans = [(first, last)]
    if prompt <= recomputed < last:
        if families.FORGETS_TOKENS:
            raise ValueError(
                f"transformers {transformers.__version__} forgets all earlier tokens when a Phi-3, "
                f"stock or patched, exceeds {recomputed} tokens (original_max_position_embeddings):"
                " pass use_cache=False, ask for fewer tokens, or upgrade transformers"
            )
        spans = [(first, recomputed), (recomputed + 1, last)]
    present: Any = installed(base)
    for part in present.length_parts:
        if any(part.name(None, start) != part.name(None, end) for start, end in spans):
            total = last + 1  # the last new token is not read again
            raise ValueError(
                f"{part.encoding} depends on the sequence length: this generation may reach "
                f"{total} tokens, where the cached keys of the {prompt} tokens of the prompt would "
                f"not fit. Call wavepe.hf.fix_length(model, {total}) first, ask for fewer tokens, "
                "or pass use_cache=False"
            )


def check_lengths(model: nn.Module) -> None:
    """Let `generate` check its lengths if the model's keys depend on the sequence length."""
    base = families.decoder(model)
    present: Any = installed(base)
    needed = present.length_parts or families.recomputes_keys_after(base.config)
    if needed and hasattr(type(model), GENERATE_HOOK):
        # a partial, because a copy or a pickle of the model takes it along
        model.__dict__[GENERATE_HOOK] = functools.partial(_checked_cache, model)
