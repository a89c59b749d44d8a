"""Shared by the analyses that run a model: check tokens, set its mode, run it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

# Called after each pass as progress(done, total).
Progress = Callable[[int, int], object]
Item = TypeVar("Item")

# The largest number of tokens in a batch (more are not faster on a CPU, because they do not fit
# into its cache), and of its logits or of attention scores in a layer: 64 MiB of float32.
_TOKENS, _ELEMENTS = 1 << 12, 1 << 24


def check_tokens(
    model: torch.nn.Module, tokens: torch.Tensor, least: int, what: str
) -> torch.Tensor:
    """Return `tokens` as int64 on the model's device; `what` describes the `least` number."""
    import torch

    if not isinstance(tokens, torch.Tensor):
        raise TypeError(f"tokens must be a 1-D integer torch.Tensor, got {type(tokens).__name__}")
    if tokens.dtype == torch.bool or tokens.is_floating_point() or tokens.is_complex():
        raise TypeError(f"tokens must have an integer dtype, got {tokens.dtype}")
    if tokens.dim() != 1:
        raise ValueError(f"tokens must have one dimension, got shape {tuple(tokens.shape)}")
    if len(tokens) < least:
        raise ValueError(f"tokens must hold at least {what}, got {len(tokens)}")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    tokens = tokens.to(device=device_of(model), dtype=torch.int64)
    low, high = tokens.min().item(), tokens.max().item()
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or high + 1
    if low < 0 or high >= vocabulary:
        raise ValueError(f"tokens must be ids in 0..{vocabulary - 1}, got {low}..{high}")
    return tokens


def device_of(model: torch.nn.Module) -> torch.device | None:
    """Return the device of the model's first parameter; None if it has no parameters."""
    parameter = next(model.parameters(), None)
    return None if parameter is None else parameter.device


def batches(
    model: torch.nn.Module, items: list[Item], size: int, vocabulary: int = 1
) -> Iterator[list[Item]]:
    """Yield batches of items of `size` tokens; their logits and attention scores fit in memory."""
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None) or 1
    most = max(1, min(_TOKENS // size, _ELEMENTS // (size * max(vocabulary, heads * size))))
    for first in range(0, len(items), most):
        yield items[first : first + most]


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients; at the end, each module gets its own mode back."""
    import torch

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        # Not inference_mode: training must be able to use a table that the model caches now.
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def outputs(model: torch.nn.Module, ids: torch.Tensor, count: int, **options: Any) -> Any:
    """Return what the model returns, with the logits of the last `count` tokens.

    A model that cannot leave the others out, which may not fit into memory, gives all.
    """
    import torch

    def selects_logits(module: Any) -> bool:
        forward = getattr(module, "forward", None)
        return forward is not None and "logits_to_keep" in inspect.signature(forward).parameters

    selection: dict[str, Any] = {}
    if selects_logits(model):
        # With a number, a Gemma 4 leaves the other tokens out of its last layers, too.
        by_index = selects_logits(getattr(model, "model", None))
        selection["logits_to_keep"] = (
            torch.arange(-count, 0, device=ids.device) if by_index else count
        )
    return model(input_ids=ids, use_cache=False, **selection, **options)
