"""Attention weights of a model, and how far back its heads look [W]."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ..common import checks
from ..common.errors import require
from ._models import check_tokens, evaluating, outputs

if TYPE_CHECKING:
    import torch


def attention_map(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    """Return the attention weights of every layer and head of a model.

    They are those that the model reports: a stock model computes them by eager attention for this
    call, and a patched one by its own. So the weights contain windows, soft caps and the position
    encoding, as the model applies them. ValueError if the model gives no attention weights or is
    not causal, or if its layers differ in their number of heads.

    Parameters
    ----------
    model, tokens : as for all analyses (`wavepe.analysis`)
        A causal model of transformers: stock, patched, or of a type wavepe_<family>.

    Returns
    -------
    ndarray, float32 (layers, heads, n, n)
        Weights after the softmax, [query, key]; float64 for a model in float64. Each row sums to 1,
        and is 0 above the diagonal. In GPT-OSS, attention sinks get the rest of a row.

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
    with evaluating(model), _eager(model):
        try:
            reported = outputs(model, tokens[None], 1, output_attentions=True).attentions
        except (TypeError, AttributeError):
            reported = None
    if not reported or any(weights is None for weights in reported):
        raise ValueError(
            f"this {type(model).__name__} gives no attention weights: needs a causal model of "
            "transformers"
        )
    narrow = reported[0].dtype.itemsize < 4
    maps = [(weights[0].float() if narrow else weights[0]).cpu().numpy() for weights in reported]
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


@contextmanager
def _eager(model: torch.nn.Module) -> Iterator[None]:
    """Let a stock model return its weights; a patched one does so with its own attention."""
    from ..hf import encoding_of

    modules: Any = () if encoding_of(model) is not None else model.modules()
    configs = {id(x.config): x.config for x in modules if hasattr(x, "config")}.values()
    before = [(config, getattr(config, "_attn_implementation", None)) for config in configs]
    try:
        for config, _ in before:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation
