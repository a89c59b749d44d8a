"""The hook of an attention layer of a patched model, and what it keeps on the layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from ..positions import LearnedCache, Rotated, Scores, Terms
from . import families, foreign
from .layers import spec_text
from .learned import MODULE_NAME, SharedLearned
from .pairs import Layout
from .passes import PASS, Pass
from .rotary import CosSin, Rotary

# The argument is the number of queries; transformers 5.0 takes their places instead.
SIZES_BY_LENGTH = "query_length" in inspect.signature(Cache.get_mask_sizes).parameters


@dataclass
class LayerState:
    """The state that wavepe keeps on an attention layer, as its attribute `wavepe`.

    Attributes
    ----------
    names : tuple of str
        Names of the positional arguments of the layer's forward.
    score : Scores, optional
        What the encoding adds to the scores.
    shared : SharedLearned, optional
        The parameters that all layers share. A layer's own are in its module `position_encoding`.
    angle_layout : Layout, optional
        The form of the angles, if the encoding rotates queries whose other terms read them without
        the rotation.
    rotation : int, optional
        Index of this layer's rotation, if the model has several.
    rotary : Rotary, optional
        Module that computes the angles, for a layer that stands alone, outside a model.
    learns : bool
        Whether the encoding in the scores has parameters.
    """

    names: tuple[str, ...]
    score: Scores | None = None
    shared: SharedLearned | None = None
    angle_layout: Layout | None = None
    rotation: int | None = None
    rotary: Rotary | None = None
    learns: bool = False

    def set_score(self, score: Scores) -> None:
        """Set what the encoding adds to the scores."""
        self.score, self.learns = score, bool(score.encoding.learns)

    def learned(self, module: Any, keys: int, this: Pass, x: Tensor | None = None) -> Terms:
        """Return what the encoding of this layer, the attention `module` of x, has learned."""
        shared: Terms = {}
        of_layer = module._modules.get(MODULE_NAME)
        if of_layer is None and self.shared is None:
            return shared
        varies = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if this.kept is None and this.cache is not None and not varies:
            this.kept = LearnedCache.of(this.cache)
        if self.shared is not None:
            if varies:
                shared = self.shared(keys)
            elif keys in this.terms:
                shared = this.terms[keys]
            else:
                shared = this.terms[keys] = self.shared(keys, this.kept)
        return shared if of_layer is None else of_layer(keys, this.kept, shared, x)


STOCK = LayerState(())


class CacheWithDecay:
    """Wrap a layer's cache so that each key is stored together with its token's decay."""

    def __init__(self, cache: Any, add: Callable[[Tensor], Tensor]) -> None:
        self._cache, self._add = cache, add

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, keys: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Add keys and values to the cache, and return all of them."""
        return self._cache.update(self._add(keys), *args, **kwargs)


class AnglesAndPass(NamedTuple):
    """The angles of a pass, and the pass."""

    angles: Any
    this: Pass


def before_layer(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let the angles carry the pass, because this decoder layer drops other arguments (hook)."""
    angles = AnglesAndPass(kwargs["position_embeddings"], kwargs[PASS])
    return args, kwargs | {"position_embeddings": angles}


def before_attention(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tell a layer's attention of its pass, and give the layer its angles (forward pre-hook)."""
    layer: LayerState = module.wavepe
    if args:
        kwargs = dict(zip(layer.names, args, strict=False)) | kwargs
    this: Pass | None = kwargs.get(PASS)
    if this is None and type(carried := kwargs.get("position_embeddings")) is AnglesAndPass:
        kwargs["position_embeddings"], this = carried
        kwargs[PASS] = this
    if this is None:  # the layer stands alone, or is called outside of a pass of its model
        this = kwargs[PASS] = Pass((), (), kwargs, module.layer_idx)
        this.kwargs = {}
    if this.waiting:
        raise foreign.forward_replaced(type(module), module.config)
    this.ran = this.waiting = True
    hidden = kwargs["hidden_states"]
    this.hidden = hidden if layer.learns else None
    if this.cache is not None and not this.queries_last:
        this.offset = _offset(module, this, hidden.shape[1])
    if layer.rotary is not None:
        if layer.rotary.training != module.training:  # no child: module.train() does not reach it
            layer.rotary.train(module.training)
        kwargs["position_embeddings"] = layer.rotary(hidden, this.counted_positions())
    elif layer.rotation is not None:
        kwargs["position_embeddings"] = kwargs["position_embeddings"][layer.rotation]
    angles = kwargs.get("position_embeddings")
    if type(angles) is not CosSin and not (angles is None and families.gets_no_angles(module)):
        raise ValueError(
            f"this {type(module).__name__} has the position encoding "
            f"{spec_text(module.config.position_encoding)!r}, but its angles come from a module "
            "that is not wavepe's: leave the model's rotary_emb in place, or call "
            "wavepe.hf.unpatch(model) first"
        )
    if layer.angle_layout is None:
        this.rotated = None
    elif angles is not this.angles or this.rotated is None:  # most layers share them
        assert angles is not None
        cos, sin = map(layer.angle_layout.narrow, angles)
        this.angles, this.rotated = angles, Rotated(cos, sin, layer.angle_layout.interleaved)
    if layer.score is not None and layer.score.has_decay:
        _keep_decay(module, layer, layer.score, this, kwargs)
    return (), kwargs


def after_attention(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Raise ValueError if the layer, which stands alone, has left the encoding out (hook)."""
    if kwargs[PASS].waiting:
        raise foreign.forward_replaced(type(module), module.config)


def _keep_decay(
    module: Any, layer: LayerState, score: Scores, this: Pass, kwargs: dict[str, Any]
) -> None:
    """Let the cache, if there is one, hold each token's decay beside its key."""
    hidden, cache = this.hidden, families.cache_in(kwargs)  # the model may have made it
    if cache is None or hidden is None:
        return
    unknown = isinstance(this.cached, Tensor)  # a static cache counts in a tensor
    size: Any = 1 if unknown else this.cached + hidden.shape[1]
    learned = layer.learned(module, size, this, hidden)
    this.learned = None if unknown else learned
    name = next(name for name in families.CACHE_NAMES if kwargs.get(name) is cache)
    kwargs[name] = CacheWithDecay(cache, lambda keys: score.with_decay(keys, learned))


def _offset(module: Any, this: Pass, queries: int) -> int | Tensor:
    """Return the index of the key at the position of the first query.

    A layer that reuses the keys of another one has no entry in the cache. For a static cache the
    index is a tensor () of its own: the cache goes on counting in its tensor while the layer runs.
    """
    if families.reuses_keys(module):
        return this.offsets[module.layer_type]
    cached = this.cached
    if hasattr(this.cache, "get_query_offset"):
        cached = this.cache.get_query_offset(module.layer_idx)
        cached = cached.clone() if isinstance(cached, Tensor) else cached
    size = queries if SIZES_BY_LENGTH else torch.arange(queries) + cached
    _, first = this.cache.get_mask_sizes(size, module.layer_idx)
    offset = cached - first
    if families.stores_keys(module):
        this.offsets[module.layer_type] = offset
    return offset
