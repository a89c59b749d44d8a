"""Encodings that follow the length of the sequence, in models that write one token after another.

Such an encoding has other frequencies or vectors for each length, and keys in a cache keep those of
the length at which they were computed.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import transformers
from torch import nn

from .. import _checks
from . import families
from .install import installed

M = TypeVar("M", bound=nn.Module)
METHOD = "_prepare_cache_for_generation"


def fix_length(model: M, length: int | None) -> M:
    """Let an encoding that follows the length be that of `length` tokens in every call.

    Frequencies (``rope`` with ``inference_theta=scaled``, ``type=dynamic``, ``type=longrope``) and
    vectors (``normalised``, ``sinusoidal`` with ``theta=length`` or ``reversed=true``) are then the
    same for all tokens that `generate` writes, so that a cache works. Other encodings stay as they
    are. It is not saved with the model, and ends with `unpatch`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A patched model, or a wavepe_<family>.
    length : int or None
        Prompt and new tokens together. A longer sequence takes the same frequencies. None lets
        the encoding follow the length of each call again.

    Returns
    -------
    The model. It refuses a cache that was filled with other frequencies.

    Raises
    ------
    TypeError
        Not a model of a family that `patch` takes.
    ValueError
        A length below 1, or a stock model.

    Examples
    --------
    >>> import torch, wavepe.hf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    ...     num_attention_heads=2, max_position_embeddings=16))
    >>> model = wavepe.hf.patch(model, "rope:inference_theta=scaled").eval()
    >>> model = wavepe.hf.fix_length(model, 40)
    >>> tuple(model.generate(torch.arange(1, 9)[None], max_new_tokens=32, do_sample=False).shape)
    (1, 40)
    """
    present = installed(families.decoder(model))
    if present is None:
        raise ValueError(
            f"fix_length needs a model with a position encoding of wavepe, and this "
            f"{type(model).__name__} has its own: wavepe.hf.patch(model) first"
        )
    if length is not None:
        length = _checks.integer("length", length, 1)
    for follower in present.follows:
        follower.fix(length)
    return model


class LengthCheck:
    """In the place of a method that `generate` calls before its first token.

    A generation that would outgrow its keys stops there, not after half of its tokens.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError where the keys of the prompt would not fit the last token."""
        method = getattr(type(self.model), METHOD)
        given = inspect.signature(method).bind(self.model, *args, **kwargs).arguments
        config, inputs = given["generation_config"], given["model_kwargs"]
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        if config.use_cache and (mask is not None or positions is not None):
            if mask is None:  # it had no zeros, and transformers has dropped it
                longest = columns = int(positions.max()) + 1
            else:
                longest, columns = int(mask.sum(1).max()), mask.shape[1]
            first = min(longest, config.prefill_chunk_size or longest)
            last = given["max_cache_length"] - (columns - longest)
            if last >= longest:  # else the ids go on from a cache, and the whole is not known here
                self.check(first, longest, last)
        return method(self.model, *args, **kwargs)

    def check(self, first: int, prompt: int, last: int) -> None:
        """Check the lengths of the longest row: first call, prompt, last call."""
        base = families.decoder(self.model)
        anew = families.starts_anew_after(base.config)
        spans = [(first, last)]
        if prompt <= anew < last:
            if families.FORGETS:
                raise ValueError(
                    f"transformers {transformers.__version__} forgets all earlier tokens where a "
                    f"Phi-3 passes {anew} tokens (original_max_position_embeddings), stock or "
                    "patched: pass use_cache=False, ask for fewer tokens, or upgrade transformers"
                )
            spans = [(first, anew), (anew + 1, last)]
        for part in _following(base):
            if any(part.name(None, start) != part.name(None, end) for start, end in spans):
                whole = last + 1  # the last token is written, and not read
                raise ValueError(
                    f"{part.encoding} follows the length of the sequence: cached keys of the "
                    f"{prompt} tokens of the prompt would not fit at {whole} tokens, which this "
                    f"generation may reach. Call wavepe.hf.fix_length(model, {whole}) first, ask "
                    "for fewer tokens, or pass use_cache=False"
                )


def _following(base: Any) -> list[Any]:
    present: Any = installed(base)
    return present.follows


def check_lengths(model: nn.Module) -> None:
    """Let a model that generates check lengths before, where its encoding follows them."""
    base = families.decoder(model)
    needed = _following(base) or families.starts_anew_after(base.config)
    if needed and hasattr(type(model), METHOD):
        model.__dict__[METHOD] = LengthCheck(model)
