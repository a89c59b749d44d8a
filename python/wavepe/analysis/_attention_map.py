"""Attention weights of a model, and how far back they reach [W]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from .. import _checks
from ._models import check_tokens, evaluating, last_logits, need_transformers, other_globals

if TYPE_CHECKING:
    import torch

# By these globals of its forward a layer of transformers finds its attention function.
_INTERFACE, _EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"


def attention_map(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    """Return the attention weights of every layer and head: who attends to whom.

    Each layer's own attention function is asked, whichever it is (eager, sdpa, wavepe): the weights
    are its output for values that are the columns of the identity. So windows, soft caps and every
    position encoding are in them as the model has them.

    Parameters
    ----------
    model : torch.nn.Module
        A causal model of transformers: stock, patched, or of a type wavepe_<family>. It is
        restored, also after an error.
    tokens : torch.Tensor, shape (n,), any integer dtype
        Token ids.

    Returns
    -------
    ndarray, float32 (layers, heads, n, n)
        Weights after the softmax, [query, key]: rows sum to 1, and are 0 above the diagonal. In a
        family with attention sinks (GPT-OSS) the rest of a row is the sink's. float64 of a model in
        float64.

    Raises
    ------
    TypeError
        `model` is no module, or `tokens` no integer tensor.
    ValueError
        A model that gives no attention weights or is not causal, a wrong shape, or ids outside the
        vocabulary.
    """
    need_transformers("attention_map")
    tokens = check_tokens(model, tokens, 1, "one")
    seen: list[np.ndarray] = []
    watch = _Watch(seen)
    with evaluating(model), other_globals(model, watch.choose):
        if watch.layers:
            last_logits(model, tokens[None], 1)
    if not seen:  # of a family that does not use transformers' attention interface
        seen = _told(model, tokens)
    if len({weights.shape for weights in seen}) > 1:
        raise ValueError(
            f"the layers of this {type(model).__name__} have different numbers of heads, "
            f"{sorted({len(weights) for weights in seen})}: one array does not hold them"
        )
    found = np.stack(seen)
    if np.triu(found, 1).any():
        raise ValueError(
            f"this {type(model).__name__} attends to later tokens: needs a causal model"
        )
    return found


def attention_window(map: ArrayLike, threshold: float = 1e-3) -> np.ndarray:
    """Return how many tokens each head looks back, itself included.

    That is 1 + the largest distance delta whose mean weight, over the queries that have such a key,
    is at least `threshold`; 0 where there is none.

    Parameters
    ----------
    map : array (..., n, n)
        Attention weights [query, key], as `attention_map` returns them.
    threshold : float
        A weight; 0 is met by every distance.

    Returns
    -------
    ndarray, int (...)
        (layers, heads) of the map of a model.

    Raises
    ------
    ValueError, TypeError
        No square matrices, or a threshold that is no finite number.
    """
    weights = _checks.real_array("map", map)
    if weights.ndim < 2 or weights.shape[-1] != weights.shape[-2] or not weights.shape[-1]:
        raise ValueError(f"map has shape {weights.shape}: needs (..., n, n), n at least 1")
    threshold = _checks.finite("threshold", threshold)
    window = np.zeros(weights.shape[:-2], np.int64)
    for delta in range(weights.shape[-1]):
        means = np.diagonal(weights, -delta, -2, -1).mean(axis=-1, dtype=np.float64)
        window[means >= threshold] = delta + 1
    return window


class _Watch:
    """Gives layers attention functions that note their weights in `seen`."""

    def __init__(self, seen: list[np.ndarray]) -> None:
        self.seen, self.layers = seen, 0

    def choose(self, module: torch.nn.Module, forward: Any) -> dict[str, Any]:
        """Return other globals for a layer's forward."""
        if _INTERFACE not in forward.__code__.co_names:
            return {}
        self.layers += 1
        given = forward.__globals__
        found = {_INTERFACE: _Interface(given[_INTERFACE], self.noting)}
        if _EAGER in given:
            found[_EAGER] = self.noting(given[_EAGER])
        return found

    def noting(self, function: Any) -> Any:
        """Return the attention function, which also notes its weights."""
        if getattr(function, "_notes_weights", False):
            return function

        def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(_weights(function, module, query, key, value, *args, **kwargs))
            return function(module, query, key, value, *args, **kwargs)

        attend._notes_weights = True  # type: ignore[attr-defined]
        return attend


class _Interface:
    """Stands for transformers' table of attention functions, in one layer."""

    def __init__(self, stock: Any, noting: Any) -> None:
        self._stock, self._noting = stock, noting

    def __getitem__(self, name: str) -> Any:
        return self._noting(self._stock[name])

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._stock, name)
        if name not in ("get", "get_interface"):
            return found
        return lambda *args: self._noting(found(*args))


def _weights(
    function: Any, module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> np.ndarray:
    """Return the weights (heads, n, n) of one call.

    The identity's columns come in pieces of the size of a head, as no function refuses them.
    """
    import torch

    keys, width = key.shape[2], value.shape[3]
    pieces = []
    for first in range(0, keys, width):
        columns = torch.zeros_like(value)
        here = torch.arange(min(width, keys - first), device=value.device)
        columns[:, :, first + here, here] = 1
        out, _ = function(module, query, key, columns, *args, **kwargs)
        pieces.append(out[0, :, :, : len(here)])  # (queries, heads, columns)
    whole = torch.cat(pieces, dim=-1).transpose(0, 1)
    return _plain(whole)


def _told(model: torch.nn.Module, tokens: torch.Tensor) -> list[np.ndarray]:
    """Return the weights that the model itself gives with `output_attentions`."""
    with evaluating(model):
        try:
            told = model(input_ids=tokens[None], use_cache=False, output_attentions=True).attentions
        except (TypeError, AttributeError, ValueError):
            told = None
    if not told or any(weights is None for weights in told):
        raise ValueError(
            f"this {type(model).__name__} gives no attention weights: needs a causal model of "
            "transformers, or one loaded with attn_implementation='eager'"
        )
    return [_plain(weights[0]) for weights in told]


def _plain(weights: torch.Tensor) -> np.ndarray:
    import torch

    wide = weights if weights.dtype == torch.float64 else weights.float()
    return wide.cpu().numpy()
