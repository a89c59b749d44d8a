"""Models of vLLM with the position encodings of wavepe, on CPUs.

The model code is vLLM's. In each attention layer the rotary module becomes an identity, and
`Attend` becomes the implementation of attention: it rotates, keeps keys and values in pages, and
attends with the encoding of the layer. vLLM calls it as one operator, also in a compiled model.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from vllm import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from wavepe.encodings import Encoding
from wavepe.encodings import encoding as read_encoding
from wavepe.encodings.base import combine
from wavepe.hf.config import CLASS_PREFIX
from wavepe.hf.layers import LayerEncodings
from wavepe.hf.learned import MODULE_NAME
from wavepe.hf.rope_config import Slot
from wavepe.hf.rotary import RopeRotation
from wavepe.ops._attention_ragged import keys_of_request
from wavepe.positions import CacheState, Learned, PositionEncoding, Requests, named_as_in
from wavepe.positions.absolute import AbsoluteVectors


@functools.cache
def served_class(stock: str) -> Any:
    """Return the class of vLLM of that name, with the encoding that its configuration names."""
    base = ModelRegistry.models[stock].load_model_cls()
    return type(CLASS_PREFIX + stock, (Served, base), {"__module__": __name__})


class Served(nn.Module):
    """Mixin that installs the encoding of the configuration in a model of vLLM."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        choice = LayerEncodings(vllm_config.model_config.hf_config.position_encoding)
        refuse(choice, vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        install(self.model, choice, vllm_config.model_config)


def refuse(choice: LayerEncodings, vllm_config: Any) -> None:
    """Raise ValueError for what this plug-in cannot carry."""
    parallel, dtype = vllm_config.parallel_config, vllm_config.cache_config.cache_dtype
    for encoding in choice.encodings:
        if "input_decay" in encoding.learns:
            raise ValueError(
                f"{encoding} keeps a decay beside each key, and the pages of vLLM have no room for "
                "it: serve this model with transformers"
            )
    problem = ""
    if not current_platform.is_cpu():
        problem = f"runs on CPUs only, got {current_platform.device_name}"
    elif not getattr(vllm_config.model_config.hf_config, "is_causal", True):
        problem = "needs causal models, got config.is_causal=False"
    elif parallel.world_size > 1:
        problem = f"needs the whole model in one process, got {parallel.world_size} processes"
    elif dtype != "auto":
        problem = f"keeps keys in the dtype of the model, got --kv-cache-dtype {dtype}"
    if problem:
        raise ValueError(f"wavepe's plug-in for vLLM {problem}")


def install(decoder: Any, choice: LayerEncodings, model_config: Any) -> None:
    """Give each layer of a decoder of vLLM its encoding; ValueError if one does not fit.

    What follows the length of a sequence is fixed to the longest that is served.
    """
    config, longest = model_config.hf_config, model_config.max_model_len
    layers = [layer.self_attn for layer in decoder.layers]
    size, dim = (layers[0].attn.head_size, layers[0].attn.num_heads), config.hidden_size
    trained, learned = config.max_position_embeddings, choice.learned
    shared = None
    if learned is not None:
        shared = Learned(learned, *size, True, layer=False, dim=dim)
        decoder.add_module(MODULE_NAME, shared)
    state = CacheState()
    bare = read_encoding("rope")
    for attention, chosen in zip(layers, choice.by_layer([True] * len(layers)), strict=True):
        encoding = in_attention(bare if chosen is None else chosen, config, size[0])
        named = encoding if learned is None else named_as_in(learned, encoding)
        module = PositionEncoding(
            named, *size, causal=True, trained_length=trained, layer=True, dim=dim
        )
        module.fix(longest)
        attention.add_module(MODULE_NAME, module)
        attention.rotary_emb = Unrotated()
        attention.attn.attn_backend = Backend
        attention.attn.impl = Attend(attention.attn.impl, module, shared, state)
        if encoding.reads_input:
            attention.register_forward_pre_hook(attention.attn.impl.keep_input, with_kwargs=True)
            decoder.do_not_compile = True  # a compiled model would run the hook once
    if choice.everywhere is not None and choice.everywhere.adds:
        vectors = AbsoluteVectors(choice.everywhere, dim, trained)
        vectors.fix(longest)
        decoder.layers[0].register_forward_pre_hook(functools.partial(add_vectors, vectors))


def in_attention(encoding: Encoding, config: Any, head_dim: int) -> Encoding:
    """Return what acts in attention; a rope without a base has that of the model."""
    parts = [part for part in encoding.parts if not part.adds]
    for index, part in enumerate(parts):
        if part.rotates:
            parts[index] = RopeRotation(config, Slot(), head_dim, part).encoding
    return combine([(part, None) for part in parts or [read_encoding("none")]])


def add_vectors(vectors: AbsoluteVectors, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add the vectors of the positions to the input of the first decoder layer (hook)."""
    positions, x, *rest = args
    return positions, x + vectors(positions[None])[0].to(x.dtype), *rest


class Unrotated(nn.Module):
    """Stand where vLLM rotates queries and keys; `Attend` does."""

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k


class Batch:
    """The requests of one step, for all layers of a kind."""

    def __init__(self, metadata: Any, page: int) -> None:
        self.positions: Tensor = metadata.positions[None]
        slots = metadata.slot_mapping
        self.slots = (slots // page, slice(None), slots % page)
        self.longest = metadata.max_seq_len
        self.table = metadata.block_table_tensor
        self.begins = {
            "cu_seqlens_q": metadata.query_start_loc,
            "cu_seqlens_k": pad(metadata.seq_lens.cumsum(0), (1, 0)),
        }

    @functools.cached_property
    def in_pages(self) -> Requests:
        """The requests, whose keys are in pages."""
        return Requests({**self.begins, "block_table": self.table}, (), self.longest)

    @functools.cached_property
    def in_a_row(self) -> Requests:
        """The requests, whose keys are in a row as `row` returns them."""
        return Requests.of(self.begins["cu_seqlens_q"], self.begins["cu_seqlens_k"], None)

    def row(self, pages: Tensor) -> Tensor:
        """Return the entries of all requests, (1, Hk, tokens, 2 d), of pages."""
        slices = pairwise(self.begins["cu_seqlens_k"].tolist())
        rows = [keys_of_request(pages, self.table, r, slice(*x)) for r, x in enumerate(slices)]
        return torch.cat(rows, 2)


class Builder(AttentionMetadataBuilder):
    """Build what `Attend` needs to know of a step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    def build(self, common_prefix_len: int, metadata: Any, fast_build: bool = False) -> Batch:
        return Batch(metadata, self.kv_cache_spec.block_size)


class Backend(CPUAttentionBackend):
    """vLLM's backend for CPUs, with pages of a plain layout: (blocks, Hk, page, 2 d)."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder

    @staticmethod
    def get_impl_cls() -> Any:
        return Attend


class Attend(CPUAttentionBackendImpl):
    """The attention of one layer, with the options that vLLM gave to `stock`."""

    def __init__(
        self, stock: Any, encoding: PositionEncoding, shared: Learned | None, state: CacheState
    ) -> None:
        self.__dict__.update(vars(stock))
        self.encoding, self.shared, self.state = encoding, shared, state
        self.input: Tensor | None = None
        # Such parts change all keys in each call.
        part = encoding.encoding
        extends = getattr(part.rotary, "self_extend", None) is not None
        self.changes_keys = part.has_vectors or extends
        self.options = {
            "scale": self.scale,
            "window": None if self.sliding_window < 0 else self.sliding_window,
            "softcap": float(self.logits_soft_cap) or None,
            "sinks": self.sinks,
        }

    def keep_input(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the input of the layer for an encoding that reads it (hook)."""
        self.input = kwargs["hidden_states"]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **fused: Any,
    ) -> Tensor:
        """Write to `output` (tokens, H, d), and return it.

        query (tokens, H, d), key and value (tokens, Hk, d) are those of all requests in a row, and
        kv_cache is (blocks, Hk, page, 2 d).
        """
        if attn_metadata is None:  # vLLM measures memory
            return output
        batch, encoding = attn_metadata, self.encoding
        count = batch.positions.shape[1]
        q, k, v = (x[:count].transpose(0, 1)[None] for x in (query, key, value))
        q, k, rotated = encoding.rotate(q, k, batch.positions, None)
        kv_cache[batch.slots] = torch.cat([k[0], v[0]], -1).transpose(0, 1)
        shared = None if self.shared is None else self.shared(batch.longest, self.state.learned)
        x = None if self.input is None else self.input[None, :count]
        learned = encoding.learn(batch.longest, self.state, shared, x)
        pages, requests = kv_cache, batch.in_pages
        if self.changes_keys:
            pages, requests = batch.row(kv_cache), batch.in_a_row
        k, v = pages.split(q.shape[3], -1)
        options = {"positions": batch.positions, "requests": requests, **self.options}
        out = encoding.score_terms.attend(q, k, v, learned, rotated, **options)
        output[:count] = out[0].transpose(0, 1)
        return output
