"""Self-Extend and ReRoPE [J]: far keys have positions that the model has met in training.

Near keys keep their rotation. For far keys, queries and keys are rotated further, to positions in
groups. Two calls of attention see disjoint keys, and their results are merged exactly. So memory
stays linear in the length, and a cache holds keys with their own rotation.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from .. import ops
from ..encodings import Encoding, RoPE
from ..ops._common import wide
from ..ops._device_constant import DeviceConstant
from ..ops._torch_private import is_known


class SelfExtend:
    """Attention of a RoPE with `self_extend`, which rotates the first `dims` dims of a head."""

    def __init__(self, encoding: Encoding, dims: int, causal: bool) -> None:
        rope = cast(RoPE, encoding.rotary)
        adds = {"table", "slopes", "bias", "input_decay"}
        others = [part.name for part in encoding.parts if adds & {*part.terms, *part.learns}]
        if others:
            raise ValueError(
                f"self_extend cannot be combined with {' and '.join(others)}, which add to the "
                "scores by the distance; sink, window and temperature can"
            )
        if not causal:
            raise ValueError("self_extend needs causal attention: give causal=True")
        self._near = rope.neighbors
        self._group = None if rope.self_extend == "inf" else cast(int, rope.self_extend)
        inv_freq, _ = rope.frequencies(dims)
        self._inv_freq = DeviceConstant(inv_freq)

    def attend(
        self, kernel_args: dict[str, Any], queries: Tensor, keys: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """Merge attention to near and far keys; `queries` and `keys` are positions (B|1, ...)."""
        attend: Any = functools.partial(ops.attention, return_lse=True)
        near, window = self._near, kernel_args.get("window")
        q, k = kernel_args["q"], kernel_args["k"]
        if is_known(k.shape[2] <= near) or (window is not None and is_known(window <= near)):
            return attend(**kernel_args)
        parts = [attend(**{**kernel_args, "window": near})]
        shift = 0 if self._group is None else near // self._group
        offset = kernel_args.get("offset")
        offset = (k.shape[2] - q.shape[2] if offset is None else offset) - near
        far = {
            **kernel_args,
            "q": self._moved(q, queries, near - shift, interleaved),
            "k": self._moved(k, keys, 0, interleaved),
            "offset": offset,
            "causal": True,  # from the first far key on
            "window": None if window is None else torch.sym_max(window - near, 0),
        }
        far.pop("sinks", None)  # they are counted once
        parts.append(attend(**far))
        return ops.merge_attention(*zip(*parts, strict=True))

    def _moved(self, x: Tensor, places: Tensor, add: int, interleaved: bool) -> Tensor:
        """Rotate x from its places to those of its groups, and by `add` positions more."""
        grouped = places // self._group if self._group is not None else torch.zeros_like(places)
        cos, sin = ops.rope_table(grouped + add - places, self._inv_freq.on(x), dtype=wide(x))
        return ops.rope(x, cos, sin, interleaved=interleaved)
