"""What the queries of a patched Llama see, without a mask of queries x keys where that is possible.

transformers asks the function registered here for the mask of a forward pass. Padding comes out as
the keys that are seen, packed sequences as a number for each token: the operator hides the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from ..encodings import encoding


def attention_mask(**given: Any) -> Tensor | None:
    """The mask of a forward pass, as transformers asks for it.

    Parameters
    ----------
    **given
        As for `transformers.masking_utils.sdpa_mask`, and the configuration as `config`.

    Returns
    -------
    None
        A query sees all keys up to its own place.
    bool Tensor (B, n)
        Of those, it sees the keys that are True: there is padding.
    integer Tensor (B, n)
        Of those, it sees the keys of its own number: sequences are packed.
    bool Tensor (B, 1, m, n), or None as PyTorch's attention reads it
        What `sdpa_mask` gives, for encodings that leave the attention scores alone.
    """
    function, padding = given["mask_function"], given.get("attention_mask")
    spec = getattr(given["config"], "position_encoding", "none")
    if not _in_scores(spec):
        return sdpa_mask(**given)
    if function is bidirectional_mask_function:
        raise ValueError(f"{spec} needs causal attention here, got config.is_causal=False")
    if function is causal_mask_function and (padding is None or padding.ndim == 2):
        return _seen_keys(padding, given.get("kv_offset", 0), given["kv_length"])
    if padding is None and not given.get("use_vmap"):
        return _packed(function, given["batch_size"], given["kv_length"], given["device"])
    return sdpa_mask(**given)


@torch.compiler.assume_constant_result  # a compiler need not read specs
def _in_scores(spec: str) -> bool:
    """Whether the encoding is part of the attention scores."""
    return encoding(spec).entry in ("relative", "slope")


def _seen_keys(padding: Tensor | None, first: int, keys: int) -> Tensor | None:
    """Which keys are no padding, (B, keys); those beyond the mask wait in a static cache."""
    if padding is None:
        return None
    if (missing := first + keys - padding.shape[1]) > 0:
        padding = pad(padding, (0, missing))
    padding = padding[:, first : first + keys]
    # A compiler cannot branch on what a tensor holds.
    return None if not torch.compiler.is_compiling() and padding.all() else padding


def _packed(function: Any, batch: int, keys: int, device: torch.device) -> Tensor:
    """The number of each token's sequence (B, n), from a mask that is causal within sequences.

    transformers hands over a function of two places and no more. A token that does not see the one
    before it begins a sequence.
    """
    place = torch.arange(keys, device=device)[None]
    rows = torch.arange(batch, device=device)[:, None]
    joined = function(rows, torch.zeros_like(rows), place, (place - 1).clamp(min=0))
    return (~joined.expand(batch, -1)).cumsum(-1)


def visible(
    mask: Tensor | None, queries: int, keys: int, offset: int | Tensor, device: torch.device
) -> Tensor:
    """A mask of `attention_mask` written out, bool (B|1, H|1, m, n).

    Parameters
    ----------
    mask : Tensor, optional
    queries, keys : int
    offset : int or Tensor of no dimensions
        Place of the first query among the keys.
    device : torch.device
    """
    if mask is not None and mask.ndim == 4:
        return mask
    place = torch.arange(queries, device=device)[:, None] + offset
    seen = (place >= torch.arange(keys, device=device))[None, None]
    if mask is None:
        return seen
    if mask.dtype == torch.bool:
        return seen & mask[:, None, None]
    return seen & (mask[:, :, None] == mask[:, None, :])[:, None]
