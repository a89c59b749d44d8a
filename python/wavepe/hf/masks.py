"""Masks of patched models: one number for each key, not a tensor of queries x keys.

The attention function knows causality and the window. The number of a key is 0 for padding, else
that of its packed sequence. transformers leaves masks of four dimensions as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import masking_utils

from ..encodings import encoding
from ..ops import _scores
from . import families

KEY_MASK = torch.uint8  # dtype of a mask that is 0 or 1 for each key
SEGMENTS = torch.int64  # dtype of a mask of packed sequences
BOTH_WAYS = torch.int8  # as KEY_MASK, and queries see later keys, too
WHOLE = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}  # never None


def attention_mask(**arguments: Any) -> Tensor | None:
    """Return the mask of a forward pass; transformers calls it with the arguments of `sdpa_mask`.

    None: a query sees all keys up to its own position, within the window of its layer. A uint8
    tensor (B, 1, 1, n): it sees those of them that are 1. The mask of `sdpa_mask` in three cases:
    the configuration is not causal (only for encodings that leave the scores alone); a user
    combined the causal rule with another one; or the model is a stock model, and its last query is
    not at its last key or its family sees less. An int8 tensor for the encoder of a stock model,
    and for attention to it.
    """
    config, padding = arguments["config"], arguments.get("attention_mask")
    stored = getattr(config, "position_encoding", None)
    if not getattr(config, "is_causal", True):
        for spec in [stored or "none"] if not isinstance(stored, dict) else stored.values():
            if _in_scores(spec):
                raise ValueError(f"{spec} needs causal attention, got config.is_causal=False")
        return masking_utils.sdpa_mask(**arguments | WHOLE)
    if arguments.get("use_vmap") or (padding is not None and padding.ndim != 2):
        return masking_utils.sdpa_mask(**arguments)
    function = arguments["mask_function"]
    both_ways = function is getattr(masking_utils, "bidirectional_mask_function", None)
    if stored is None and both_ways and arguments.get("allow_is_bidirectional_skip"):
        mask = None if padding is None else mask_of_padding(padding, arguments)
        return (nothing_hidden(arguments.get("device")) if mask is None else mask).to(BOTH_WAYS)
    is_causal = function is masking_utils.causal_mask_function
    if stored is None and not (is_causal and _is_aligned(arguments)):
        return masking_utils.sdpa_mask(**arguments | WHOLE)
    # Without padding, `sequences` has found packed sequences.
    return None if padding is None else mask_of_padding(padding, arguments)


def mask_of_padding(padding: Tensor, arguments: dict[str, Any]) -> Tensor | None:
    """Return the `key_mask` of a user's mask (B, tokens), for the arguments of `sdpa_mask`."""
    # A mask costs little for one query, so its values need not be read.
    check_values = not reading_waits(padding.device) or _queries(arguments) > 1
    check_values = check_values and may_read_values(padding.device, arguments["config"])
    return key_mask(padding, arguments.get("kv_offset", 0), arguments["kv_length"], check_values)


def reading_waits(device: torch.device) -> bool:
    """Return whether reading a value from the device waits for all its queued work."""
    return device.type != "cpu"


def may_read_values(device: torch.device, config: Any) -> bool:
    """Return whether a pass may read the values of its mask, to drop a mask that hides nothing."""
    if torch.compiler.is_compiling():
        return False
    if not reading_waits(device):
        return True
    # PyTorch's attention alone gains more without a mask than reading costs.
    spec = getattr(config, "position_encoding", None)
    return device.type not in families.FUSED_ON and not (isinstance(spec, str) and _in_scores(spec))


def nothing_hidden(device: torch.device | None) -> Tensor:
    """Return a mask (1, 1, 1, 0) that hides nothing; without one, positions would be read."""
    return torch.empty((1, 1, 1, 0), dtype=KEY_MASK, device=device)


