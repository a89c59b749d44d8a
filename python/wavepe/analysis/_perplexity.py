"""Perplexity of a causal language model, by three protocols (METHODS 6)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..common import checks
from ..common.errors import require
from ._models import Progress, batches, check_tokens, evaluating

if TYPE_CHECKING:
    import torch

PROTOCOLS = ("whole", "blocks", "sliding")


class Pass(NamedTuple):
    """A forward pass over `stop` tokens that scores the tokens first..last-1, from its start on.

    `last` is `stop + 1` if the pass also scores the token after its last input.
    """

    stop: int
    first: int
    last: int


def perplexity(
    model: torch.nn.Module, tokens: torch.Tensor, length: int, *, protocol: str = "whole",
    window: int | None = None, stride: int | None = None, progress: Progress | None = None,
) -> float:  # fmt: skip
    """Return the perplexity of a model on `tokens`, for sequences of `length` tokens.

    It is exp of the mean negative log likelihood over all scored tokens, summed in float64. The
    tokens are cut into pieces of `length`. A shorter last piece is dropped.

    Parameters
    ----------
    model, tokens : as for all analyses (`wavepe.analysis`)
        A Hugging Face causal language model, and at least `length` tokens.
    length : int
        Tokens in a piece, at least 2.
    protocol : {"whole", "blocks", "sliding"}
        "whole": each piece in one pass. "blocks": each piece in passes of `window` tokens that do
        not overlap; the first token of a pass is not scored. "sliding": passes of `window` tokens
        that start at 0, stride, 2 stride, ... of the piece; the last one ends with the piece. Each
        token except the first of a piece is scored once, in the first window that holds it and the
        token before it.
    window : int, optional
        Tokens of a pass, at least 2. Required for "blocks" and "sliding".
    stride : int, optional
        Tokens between the starts of two windows, from 1 to `window`. Required for "sliding".
    progress : callable, optional
        Called as progress(done, total) after each pass, with numbers of tokens.

    Examples
    --------
    >>> import torch, wavepe.hf
    >>> from wavepe.analysis import perplexity
    >>> config = wavepe.hf.WavePELlamaConfig(
    ...     position_encoding="alibi", vocab_size=64, hidden_size=32, intermediate_size=48,
    ...     num_hidden_layers=1, num_attention_heads=2)
    >>> model = wavepe.hf.WavePELlamaForCausalLM(config)
    >>> tokens = torch.arange(256) % 64
    >>> perplexity(model, tokens, 128) > 1
    True
    >>> perplexity(model, tokens, 128, protocol="sliding", window=32, stride=16) > 1
    True
    """
    length, window, stride = _sizes(length, protocol, window, stride)
    require("wavepe.analysis.perplexity", torch="torch")
    tokens = check_tokens(model, tokens, length, f"one piece of {length}")
    groups: dict[Pass, list[int]] = defaultdict(list)  # equal passes -> their starts
    for start, form in _passes(protocol, length, window, stride):
        groups[form] += range(start, len(tokens) // length * length, length)
    total: torch.Tensor | float = 0.0  # stays on the model's device until the end
    count = 0
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or 1
    done, all_tokens = 0, sum(group.stop * len(starts) for group, starts in groups.items())
    with evaluating(model):
        for group, starts in groups.items():
            for batch in batches(model, sorted(starts), group.stop, vocabulary):
                total = total + _negative_log_likelihood(model, tokens, batch, group)
                count += len(batch) * (group.last - group.first)
                done += group.stop * len(batch)
                if progress is not None:
                    progress(done, all_tokens)
    return perplexity_of(float(total) / count)


def perplexity_of(loss: float) -> float:
    """Return the perplexity for a mean loss in nats."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _sizes(
    length: int, protocol: str, window: int | None, stride: int | None
) -> tuple[int, int, int]:
    """Check the sizes; one that the protocol does not use is returned as `length`."""
    checks.choice("protocol", protocol, PROTOCOLS)
    length = checks.integer("length", length, 2)
    if protocol == "whole":
        return length, length, length
    if window is None:
        raise ValueError(f"protocol {protocol!r} needs window=, got none")
    window = checks.integer("window", window, 2)
    if protocol == "blocks":
        return length, window, window
    if stride is None:
        raise ValueError("protocol 'sliding' needs stride=, got none")
    stride = checks.integer("stride", stride, 1)
    if stride > window:
        raise ValueError(f"stride must be at most the window, {window}, got {stride}")
    return length, window, stride


def _passes(protocol: str, length: int, window: int, stride: int) -> Iterator[tuple[int, Pass]]:
    """Yield start and form of the passes over one piece; "whole" is one window of `length`."""
    scored = 1  # the next token to score: the first of a piece has nothing before it
    for start in range(0, length, stride):
        stop = min(start + window, length)
        first = start + 1 if protocol == "blocks" else scored
        # The next window begins with the token after this one, so it cannot score that token.
        bridge = protocol == "sliding" and stride == window and stop < length
        last = stop + bridge
        if first < last:
            yield start, Pass(stop - start, first - start, last - start)
        scored = last
        if stop == length:
            return


def _negative_log_likelihood(
    model: torch.nn.Module, tokens: torch.Tensor, starts: list[int], form: Pass
) -> torch.Tensor:
    """Return the sum over the scored tokens of one batch of equal passes, a float64 tensor."""
    import torch

    rows = torch.tensor(starts, device=tokens.device)[:, None]
    inputs = tokens[rows + torch.arange(form.stop, device=tokens.device)]
    targets = tokens[rows + torch.arange(form.first, form.last, device=tokens.device)]
    logits = model(input_ids=inputs, use_cache=False).logits
    logits = logits[:, form.first - 1 : form.last - 1].flatten(0, 1).float()
    losses = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
    return losses.double().sum()
