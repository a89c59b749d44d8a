"""What the queries of a patched model see, without a mask of queries x keys.

transformers asks the function registered here for the mask of a forward pass, once for each type of
layers. All that such a mask can hold beside causality and the window, which the attention function
knows, is one number a key: 0 for padding, else the number of the sequence that it belongs to. Its
four dimensions let it pass through transformers untouched where masks are made in advance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import masking_utils

from ..encodings import encoding

SEEN = torch.uint8  # 0 or 1 a key
NUMBERED = torch.int64  # packed sequences


def attention_mask(**given: Any) -> Tensor | None:
    """Return the mask of a forward pass; transformers calls this function.

    Parameters
    ----------
    **given
        As for `transformers.masking_utils.sdpa_mask`, and the configuration as `config`.

    Returns
    -------
    None
        A query sees all keys up to its own place, within the window of its layer.
    uint8 Tensor (B, 1, 1, n)
        Of those, it sees the keys that are 1: there is padding, or may be (see `may_look`).
    int64 Tensor (B, 1, 1, n)
        Of those, it sees the keys of its own number: sequences are packed; 0 is padding.
    bool Tensor (B, 1, m, n), or None as PyTorch's attention reads it
        What `sdpa_mask` gives, for attention that looks in both directions (encodings outside of
        the scores only), for functions that a user has laid over the causal one, and for a stock
        model wherever the last query does not stand on the last key, or its family sees less.
    """
    function, padding = given["mask_function"], given.get("attention_mask")
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        written = getattr(given["config"], "position_encoding", "none")
        for spec in [written] if isinstance(written, str) else written.values():
            if _in_scores(spec):
                raise ValueError(f"{spec} needs causal attention here, got config.is_causal=False")
        return masking_utils.sdpa_mask(**given)
    if given.get("use_vmap") or (padding is not None and padding.ndim != 2):
        return masking_utils.sdpa_mask(**given)
    stock = not hasattr(given["config"], "position_encoding")
    if stock and (function is not masking_utils.causal_mask_function or not _is_aligned(given)):
        return masking_utils.sdpa_mask(**{**given, "allow_is_causal_skip": False})
    first, keys = given.get("kv_offset", 0), given["kv_length"]
    if padding is not None:
        # One query costs little with a mask, wherever it is.
        look = not waits(padding.device) or _queries(given) > 1
        return seen_keys(padding, first, keys, look and may_look(padding.device, given["config"]))
    if function is masking_utils.causal_mask_function or keys != _queries(given):
        return None  # transformers sees packed sequences without a cache only
    device = given["device"] if "device" in given else given["cache_position"].device
    return _packed(function, given["batch_size"], keys, device)


def waits(device: torch.device) -> bool:
    """Return whether who looks at a value there waits for all that is under way."""
    return device.type != "cpu"


def may_look(device: torch.device, config: Any) -> bool:
    """Return whether a pass looks at what its mask holds, to go without one that hides nothing.

    A compiler cannot branch on it. Where it is to wait, it pays only for layers that PyTorch's
    attention serves, which is much faster without a mask.
    """
    from .attention import FUSED_ON  # which imports this module

    if torch.compiler.is_compiling():
        return False
    if not waits(device):
        return True
    spec = getattr(config, "position_encoding", None)
    return device.type not in FUSED_ON and not (isinstance(spec, str) and _in_scores(spec))


def nothing_hidden(device: torch.device) -> Tensor:
    """Return a mask (1, 1, 1, 0) that says so, where transformers would read positions for it."""
    return torch.empty((1, 1, 1, 0), dtype=SEEN, device=device)


def given_or_none(mask: Tensor | None) -> Tensor | None:
    """Return the mask, but None for one of `nothing_hidden`."""
    return None if mask is None or mask.shape[-1] == 0 else mask


@torch.compiler.assume_constant_result  # a compiler need not read specs
def _in_scores(spec: str) -> bool:
    """Return whether the encoding is part of the attention scores."""
    return encoding(spec).entry in ("relative", "slope", "bias")


def _queries(given: dict[str, Any]) -> int:
    # transformers < 5 gives the places of the queries instead of their number.
    return given["q_length"] if "q_length" in given else given["cache_position"].shape[0]


def _is_aligned(given: dict[str, Any]) -> bool:
    """Return whether the last query is known to stand on the last key."""
    queries, keys = _queries(given), given["kv_length"]
    if queries == keys:
        return True
    place = given["q_offset"] if "q_offset" in given else given["cache_position"][0]
    place = place - given.get("kv_offset", 0)
    if isinstance(place, Tensor) and torch.compiler.is_compiling():
        return False
    return int(place) + queries == keys


def seen_keys(padding: Tensor, first: int | Tensor, keys: int, look: bool) -> Tensor | None:
    """Return which keys are no padding; keys beyond the mask wait in a static cache.

    None where all are seen, which is known where one may `look`.

    Parameters
    ----------
    padding : Tensor (B, tokens so far)
    first : int or Tensor of no dimensions
        Place of the first key: a cache with a window forgets those before.
    keys : int
    """
    if isinstance(first, Tensor):  # of a static cache of transformers < 4.57
        place = torch.arange(keys, device=padding.device) + first
        known = place < padding.shape[1]
        padding = padding[:, place.clamp(max=padding.shape[1] - 1)].bool() & known
    else:
        if (missing := first + keys - padding.shape[1]) > 0:
            padding = pad(padding, (0, missing))
        padding = padding[:, first : first + keys].bool()
    if look and padding.all():
        return None
    return padding[:, None, None].to(SEEN)


def _packed(function: Any, batch: int, keys: int, device: torch.device) -> Tensor | None:
    """Number each token's sequence, from a mask that is causal within sequences.

    transformers hands over a function of two places and no more. A token that does not see the one
    before it begins a sequence.
    """
    place = torch.arange(keys, device=device)[None]
    rows = torch.arange(batch, device=device)[:, None]
    joined = function(rows, torch.zeros_like(rows), place, (place - 1).clamp(min=0))
    return numbered(~joined.expand(batch, -1), None, not torch.compiler.is_compiling())


def numbered(begins: Tensor, padding: Tensor | None, look: bool) -> Tensor | None:
    """Build the mask of packed sequences from their first tokens (B, n).

    None for one a row without padding, which is known where one may `look`. The first token of a
    row begins a sequence in any case. `padding` is True at tokens.
    """
    begins = begins.clone()
    begins[:, :1] = True
    numbers = begins.long().cumsum(-1)
    if padding is not None:
        numbers = numbers * padding.bool()
    elif look and not begins[:, 1:].any():
        return None
    return numbers[:, None, None].to(NUMBERED)


def is_packed(mask: Tensor | None) -> bool:
    """Return whether `numbered` has made this mask."""
    return mask is not None and mask.ndim == 4 and mask.dtype == NUMBERED


class MaskParts(NamedTuple):
    """A mask, sorted by what `wavepe.ops.attention` calls its parts.

    Attributes
    ----------
    causal : bool
        Causality and the window hold; else the mask alone decides.
    key_mask : bool Tensor (B, n), optional
    segments : int64 Tensor (B, n), optional
    mask : Tensor (B|1, H|1, m, n), optional
        The user's own: bool (True: seen), or floating point (added).
    """

    causal: bool = True
    key_mask: Tensor | None = None
    segments: Tensor | None = None
    mask: Tensor | None = None


def read(mask: Tensor | None) -> MaskParts:
    """Sort a mask of `attention_mask`, or one of the user's own, into its parts.

    Raises
    ------
    TypeError
        An integer mask that is not of `attention_mask`.
    """
    if mask is None:
        return MaskParts()
    if mask.dtype == torch.bool or mask.is_floating_point():
        return MaskParts(causal=False, mask=mask)
    if mask.ndim != 4 or mask.shape[1:3] != (1, 1) or mask.dtype not in (SEEN, NUMBERED):
        raise TypeError(
            f"attention_mask must be bool or floating point, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}"
        )
    row = mask[:, 0, 0]
    return MaskParts(key_mask=row != 0, segments=row if mask.dtype == NUMBERED else None)


def visible(
    mask: Tensor | None,
    queries: int,
    keys: int,
    offset: int | Tensor,
    device: torch.device,
    window: int | None = None,
) -> Tensor:
    """Write out a mask of `attention_mask`, bool (B|1, 1, m, n); return a user's own as it is.

    Parameters
    ----------
    mask : Tensor, optional
    queries, keys : int
    offset : int or Tensor of no dimensions
        Place of the first query among the keys.
    device : torch.device
    window : int, optional
        Keys at this distance and beyond are not seen.
    """
    seen = read(mask)
    if seen.mask is not None:
        return seen.mask
    if mask is not None and mask.shape[-1] < keys:  # a static cache has room behind
        seen = read(pad(mask, (0, keys - mask.shape[-1])))
    delta = torch.arange(queries, device=device)[:, None] + offset
    delta = delta - torch.arange(keys, device=device)
    shown = delta >= 0 if window is None else (delta >= 0) & (delta < window)
    shown = shown[None, None]
    if seen.key_mask is not None:
        shown = shown & seen.key_mask[:, None, None]
    if seen.segments is not None:
        row = seen.segments  # of packed sequences the queries are the first keys
        shown = shown & (row[:, :queries, None] == row[:, None, :])[:, None]
    return shown
