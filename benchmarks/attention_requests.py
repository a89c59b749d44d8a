"""Several requests in one call, in a call of each, and with keys in pages.

`python -m benchmarks.attention requests` measures it, with one thread and with two. "padded" is one
call of keys of one length, which servers do not have. Keys have the shape of SmolLM2-135M.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import wavepe.ops as ops

from .attention_inputs import table as wavelets
from .command import table as markdown
from .machine import surroundings
from .memory import prepared
from .timing import take_turns

HEADS, KEY_HEADS, HEAD_SIZE, PAGE = 9, 3, 64, 16
# requests, queries and keys of each, dtype
SIZES = tuple(
    (*size, dtype)
    for size in ((1, 1, 320), (8, 1, 320), (64, 1, 320), (16, 1, 2048), (4, 256, 1024))
    for dtype in ("float32", "bfloat16")
)


def calls(requests: int, m: int, n: int, name: str) -> dict[str, Callable]:
    """Return the calls by name; all read a constant table of wavelets."""
    random, dtype = torch.Generator().manual_seed(0), getattr(torch, name)
    shapes = ((HEADS, m), (KEY_HEADS, n), (KEY_HEADS, n))
    rows = [torch.randn(requests, *s, HEAD_SIZE, generator=random).to(dtype) for s in shapes]
    q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in rows)
    starts = torch.arange(requests + 1)
    options = {"p": ops.relative_table(torch.from_numpy(wavelets(n, HEAD_SIZE)))}
    here = {"cu_seqlens_q": starts * m, "cu_seqlens_k": starts * n}
    per_row = n // PAGE
    pages = [x.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1) for x in rows[1:]]
    order = torch.randperm(requests * per_row, generator=random)
    kept = [torch.empty_like(x) for x in pages]
    for to, x in zip(kept, pages, strict=True):
        to[order] = x
    numbers = order.view(requests, per_row).int()

    def each() -> None:
        for one in zip(*(x.split(1) for x in rows), strict=True):
            ops.attention(*one, **options)

    return {
        "one call": lambda: ops.attention(q, k, v, **here, **options),
        "pages": lambda: ops.attention(q, *kept, **here, block_table=numbers, **options),
        "a call each": each,
        "padded": lambda: ops.attention(*rows, **options),
    }


def measure(repeats: int, sizes: Sequence[tuple[int, int, int, str]] = SIZES) -> dict:
    """Measure all sizes; return them ready for JSON."""
    environment, rows = surroundings("wavepe", "torch"), []
    for threads in (1, 2):
        with prepared(threads):
            for size in sizes:
                timings = take_turns(calls(*size), repeats=repeats, warm_up=2)
                seconds = {name: timing.summary() for name, timing in timings.items()}
                rows.append({"size": size, "threads": threads, "seconds": seconds})
    return {"environment": environment, "rows": rows}


def table(results: dict) -> str:
    """Return the time of one call, and those of the other ways over it."""
    rows = []
    for row in results["rows"]:
        least = {name: timing["min"] for name, timing in row["seconds"].items()}
        one = least.pop("one call")
        requests, m, n, dtype = row["size"]
        size = f"{requests} x {m} x {n}, {dtype}"
        ratios = [f"{seconds / one:.2f}" for seconds in least.values()]
        rows.append([size, str(row["threads"]), f"{1e3 * one:.2f} ms", *ratios])
    names = ("one call", "pages", "a call each", "padded")
    return markdown(("requests x queries x keys, dtype", "threads", *names), rows)
