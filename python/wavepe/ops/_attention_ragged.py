"""Attention of several requests in one row: as one operator, or a call for each request."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._attention_checks import Arguments, check_arguments
from ._common import INTEGERS, check, check_dtype, check_tensors, not_differentiable, recorded, wide
from ._compiler import is_compiling, wants_standard
from ._relative_table import RelativeTable
from ._torch_private import below_autograd, holds, under_transforms

_RAGGED = torch.ops.wavepe.attention_ragged.default
# The arguments that all requests share, without p.
_OPTIONS = ("first", "beyond", "slopes", "causal", "window", "softcap", "scale", "bias",
            "bias_first", "bias_beyond", "sinks")  # fmt: skip
NAMES = ("cu_seqlens_q", "cu_seqlens_k", "block_table")  # arguments, together the requests


def attend_requests(
    requests: tuple, call: Arguments, table: Any, return_lse: bool, attend: Callable[..., Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """Return attention of all requests; `attend` computes one alone, with `table` as its p."""
    queries, keys, pages = requests
    if not (type(queries) is type(keys) is Tensor and (pages is None or type(pages) is Tensor)):
        by_name = {name: x for name, x in zip(NAMES, requests, strict=True) if x is not None}
        both = queries is not None and keys is not None
        check(both, f"give both cu_seqlens_q and cu_seqlens_k, got {' and '.join(by_name)} alone")
        check_tensors(**by_name)
    compiling = is_compiling()
    if compiling and wants_standard():
        check(False, "operators of torch alone cannot express attention with cu_seqlens")
    graph = not compiling and recorded(*call[:4], call.q_rel, call.bias, call.sinks)
    if graph or under_transforms() or not (call.q.is_cpu or call.q.is_meta):
        return _one_by_one(requests, call, table, attend)
    with contextlib.nullcontext() if compiling else below_autograd():
        out, lse = _RAGGED(*requests, *call)
    return (out, lse) if return_lse else out


def _one_by_one(
    requests: tuple, call: Arguments, table: Any, attend: Callable[..., Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the results of `attend` for each request, one behind the other."""
    _fake(*requests, *call)
    try:
        queries, keys = (x.cpu() for x in requests[:2])
        pages = None if requests[2] is None else requests[2].cpu()
        _ = queries[:1].tolist(), keys[:1].tolist()
    except RuntimeError as error:
        text = "a call with gradients or under torch.func needs the values of cu_seqlens and "
        text += "block_table: they may not be meta or fake tensors, and vmap may not split them"
        raise RuntimeError(f"wavepe: {text}") from error
    shapes = ((x.shape[0], 0, *x.shape[2:]) for x in call[:3])
    empty = (torch.empty(shape, dtype=call.q.dtype, device="cpu") for shape in shapes)
    _RAGGED(queries, keys, pages, *empty)  # without heads it only checks the values of `requests`
    options = {name: getattr(call, name) for name in _OPTIONS} | {"p": table}
    if isinstance(table, RelativeTable):
        options |= {"first": 0, "beyond": "zero"}
    # Without queries one empty request is enough.
    starts = [x.tolist() if call.q.shape[2] else [0, 0] for x in (queries, keys)]
    results = []
    for r in range(len(starts[0]) - 1):
        of_q, of_k = (slice(*x[r : r + 2]) for x in starts)
        k, v = (keys_of_request(x, pages, r, of_k) for x in (call.k, call.v))
        q_rel = None if call.q_rel is None else call.q_rel[:, :, of_q]
        results.append(attend(call.q[:, :, of_q], k, v, q_rel=q_rel, **options))
    if isinstance(results[0], Tensor):
        return torch.cat(results, 2)
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def keys_of_request(x: Tensor, block_table: Any, r: int, of_k: slice) -> Tensor:
    """Return the keys of request r, (1, Hk, n, d), from a row or from pages."""
    if block_table is None:
        return x[:, :, of_k]
    n, page = of_k.stop - of_k.start, max(x.shape[2], 1)
    numbers = block_table[r : r + 1].flatten()[: -(-n // page)].to(x.device, torch.int64)
    return x.index_select(0, numbers).transpose(0, 1).flatten(1, 2)[None, :, :n]


@torch.library.register_fake("wavepe::attention_ragged")
def _fake(q_starts: Tensor, k_starts: Tensor, block_table: Tensor | None, *rest: Any) -> Any:
    call, starts = Arguments(*rest), (q_starts, k_starts)
    (q, k, v), sizes = call[:3], [tuple(x.shape) for x in starts]
    if not (call.key_mask is call.segments is call.mask is call.offset is None) or call.dropout_p:
        text = "with cu_seqlens each request sees its own keys up to its last one: leave out "
        check(False, text + "offset, key_mask, segments, mask and dropout_p")
    for name, x in zip(NAMES, (*starts, block_table), strict=True):
        if x is not None:
            check_dtype(name, x, INTEGERS)
            if x.device != q.device and not x.is_cpu:
                check(False, f"{name} must be on the CPU or {q.device}, got {x.device}")
    one = q_starts.dim() == k_starts.dim() == 1 and holds(q_starts.shape[0] > 0)
    if not (one and holds(q_starts.shape[0] == k_starts.shape[0])):
        both = "cu_seqlens_q and cu_seqlens_k must be (R + 1) for R requests"
        check(False, f"{both}, got {sizes[0]} and {sizes[1]}")
    if block_table is not None:
        rows = q_starts.shape[0] - 1
        if block_table.dim() != 2 or not holds(block_table.shape[0] == rows):
            text = f"block_table must be (R, P) for R requests, here {rows}, got "
            check(False, text + str(tuple(block_table.shape)))
        if k.dim() != 4 or v.dim() != 4 or not holds(k.shape[0] == v.shape[0]):
            text = "k (blocks, Hk, page, d) and v (blocks, Hk, page, dv) needed, got "
            check(False, f"{text}{tuple(k.shape)} and {tuple(v.shape)}")
        for name, x in (("k", k), ("v", v)):
            if not holds(x.shape[3] < 2) and not holds(x.stride(3) == 1):
                check(False, f"pages of {name} must have a last stride of 1, got {x.stride(3)}")
        k, v = (x.new_empty((1, *x.shape[1:])) for x in (k, v))
    if q.dim() == 4 and not holds(q.shape[0] == 1):
        text = "with cu_seqlens all requests lie in one row: q must be (1, H, total, d), got "
        check(False, text + str(tuple(q.shape)))
    check_arguments(call._replace(k=k, v=v))
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide(q))


not_differentiable(
    "attention_ragged",
    "attention_ragged has no gradient in a compiled program: compile it under torch.no_grad(), or "
    "call attention for each request",
)
