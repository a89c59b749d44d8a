"""Measure the speed-up of attention with one head by a second thread.

`python -m benchmarks.attention_threads` prints the table; `--json FILE` keeps it.

One head is the hard case, because the threads cannot share out the heads. The calls with 1 and with
N threads take turns in one process. The speed-up is the quotient of their fastest times; beside it
stands the median of the quotients of all rounds. PyTorch's attention is measured in the same
rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
import wavepe.ops as ops

from .attention_inputs import Inputs, sdpa
from .bench_attention import trained, with_gradients
from .command import add_json, add_quick, add_repeats, keep, new_parser
from .machine import surroundings
from .memory import prepared
from .timing import take_turns

SIZES = tuple((length, d) for d in (64, 128) for length in (1024, 2048, 4096, 8192))
BAR = 1.85  # the least speed-up of wavelets, from length 2048 on


def calls_of(x: Inputs, gradients: bool) -> dict[str, Callable]:
    """Return the calls by name."""
    known = x.relative_table
    forwards = {
        "wavelets": lambda q, k, v: ops.attention(q, k, v, p=known),
        "plain": lambda q, k, v: ops.attention(q, k, v),
        "sdpa": sdpa,
    }
    if gradients:
        leaves = trained(x, "q", "k", "v")
        return {name: with_gradients(call, leaves, x.grad) for name, call in forwards.items()}
    return {name: lambda call=call: call(x.q, x.k, x.v) for name, call in forwards.items()}


def rows_of(x: Inputs, gradients: bool, threads: int, repeats: int) -> list[dict]:
    """Return one row for each call."""
    calls = calls_of(x, gradients)
    timings = take_turns(
        {(name, count): call for name, call in calls.items() for count in (1, threads)},
        before=lambda key: torch.set_num_threads(key[1]),
        repeats=repeats,
        warm_up=2,
    )
    rows = []
    for name in calls:
        one, several = timings[name, 1], timings[name, threads]
        rows.append(
            {
                "who": name,
                "gradients": gradients,
                "length": x.length,
                "head_size": x.k.shape[-1],
                "seconds": {"1": one.summary(), str(threads): several.summary()},
                "speed_up": min(one.seconds) / min(several.seconds),
                "rounds": one.over(several).median,
            }
        )
    return rows


def measure(threads: int, repeats: int, sizes: Sequence[tuple[int, int]] = SIZES) -> dict:
    """Measure all rows; return them ready for JSON."""
    about = surroundings("wavepe", "torch")
    rows = []
    with prepared(threads):  # each call sets its own number of threads
        for length, d in sizes:
            x = Inputs.make(1, length, d)
            for gradients in (False, True):
                rows += rows_of(x, gradients, threads, repeats)
    return {"environment": about, "threads": threads, "bar": BAR, "rows": rows}


def table(results: dict) -> str:
    """Return the speed-ups as Markdown, with a row for each size."""
    names = list(dict.fromkeys(row["who"] for row in results["rows"]))
    heads = [f"{name}, {what}" for what in ("forward", "with gradients") for name in names]
    lines = ["| length x head size | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    found = {
        (row["length"], row["head_size"], row["gradients"], row["who"]): row["speed_up"]
        for row in results["rows"]
    }
    for length, d in dict.fromkeys(key[:2] for key in found):
        cells = [
            f"{found[length, d, gradients, name]:.2f}"
            for gradients in (False, True)
            for name in names
        ]
        lines.append(f"| {length} x {d} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--threads", type=int, default=2, metavar="N", help="threads, compared with 1 (default 2)"
    )
    add_repeats(parser, 15, "rounds for each size")
    add_json(parser)
    add_quick(parser)
    args = parser.parse_args(argv)
    sizes = ((48, 16),) if args.quick else SIZES
    results = measure(args.threads, args.repeats, sizes)
    print(table(results))
    keep(results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
