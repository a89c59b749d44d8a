"""Measure the cost of the tails of wavelets in attention and relative_bias.

`python -m benchmarks.attention_tails` prints the table; `--json FILE` keeps it.

Far from its centre a wavelet is a subnormal number. An operation on such a number costs an Intel
CPU about 150 cycles. wavepe's kernels count subnormals as zero. So their time should not depend on
the tails. This is tested with two tables: one has the tails, the other has zeros where an element
is below 2^-100. Calls with the two tables take turns in one process. The ratio is the quotient of
their fastest times; beside it stands the median of the quotients of all rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import wavepe.ops as ops
from torch import Tensor

from .attention_inputs import Inputs, sdpa
from .bench_attention import trained, with_gradients
from .command import add_json, add_quick, add_repeats, keep, new_parser
from .machine import surroundings
from .memory import prepared
from .timing import take_turns

SIZES = ((8, 128, 32), (8, 128, 64), (8, 512, 64), (4, 1024, 64))
SMALLEST = 2.0**-100
AIM = 1.1


def without_tails(p: Tensor) -> Tensor:
    return p.where(p.abs() >= SMALLEST, 0.0)


def calls_of(x: Inputs) -> dict[tuple[str, bool, str], Callable | None]:
    """Return the calls by (kind, gradients, which table); PyTorch's attention is "sdpa"."""
    q, k, v = x.q, x.k, x.v
    leaves = trained(x, "q", "k", "v")
    calls: dict[tuple[str, bool, str], Callable | None] = {}
    for which, p in (("tails", x.p.clone()), ("zeros", without_tails(x.p))):
        known, learned = ops.relative_table(p), p.clone().requires_grad_()
        for kind, table in (("constant table", known), ("tensor", p)):

            def attend(q, k, v, table=table):
                return ops.attention(q, k, v, p=table)

            calls[kind, False, which] = lambda attend=attend: attend(q, k, v)
            calls[kind, True, which] = with_gradients(attend, leaves, x.grad)
        calls["tensor, with its gradient", True, which] = with_gradients(
            lambda q, k, v, p: ops.attention(q, k, v, p=p), (*leaves, learned), x.grad
        )
        calls["relative_bias", False, which] = lambda p=p: ops.relative_bias(q, p, x.length)
    calls["sdpa", False, ""] = lambda: sdpa(q, k, v)
    calls["sdpa", True, ""] = with_gradients(sdpa, leaves, x.grad)
    return calls


def rows_of(x: Inputs, repeats: int) -> list[dict]:
    """Return one row for each kind, forward and with gradients."""
    timings = take_turns(calls_of(x), repeats=repeats, budget=20, warm_up=2)
    rows = []
    for kind, gradients, which in timings:
        if which != "tails":
            continue
        tails, zeros = (timings[kind, gradients, of] for of in ("tails", "zeros"))
        plain = timings["sdpa", gradients, ""]
        rows.append(
            {
                "kind": kind,
                "gradients": gradients,
                "size": x.size,
                "seconds": {"tails": tails.summary(), "zeros": zeros.summary()},
                "ratio": min(tails.seconds) / min(zeros.seconds),
                "rounds": tails.over(zeros).median,
                "over_sdpa": min(tails.seconds) / min(plain.seconds),
            }
        )
    return rows


def measure(repeats: int, sizes: Sequence[tuple[int, int, int]] = SIZES) -> dict:
    """Measure all rows with one thread; return them ready for JSON."""
    about = {**surroundings("wavepe", "torch"), "threads": 1}
    with prepared(1):
        rows = [row for size in sizes for row in rows_of(Inputs.make(*size), repeats)]
    return {"environment": about, "aim": AIM, "rows": rows}


def table(results: dict) -> str:
    """Return the ratios (time with tails over time without) as Markdown."""
    found = {(row["size"], row["kind"], row["gradients"]): row["ratio"] for row in results["rows"]}
    columns = list(dict.fromkeys(key[1:] for key in found))
    heads = [f"{kind}, {('forward', 'with gradients')[gradients]}" for kind, gradients in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for size in dict.fromkeys(key[0] for key in found):
        cells = [f"{found[(size, *column)]:.2f}" for column in columns]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    parser = new_parser(__doc__)
    add_repeats(parser, 41, "rounds for each size")
    add_json(parser)
    add_quick(parser)
    args = parser.parse_args(argv)
    results = measure(args.repeats, ((2, 48, 16),) if args.quick else SIZES)
    print(table(results))
    keep(results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
