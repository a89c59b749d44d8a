"""Measure attention of few queries against a cache of keys, as in generation.

`python -m benchmarks.attention_decode` prints the table; `--json FILE` keeps it.

All calls of a row take turns in one process. PyTorch's time is that of the faster of its two ways:
`enable_gqa`, or keys and values repeated for each query head, as models of transformers do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import wavepe.ops as ops
from torch.nn.functional import scaled_dot_product_attention

from .attention_inputs import table as wavelets
from .command import add_json, add_quick, add_repeats, keep, new_parser
from .machine import surroundings
from .memory import prepared
from .timing import take_turns


class Size(NamedTuple):
    """The shape of a call; `dtype` is a name of torch."""

    heads: int
    key_heads: int
    keys: int
    head_size: int = 128
    queries: int = 1
    dtype: str = "float32"

    def __str__(self) -> str:
        heads = f"{self.heads} / {self.key_heads}"
        return f"{heads} x {self.keys} x {self.head_size}, {self.queries}, {self.dtype}"


GROUPED = (32, 8)
ALONE = (8, 8)  # no head shares keys
SIZES = (
    *(Size(*GROUPED, n, d) for d in (64, 128) for n in (256, 1024, 2048, 4096, 8192, 32768)),
    *(Size(*GROUPED, n, queries=m) for n in (1024, 8192) for m in (2, 4, 8, 16)),
    *(Size(*GROUPED, n, dtype="bfloat16") for n in (1024, 8192)),
    *(Size(*ALONE, n, d) for d in (64, 128) for n in (256, 1024, 2048, 8192)),
    *(Size(*ALONE, 1024, 64, m) for m in (2, 4, 16)),
    *(Size(*ALONE, 1024, d) for d in (72, 80)),
    *(Size(32, 32, n) for n in (1024, 8192)),
)
WAYS = ("plain", "wavelets", "learned")


def calls_of(size: Size) -> dict[str, Callable]:
    """Return the calls by name."""
    heads, key_heads, n, d, m, name = size
    dtype = getattr(torch, name)
    random = torch.Generator().manual_seed(0)
    shapes = ((heads, m), (key_heads, n), (key_heads, n))
    q, k, v = (torch.randn(1, *rows, d, generator=random).to(dtype) for rows in shapes)
    known = ops.relative_table(torch.from_numpy(wavelets(n, d)))
    learned = torch.randn(512, d, generator=random).to(dtype)
    # The last query sees all keys. An earlier one does not see the last keys.
    mask = None if m == 1 else torch.ones(m, n, dtype=torch.bool).tril(n - m)
    group = heads // key_heads

    def repeated():
        keys, values = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        return scaled_dot_product_attention(q, keys, values, mask)

    calls = {
        "plain": lambda: ops.attention(q, k, v),
        "wavelets": lambda: ops.attention(q, k, v, p=known),
        "learned": lambda: ops.attention(q, k, v, p=learned),
        "repeated": repeated,
    }
    if group > 1:
        calls["enable_gqa"] = lambda: scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return calls


def row_of(size: Size, threads: Sequence[int], repeats: int) -> dict:
    """Return the times of a size's calls."""
    calls = calls_of(size)
    moved = 2 * size.key_heads * size.keys * size.head_size
    batch = max(1, 2**21 // moved)
    timings = take_turns(
        {(name, count): call for name, call in calls.items() for count in threads},
        before=lambda key: torch.set_num_threads(key[1]),
        repeats=repeats,
        warm_up=2,
        batch=batch,
        budget=4.0,
    )
    seconds = {
        name: {str(count): timings[name, count].summary() for count in threads} for name in calls
    }
    return {"size": size._asdict(), "seconds": seconds}


def measure(threads: Sequence[int], repeats: int, sizes: Sequence[Size] = SIZES) -> dict:
    """Measure all rows; return them ready for JSON."""
    about = surroundings("wavepe", "torch")
    with prepared(threads[0]):  # each call sets its own number of threads
        rows = [row_of(size, threads, repeats) for size in sizes]
    return {"environment": about, "threads": list(threads), "rows": rows}


def table(results: dict) -> str:
    """Return the quotients of the fastest times as Markdown, with a row for each size."""
    heads = ["heads / key heads x keys x head size, queries, dtype", "PyTorch", *WAYS]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in results["rows"]:
        fastest = {
            name: [by_threads[str(count)]["min"] for count in results["threads"]]
            for name, by_threads in row["seconds"].items()
        }
        theirs = [min(pair) for pair in zip(*_rivals(fastest), strict=True)]
        cells = [str(Size(**row["size"])), " / ".join(f"{1e3 * x:.2f}" for x in theirs) + " ms"]
        for way in WAYS:
            pairs = zip(fastest[way], theirs, strict=True)
            cells.append(" / ".join(f"{mine / other:.2f}" for mine, other in pairs))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rivals(fastest: dict[str, list[float]]) -> list[list[float]]:
    return [times for name, times in fastest.items() if name not in WAYS]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="default 1 2"
    )
    add_repeats(parser, 15, "rounds for each size")
    add_json(parser)
    add_quick(parser)
    args = parser.parse_args(argv)
    sizes = (Size(4, 2, 48, 16, 2),) if args.quick else SIZES
    results = measure(args.threads, args.repeats, sizes)
    print(table(results))
    keep(results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
