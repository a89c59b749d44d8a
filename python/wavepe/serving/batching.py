"""Continuous batching of transformers: many requests in one row, their keys in a paged cache.

A manager of transformers takes attention implementations by their name. Here it takes "wavepe",
too, for models with an encoding. Their layers find the requests in their pass (hf/passes.py), and
all else stays transformers'.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching import continuous_api
from transformers.models.llama.modeling_llama import LlamaAttention

from ..hf import families
from ..hf.install import Installed, installed
from ..hf.layers import spec_text
from ..positions import Lengths

Manager: Any = continuous_api.ContinuousBatchingManager
SPEC = "_wavepe_spec"  # attribute of a manager: the encoding of the keys in its cache
# Their layers do not give a paged cache what it needs, or have sizes that it does not know.
NOT_CARRIED = ("gemma4_text", "gpt_neox", "inkling_text", "inkling2_text", "stablelm")


def register() -> None:
    """Let the managers of transformers take models with an encoding.

    Before transformers 5.24 the layers do not read the paged cache. There managers refuse the
    attention "wavepe" by its name.
    """
    if "cache" in inspect.signature(inspect.unwrap(LlamaAttention.forward)).parameters:
        _extend("__init__", _init)
        _extend("switch_to_cb_friendly_attn", _switch)
        _extend("_create_batch_processor", _create)


def _extend(name: str, extension: Callable[..., Any]) -> None:
    """Let a method of the managers become `extension`, which gets the old one first."""
    method = getattr(Manager, name)

    @functools.wraps(method)
    def extended(self: Any, *args: Any, **kwargs: Any) -> Any:
        return extension(functools.partial(method, self), self, *args, **kwargs)

    setattr(Manager, name, extended)


def _encoding(model: Any) -> tuple[Any, Installed | None]:
    """Return the base model with an encoding in `model`, and the record of it; or two None."""
    records = ((module, installed(module)) for module in model.modules())
    return next((pair for pair in records if pair[1] is not None), (None, None))


def _switch(switch: Any, manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Let the model keep its attention; ValueError if it cannot be batched continuously."""
    base, record = _encoding(model)
    spec = "" if record is None else spec_text(record.spec)
    if (filled := vars(manager).setdefault(SPEC, spec)) != spec:
        raise ValueError(
            f"the cache of this manager was filled with {filled or 'no encoding'}, and the model "
            f"has {spec or 'none'} now: call model.destroy_cached_continuous_batching_manager() "
            "first"
        )
    if record is None:
        switch(model, *args, **kwargs)
    else:
        _check(base)


def _check(base: Any) -> None:
    """Raise ValueError if a base model with an encoding cannot be batched continuously."""
    family = families.of(base.config).model_type
    remedy = "call generate() instead, or serve without continuous batching"
    if family in NOT_CARRIED:
        raise ValueError(
            f"continuous batching does not take a {family}, stock or with an encoding, because "
            f"its layers do not know the paged cache: {remedy}"
        )
    if not getattr(base.config, "is_causal", True):
        raise ValueError(f"continuous batching is causal, got config.is_causal=False: {remedy}")
    for layer in families.attentions(base):
        if layer.wavepe.score is not None and layer.wavepe.score.has_decay:
            raise ValueError(
                f"{layer.wavepe.score.encoding} keeps the decay of each token beside its key, and "
                f"the paged cache of continuous batching has no room for it: {remedy}"
            )


def _init(init: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse settings by which a pass would not read its requests."""
    init(*args, **kwargs)
    _, record = _encoding(manager.model)
    if record is None:
        return
    config = manager.continuous_batching_config
    compiled = config.varlen_compile_config or config.decode_compile_config
    if compiled or any(config.use_cuda_graph or ()):
        raise ValueError(
            f"continuous batching with {spec_text(record.spec)} reads the requests of each pass, "
            "so it takes no CUDA graphs and no compilation: leave use_cuda_graph and the compile "
            "settings out"
        )
    if record.length_parts:  # the keys of a prefix depend on the length of the request
        config.allow_block_sharing = False


def _create(create: Any, manager: Any) -> Any:
    """Let passes find the lengths of their requests, by the cache of a new processor."""
    processor = create()
    if _encoding(manager.model)[1] is not None and not hasattr(processor.cache, "request_lengths"):
        processor.cache.request_lengths = functools.partial(_request_lengths, processor)
        _limit(processor)
    return processor


def _limit(processor: Any) -> None:
    """Keep requests from outgrowing the whole cache, which would end the manager and all others."""
    from transformers.generation.continuous_batching import model_runner, requests  # not in 5.0

    cache = processor.cache
    if cache.can_store_request_tokens(requests.RequestState("", []), 1 << 40, dry_run=True):
        return  # windows in all layers
    most = model_runner.infer_max_single_request_tokens(cache)
    add = processor.scheduler.add_waiting_request

    def add_if_it_fits(state: Any) -> None:
        if _length(state) - (state.max_new_tokens is not None) > most:  # the last one is not stored
            raise ValueError(
                f"{len(state.initial_tokens)} tokens and {state.max_new_tokens or 'any'} new ones "
                f"do not fit the cache, which holds {most}: ask for fewer tokens, or give the "
                "cache more blocks (num_blocks)"
            )
        if state.max_new_tokens is None:
            state._new_tokens_limit = most + 1 - len(state.initial_tokens)
        add(state)

    processor.scheduler.add_waiting_request = add_if_it_fits


def _request_lengths(processor: Any) -> Lengths:
    """Return the tokens of each request in the current row, and its length."""
    inputs = processor.inputs_and_outputs
    if hasattr(inputs, "io_pairs"):  # of asynchronous batching
        inputs = inputs.io_pairs[inputs.current_pair].host_io
    return [(x.query_length, _length(x.state)) for x in inputs.requests_in_batch]


def _length(state: Any) -> int:
    """Return the length of a request: that of its prompt and of all new tokens.

    The last token must find keys that fit. So the length is the same in every pass, also after a
    request has lost its keys and begun again. Without a limit it is that of the prompt.
    """
    if state.max_new_tokens is None:
        return state._true_initial_tokens or len(state.initial_tokens)
    return len(state.initial_tokens) + state.max_new_tokens
