"""Continuous batching of transformers: many requests in one row, their keys in a paged cache.

A manager of transformers knows the attention implementations that read its cache, and refuses
others by name. Here it takes "wavepe" for models with an encoding, whose layers find the requests
in their pass (hf/passes.py). All else stays transformers'.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers.generation.continuous_batching import continuous_api

from ..hf import families
from ..hf.install import installed
from ..hf.layers import spec_text
from ..hf.passes import LENGTHS

Manager: Any = continuous_api.ContinuousBatchingManager
_SWITCH, _CREATE = "switch_to_cb_friendly_attn", "_create_batch_processor"
SPEC = "_wavepe_spec"  # attribute of a manager: the encoding of the keys in its cache


def _record(model: Any) -> Any:
    """Return the record of the encoding of a model, or None for a stock one."""
    base = getattr(model, "base_model", None)
    return None if base is None else installed(base)


def check(model: Any) -> None:
    """Raise ValueError if a model with an encoding cannot be batched continuously."""
    base = families.decoder(model)
    for layer in families.attentions(base):
        score = layer.wavepe.score
        if score is not None and score.has_decay:
            raise ValueError(
                f"{score.encoding} keeps a number of each token beside its key, for which the "
                "paged cache of continuous batching has no room: generate without it"
            )


def register() -> None:
    """Let managers take the attention of wavepe, in versions of transformers that have them."""
    if not (hasattr(Manager, _SWITCH) and hasattr(Manager, _CREATE)):
        return  # before transformers 5.24: it refuses the name of the attention
    switch, create = getattr(Manager, _SWITCH), getattr(Manager, _CREATE)

    @functools.wraps(switch)
    def checked_switch(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        record = _record(model)
        spec = "" if record is None else spec_text(record.spec)
        if vars(self).setdefault(SPEC, spec) != spec:
            raise ValueError(
                f"the cache of this manager holds keys of {getattr(self, SPEC) or 'no encoding'!r}, "
                f"and the model has {spec or 'none'!r} now: call "
                "model.destroy_cached_continuous_batching_manager() first"
            )
        if record is None:
            switch(self, model, *args, **kwargs)
        else:
            check(model)

    @functools.wraps(create)
    def create_with_lengths(self: Any) -> Any:
        record = _record(self.model)
        if record is None:
            return create(self)
        if record.length_parts:  # a prefix of another request would have other keys
            self.continuous_batching_config.allow_block_sharing = False
        processor = create(self)
        setattr(processor.cache, LENGTHS, functools.partial(_lengths, processor))
        return processor

    setattr(Manager, _SWITCH, checked_switch)
    setattr(Manager, _CREATE, create_with_lengths)


def _lengths(processor: Any) -> list[int]:
    """Return the length of each request in the current row: its prompt and all new tokens.

    It is the same in all passes of a request, also if its cache was dropped and it begins again.
    """
    states = [x.state for x in processor.inputs_and_outputs.requests_in_batch]
    return [
        len(x.initial_tokens) + x.max_new_tokens
        if x.max_new_tokens is not None
        else x._true_initial_tokens or len(x.initial_tokens)
        for x in states
    ]
