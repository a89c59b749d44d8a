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
from . import families
from .layers import spec_text
from .learned import MODULE_NAME, SharedLearned
from .pairs import Layout
from .passes import PASS, Args, Kwargs, Pass
from .replaced_code import replaced
from .rotary import CosSin, Rotary
from .rotary_check import check_config, check_rope
from .sequences import measures_tokens

# The argument is the number of queries; transformers 5.0 takes their places instead.
SIZES_BY_LENGTH = "query_length" in inspect.signature(Cache.get_mask_sizes).parameters


@dataclass
class LayerState:
    """The state that wavepe keeps on an attention layer, as its attribute `wavepe`."""

    names: tuple[str, ...]  # of the positional arguments of the layer's forward
    score: Scores | None = None
    shared: SharedLearned | None = None  # a layer's own are in its module `position_encoding`
    rope: dict[str, Any] | None = None  # parameters; {}: its own base; None: it has no positions
    angle_layout: Layout | None = None  # if terms of a rotary encoding read queries unrotated
    rotation: int | None = None  # index of this layer's rotation, if the model has several
    rotary: Rotary | None = None  # of a layer that stands alone
    learns: bool = False  # whether the encoding in the scores has parameters
    counts: bool = False  # whether it measures distances in tokens

    def set_score(self, score: Scores) -> None:
        """Set what the encoding adds to the scores."""
        self.score, self.learns = score, bool(score.encoding.learns)
        self.counts = measures_tokens(score.encoding)

    def learned(self, module: Any, keys: int, pass_: Pass, x: Tensor | None = None) -> Terms:
        """Return what the encoding of this layer, the attention `module` of x, has learned."""
        shared: Terms = {}
        layer_module = module._modules.get(MODULE_NAME)
        if layer_module is None and self.shared is None:
            return shared
        varies = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if pass_.kept is None and pass_.cache is not None and not varies:
            pass_.kept = LearnedCache.of(pass_.cache)
        if self.shared is not None:
            if varies:
                shared = self.shared(keys)
            elif keys in pass_.terms:
                shared = pass_.terms[keys]
            else:
                shared = pass_.terms[keys] = self.shared(keys, pass_.kept)
        return shared if layer_module is None else layer_module(keys, pass_.kept, shared, x)


STOCK = LayerState(())


class CacheWithDecay:
    """Wrap a layer's cache so that each key is stored together with its token's decay."""

    def __init__(self, cache: Any, add: Callable[[Tensor], Tensor]) -> None:
        self._cache, self._add = cache, add

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, keys: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Add keys and values to the cache, and return all of them."""
        try:
            return self._cache.update(self._add(keys), *args, **kwargs)
        except RuntimeError as error:  # its keys were allocated without the columns
            raise ValueError(
                f"this {type(self._cache).__name__} has no room for the decay of each token, which "
                "the position encoding keeps beside the keys: use a DynamicCache"
            ) from error


class AnglesAndPass(NamedTuple):
    """The angles of a pass, and the pass."""

    angles: Any
    pass_: Pass


def before_layer(module: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Let the angles carry the pass, because this decoder layer drops other arguments (hook)."""
    angles = AnglesAndPass(kwargs["position_embeddings"], kwargs[PASS])
    return args, kwargs | {"position_embeddings": angles}


def before_attention(module: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Tell a layer's attention of its pass, and give the layer its angles (forward pre-hook)."""
    layer: LayerState = module.wavepe
    if args:
        kwargs = dict(zip(layer.names, args, strict=False)) | kwargs
    pass_: Pass | None = kwargs.get(PASS)
    if pass_ is None and type(carried := kwargs.get("position_embeddings")) is AnglesAndPass:
        kwargs["position_embeddings"], pass_ = carried
        kwargs[PASS] = pass_
    if pass_ is None:  # the layer stands alone, or is called outside of a pass of its model
        pass_ = kwargs[PASS] = Pass((), (), kwargs, module.layer_idx)
        pass_.kwargs = {}
    if pass_.waiting:
        raise replaced(f"the forward of this {type(module).__name__}", module.config)
    pass_.ran = pass_.waiting = True
    hidden = kwargs["hidden_states"]
    pass_.hidden = hidden if layer.learns else None
    if pass_.cache is not None and not pass_.queries_last:
        pass_.offset = _offset(module, pass_, hidden.shape[1])
    if layer.rotary is not None:
        check_config(module.config, module._wavepe.spec)
        check_rope(module, module.config, module.layer_idx)
        if layer.rotary.training != module.training:  # no child: module.train() does not reach it
            layer.rotary.train(module.training)
        kwargs["position_embeddings"] = layer.rotary(hidden, pass_.counted_positions())
    elif layer.rotation is not None:
        kwargs["position_embeddings"] = kwargs["position_embeddings"][layer.rotation]
    angles = kwargs.get("position_embeddings")
    if type(angles) is not CosSin and not (angles is None and layer.rope is None):
        raise ValueError(
            f"this {type(module).__name__} has the position encoding "
            f"{spec_text(module.config.position_encoding)!r}, but its angles come from a module "
            "that is not wavepe's: leave the model's rotary_emb in place, or call "
            "wavepe.hf.unpatch(model) first"
        )
    if layer.angle_layout is None:
        pass_.rotated = None
    elif angles is not pass_.angles or pass_.rotated is None:  # most layers share them
        assert angles is not None
        cos, sin = map(layer.angle_layout.narrow, angles)
        pass_.angles, pass_.rotated = angles, Rotated(cos, sin, layer.angle_layout.interleaved)
    if layer.score is not None and layer.score.has_decay:
        _keep_decay(module, layer, pass_, kwargs)
    return (), kwargs


def after_attention(module: Any, args: Args, kwargs: Kwargs, output: Any) -> None:
    """Raise ValueError if the layer, which stands alone, has left the encoding out (hook)."""
    if kwargs[PASS].waiting:
        raise replaced(f"the forward of this {type(module).__name__}", module.config)


def _keep_decay(module: Any, layer: LayerState, pass_: Pass, kwargs: Kwargs) -> None:
    """Let the cache, if there is one, hold each token's decay beside its key."""
    names = (name for name in families.CACHE_NAMES if hasattr(kwargs.get(name), "get_seq_length"))
    name, hidden = next(names, None), pass_.hidden  # the model may have made the cache
    if name is None or hidden is None:
        return
    unknown = isinstance(pass_.cached, Tensor)  # a static cache counts in a tensor
    size: Any = 1 if unknown else pass_.cached + hidden.shape[1]
    learned = layer.learned(module, size, pass_, hidden)
    pass_.learned = None if unknown else learned
    score: Any = layer.score
    kwargs[name] = CacheWithDecay(kwargs[name], lambda keys: score.with_decay(keys, learned))


def _offset(module: Any, pass_: Pass, queries: int) -> int | Tensor:
    """Return the index of the key at the position of the first query."""
    if families.reuses_keys(module):  # it has no entry in the cache
        return pass_.reused[module.layer_type]
    cached = pass_.cached
    if hasattr(pass_.cache, "get_query_offset"):
        cached = pass_.cache.get_query_offset(module.layer_idx)
        # a static cache goes on counting in its tensor while the layer runs
        cached = cached.clone() if isinstance(cached, Tensor) else cached
    size = queries if SIZES_BY_LENGTH else torch.arange(queries) + cached
    _, first = pass_.cache.get_mask_sizes(size, module.layer_idx)
    offset = cached - first
    if families.stores_keys(module):
        pass_.reused[module.layer_type] = offset
    return offset
