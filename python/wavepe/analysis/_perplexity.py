"""Perplexity of a causal language model by three protocols (METHODS 6)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .. import _checks
from ._models import Progress, check_integer, check_tokens, evaluating, need_torch

if TYPE_CHECKING:
    import torch

PROTOCOLS = ("whole", "blocks", "sliding")

# One batch holds at most this many logits or attention scores of a layer: 64 MiB of float32.
_ELEMENTS = 1 << 24
# More tokens in one pass gain no speed on a CPU and fall out of its cache.
_TOKENS = 1 << 12


class Pass(NamedTuple):
    """One forward pass over tokens[start:stop], scoring the tokens first..last-1 of the piece.

    All four count from the start of the piece. `last` is `stop + 1` where the model's last output
    is needed too.
    """

    start: int
    stop: int
    first: int
    last: int


def perplexity(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    length: int,
    *,
    protocol: str = "whole",
    window: int | None = None,
    stride: int | None = None,
    progress: Progress | None = None,
) -> float:
    """Perplexity of `tokens`, cut in pieces of `length` tokens; a shorter last piece is dropped.

    Parameters
    ----------
    model : torch.nn.Module
        A Hugging Face causal language model. It runs in evaluation mode without gradient; its
        training mode is restored.
    tokens : torch.Tensor, shape (n,), any integer dtype
        Token ids, at least `length` of them.
    length : int
        Tokens in a piece, at least 2.
    protocol : {"whole", "blocks", "sliding"}
        "whole": each piece in one pass. "blocks": each piece as non-overlapping passes of `window`
        tokens, of which the first is never scored. "sliding": windows of `window` tokens starting
        at 0, stride, 2 stride, ... of the piece, the last cut at its end; each token but the
        piece's first is scored once, in the first window that holds it and what stands before it.
    window, stride : int, optional
        Required by the protocols that use them, else unused; 2 <= window, 1 <= stride <= window.
    progress : callable, optional
        Called as progress(done, total) after each pass, with the tokens run so far and in all.

    Returns
    -------
    float
        exp of the mean negative log likelihood over all scored tokens, summed in float64.

    Raises
    ------
    TypeError
        `model` is no module, `tokens` is no integer tensor, or a size is no integer.
    ValueError
        A wrong shape, size or protocol, too few tokens, or ids outside the model's vocabulary.
    """
    length, window, stride = _sizes(length, protocol, window, stride)
    need_torch("perplexity")
    tokens = check_tokens(model, tokens, length, f"one piece of {length}")
    passes = list(_passes(protocol, length, window, stride))
    total: torch.Tensor | float = 0.0  # on the model's device, and read once
    count = 0
    groups = _groups(passes, len(tokens) // length, length)
    done, all_of_them = 0, sum(group.stop * len(starts) for group, starts in groups.items())
    with evaluating(model):
        for group, starts in groups.items():
            for batch in _batches(model, starts, group.stop):
                total = total + _negative_log_likelihood(model, tokens, batch, group)
                count += len(batch) * (group.last - group.first)
                done += group.stop * len(batch)
                if progress is not None:
                    progress(done, all_of_them)
    return perplexity_of(float(total) / count)


def perplexity_of(loss: float) -> float:
    """The perplexity for a mean loss in nats."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _sizes(
    length: int, protocol: str, window: int | None, stride: int | None
) -> tuple[int, int, int]:
    """The sizes as checked ints; a size the protocol does not use comes back as `length`."""
    _checks.choice("protocol", protocol, PROTOCOLS)
    length = check_integer("length", length, 2)
    if protocol == "whole":
        return length, length, length
    if window is None:
        raise ValueError(f"protocol {protocol!r} needs window=")
    window = check_integer("window", window, 2)
    if protocol == "blocks":
        return length, window, window
    if stride is None:
        raise ValueError("protocol 'sliding' needs stride=")
    stride = check_integer("stride", stride, 1)
    if stride > window:
        raise ValueError(f"stride is {stride}: needs at most the window, {window}")
    return length, window, stride


def _passes(protocol: str, length: int, window: int, stride: int) -> Iterator[Pass]:
    """The passes over one piece ("whole" comes as one window of `length`)."""
    scored = 1  # the next token to score; nothing predicts a piece's first
    for start in range(0, length, stride):
        stop = min(start + window, length)
        first = start + 1 if protocol == "blocks" else scored
        # The token after this window starts the next one, which cannot predict it.
        bridge = protocol == "sliding" and stride == window and stop < length
        last = stop + bridge
        if first < last:
            yield Pass(start, stop, first, last)
        scored = last
        if stop == length:
            return


def _groups(passes: list[Pass], pieces: int, length: int) -> dict[Pass, list[int]]:
    """Passes of one form, all counted from their own start -> where each of them starts."""
    groups: dict[Pass, list[int]] = defaultdict(list)
    for piece in range(pieces):
        for start, stop, first, last in passes:
            form = Pass(0, stop - start, first - start, last - start)
            groups[form].append(piece * length + start)
    return groups


def _batches(model: torch.nn.Module, starts: list[int], size: int) -> Iterator[list[int]]:
    """`starts` in batches that keep the logits, and the scores of one layer, within memory."""
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None) or 1
    heads = getattr(config, "num_attention_heads", None) or 1
    widest = size * max(vocabulary, heads * size)
    batch = max(1, min(_ELEMENTS // widest, _TOKENS // size))
    for first in range(0, len(starts), batch):
        yield starts[first : first + batch]


def _negative_log_likelihood(
    model: torch.nn.Module, tokens: torch.Tensor, starts: list[int], form: Pass
) -> torch.Tensor:
    """Sum over the scored tokens of one batch of equal passes, a float64 tensor."""
    import torch

    rows = torch.tensor(starts, device=tokens.device)[:, None]
    inputs = tokens[rows + torch.arange(form.stop, device=tokens.device)]
    targets = tokens[rows + torch.arange(form.first, form.last, device=tokens.device)]
    logits = model(input_ids=inputs, use_cache=False).logits
    logits = logits[:, form.first - 1 : form.last - 1].flatten(0, 1).float()
    losses = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
    return losses.double().sum()
