"""Attention weights of a model, and how far back its heads look [W]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ..common import checks
from ..common.errors import require
from ._models import check_tokens, evaluating, last_logits, replaced_globals

if TYPE_CHECKING:
    import torch

# A layer of transformers finds its attention function by these globals of its forward.
_INTERFACE, _EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"


def attention_map(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    """Return the attention weights of every layer and head of a model.

    They are the weights of the model's own attention function, whichever it is (eager, sdpa,
    wavepe), which gets the columns of the identity matrix beside the values. So the weights contain
    windows, soft caps and the position encoding, as the model applies them. ValueError if the model
    gives no attention weights or is not causal, or if its layers differ in their number of heads.

    Parameters
    ----------
    model, tokens : as for all analyses (`wavepe.analysis`)
        A causal model of transformers: stock, patched, or of a type wavepe_<family>.

    Returns
    -------
    ndarray, float32 (layers, heads, n, n)
        Weights after the softmax, [query, key]; float64 for a model in float64. Each row sums to 1,
        and is 0 above the diagonal. In a family with attention sinks (GPT-OSS), the sink gets the
        rest of a row.

    Examples
    --------
    >>> import torch, wavepe.hf
    >>> from wavepe.analysis import attention_map, attention_window
    >>> config = wavepe.hf.WavePELlamaConfig(
    ...     position_encoding="alibi", vocab_size=64, hidden_size=32, intermediate_size=48,
    ...     num_hidden_layers=2, num_attention_heads=4)
    >>> weights = attention_map(wavepe.hf.WavePELlamaForCausalLM(config), torch.arange(8))
    >>> weights.shape
    (2, 4, 8, 8)
    >>> attention_window(weights).shape
    (2, 4)
    """
    require("wavepe.analysis.attention_map", torch="torch", transformers="hf")
    tokens = check_tokens(model, tokens, 1, "one")
    maps: list[np.ndarray] = []
    recorder = _Recorder(maps)
    with evaluating(model), replaced_globals(model, recorder.choose):
        if recorder.layers:
            last_logits(model, tokens[None], 1)
    if not maps:  # a family that does not use transformers' attention interface
        maps = _reported_weights(model, tokens)
    if len({weights.shape for weights in maps}) > 1:
        raise ValueError(
            f"the layers of this {type(model).__name__} have different numbers of heads, "
            f"{sorted({len(weights) for weights in maps})}: needs the same number in all layers"
        )
    stacked = np.stack(maps)
    if np.triu(stacked, 1).any():
        raise ValueError(
            f"this {type(model).__name__} attends to later tokens: needs a causal model"
        )
    return stacked


def attention_window(map: ArrayLike, threshold: float = 1e-3) -> np.ndarray:
    """Return how many tokens each head looks back, its own token included: int64 (...).

    For each distance, take the mean weight over all queries that have a key at this distance. The
    window is 1 + the largest distance whose mean weight is at least `threshold`, or 0 if no mean
    reaches it.

    Parameters
    ----------
    map : array (..., n, n) of real numbers
        Attention weights [query, key], as `attention_map` returns them.
    threshold : float
        The smallest mean weight that counts. With 0, every window is n.
    """
    weights = checks.real_array("map", map)
    if weights.ndim < 2 or weights.shape[-1] != weights.shape[-2] or not weights.shape[-1]:
        raise ValueError(f"map has shape {weights.shape}: needs (..., n, n), n at least 1")
    threshold = checks.finite("threshold", threshold)
    window = np.zeros(weights.shape[:-2], np.int64)
    for delta in range(weights.shape[-1]):
        means = np.diagonal(weights, -delta, -2, -1).mean(axis=-1, dtype=np.float64)
        window[means >= threshold] = delta + 1
    return window


class _Recorder:
    """Replaces the attention functions of layers by ones that record their weights in `maps`."""

    def __init__(self, maps: list[np.ndarray]) -> None:
        self.maps, self.layers = maps, 0

    def choose(self, module: torch.nn.Module, forward: Any) -> dict[str, Any]:
        """Return new values for the globals of a layer's forward."""
        if _INTERFACE not in forward.__code__.co_names:
            return {}
        self.layers += 1
        names = forward.__globals__
        new = {_INTERFACE: _Interface(names[_INTERFACE], self.recording)}
        if _EAGER in names:
            new[_EAGER] = self.recording(names[_EAGER])
        return new

    def recording(self, function: Any) -> Any:
        """Return the attention function with one addition: it records its weights."""
        import torch

        if getattr(function, "_records_weights", False):
            return function

        def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            n = key.shape[2]
            columns = torch.eye(n, dtype=value.dtype, device=value.device)
            value = torch.cat([columns.expand(*value.shape[:2], n, n), value], dim=-1)
            out, weights = function(module, query, key, value, *args, **kwargs)
            self.maps.append(_to_numpy(out[0, :, :, :n].transpose(0, 1)))
            return out[..., n:], weights

        attend._records_weights = True  # type: ignore[attr-defined]
        return attend


class _Interface:
    """Replaces transformers' table of attention functions in one layer."""

    def __init__(self, stock: Any, recording: Any) -> None:
        self._stock, self._recording = stock, recording

    def __getitem__(self, name: str) -> Any:
        return self._recording(self._stock[name])

    def get_interface(self, *args: Any) -> Any:
        return self._recording(self._stock.get_interface(*args))


def _reported_weights(model: torch.nn.Module, tokens: torch.Tensor) -> list[np.ndarray]:
    """Return the weights that the model itself returns with `output_attentions`."""
    with evaluating(model):
        try:
            reported = model(
                input_ids=tokens[None], use_cache=False, output_attentions=True
            ).attentions
        except (TypeError, AttributeError, ValueError):
            reported = None
    if not reported or any(weights is None for weights in reported):
        raise ValueError(
            f"this {type(model).__name__} gives no attention weights: needs a causal model of "
            "transformers, or one loaded with attn_implementation='eager'"
        )
    return [_to_numpy(weights[0]) for weights in reported]


def _to_numpy(weights: torch.Tensor) -> np.ndarray:
    import torch

    return (weights if weights.dtype == torch.float64 else weights.float()).cpu().numpy()
