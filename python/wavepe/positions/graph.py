"""Attention of a compiled function, with the constant table of an encoding by its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops._attention_checks import Arguments
from ..ops._attention_in_graph import attention_in_graph


def attention_of_encoding(
    q: Tensor, k: Tensor, v: Tensor, name: str, one_sided: bool, **options: Any
) -> Tensor:
    """Return `wavepe.ops.attention` with the constant table of the encoding called `name`.

    A table that is `one_sided` has rows for the distances 0..keys-1 only. The options are those of
    `wavepe.ops.attention` without p.
    """
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
        if options.get("q_rel") is not None:
            options["q_rel"] = options["q_rel"].to(q.dtype)
    offset = options.get("offset")
    if not isinstance(offset, Tensor):
        offset = k.shape[2] - q.shape[2] if offset is None else offset
        options["offset"] = torch.full((), offset, dtype=torch.int64, device=q.device)
    if options.get("dropout_p", 0.0) > 0:
        options["seed"] = torch.randint(2**62, (), device=q.device)
    out, _ = attention_in_graph(Arguments(q, k, v, **options), name, one_sided)
    return out