@torch.compiler.assume_constant_result  # so that a compiler does not trace the parser of specs
def _in_scores(spec: str) -> bool:
    """Return whether the encoding changes the attention scores."""
    return encoding(spec).in_scores


def _queries(arguments: dict[str, Any]) -> int:
    # transformers 5.0 passes the places of the queries, not their number.
    if "q_length" in arguments:
        return arguments["q_length"]
    return arguments["cache_position"].shape[0]


def _is_aligned(arguments: dict[str, Any]) -> bool:
    """Return whether the last query is known to be at the position of the last key."""
    queries, keys = _queries(arguments), arguments["kv_length"]
    if queries == keys:
        return True
    index = arguments["q_offset"] if "q_offset" in arguments else arguments["cache_position"][0]
    index = index - arguments.get("kv_offset", 0)
    if isinstance(index, Tensor) and torch.compiler.is_compiling():
        return False
    return int(index) + queries == keys


def key_mask(padding: Tensor, first: int, keys: int, check_values: bool) -> Tensor | None:
    """Return a mask (B, 1, 1, keys) that is 1 for keys that are not padding, from the user's mask.

    A cache with a window has dropped the keys before `first`. Keys beyond the end of `padding` are
    the unused room of a static cache: their mask is 0. With `check_values`, None: all are visible.
    """
    if (missing := first + keys - padding.shape[1]) > 0:
        padding = pad(padding, (0, missing))
    padding = padding[:, first : first + keys].bool()
    if check_values and padding.all():
        return None
    return padding[:, None, None].to(KEY_MASK)


def has_pairs(mask: Tensor | None) -> bool:
    """Return whether this is a mask of queries x keys."""
    return mask is not None and mask.ndim == 4 and mask.shape[1:3] != (1, 1)


class MaskParts(NamedTuple):
    """A mask as arguments of `wavepe.ops.attention`."""

    causal: bool = True  # whether the causal rule and the window apply; else `mask` alone decides
    key_mask: Tensor | None = None  # bool (B, n), True for visible keys
    segments: Tensor | None = None  # int64 (B, n), number of each key's packed sequence
    mask: Tensor | None = None  # (B|1, H|1, m, n), the user's own, bool or added to the scores


_ALL_SEEN = MaskParts()


def mask_parts(mask: Tensor | None) -> MaskParts:
    """Turn a mask of `attention_mask`, or a user's own mask, into arguments of `ops.attention`."""
    if mask is None:
        return _ALL_SEEN
    if mask.dtype == torch.bool and mask.shape[1:-1] == (1, 1):
        return MaskParts(causal=False, key_mask=mask[:, 0, 0])
    if mask.dtype == torch.bool or mask.is_floating_point():
        return MaskParts(causal=False, mask=mask)
    known = (KEY_MASK, SEGMENTS, BOTH_WAYS)
    if mask.ndim != 4 or mask.shape[1:3] != (1, 1) or mask.dtype not in known:
        raise TypeError(
            f"attention_mask must be bool or floating point, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}"
        )
    row = mask[:, 0, 0]
    if mask.dtype == BOTH_WAYS:
        return MaskParts(causal=False, key_mask=row != 0 if row.shape[1] else None)
    return MaskParts(key_mask=row != 0, segments=row if mask.dtype == SEGMENTS else None)


def full_mask(
    mask: Tensor | None, q: Tensor, k: Tensor, offset: int | Tensor, window: int | None
) -> Tensor:
    """Return a bool mask (B|1, 1, m, n) of queries x keys; a user's own mask stays as it is."""
    parts, keys = mask_parts(mask), k.shape[2]
    if parts.mask is not None:
        return parts.mask
    if mask is not None and 0 < mask.shape[-1] < keys:  # a static cache has room behind the keys
        parts = mask_parts(pad(mask, (0, keys - mask.shape[-1])))
    delta = _scores.distances(q, k, offset)
    visible: Any = _scores.visible_keys(delta, window=window, **parts._asdict())
    return visible
