"""Measure what each kind of term costs in attention: tables of few columns, sinks, encodings.

`python -m benchmarks.attention_terms` prints the tables; `--json FILE` keeps them.

Figures are times over the same call without the term, forward and with gradients: causal, float32,
one thread. All calls of a table take turns in one process, in each variant of this CPU. A figure is
the quotient of the fastest times.

The first table calls `ops.attention`. A table of c columns has its own queries (q_rel); the
gradients include those of the table and its queries. The second calls `wavepe.nn.Attention`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
import wavepe
import wavepe.ops as ops
from torch import Tensor

from .attention_inputs import Inputs, module_of, sdpa
from .bench_attention import trained, with_gradients
from .command import add_json, add_quick, add_repeats, keep, new_parser
from .machine import surroundings
from .memory import prepared
from .timing import take_turns

SIZE = (8, 2048, 64)  # heads, length, head size
ROWS = 1024  # of each learned table
COLUMNS = (8, 16, 24, 64)
BAR = {"16 columns": 1.15}  # asked of them
SPECS = (
    "relative:extent=1024,rank=16",
    "wavelet",
    "wavelet:biases=true",
    "wavelet:biases=true,projection=true",
    "wavelet:biases=true,projection=true+kerple",
    "wavelet+alibi",
    "kerple",
    "wavelet:rank=8",
    "wavelet:rank=24,from_input=true",
    "rope+wavelet",
    "transformer_xl",
    "rope",
    "rope+sink",
    "rope+window:size=512",
    "rope+temperature:kind=llama4",
    "rope:self_extend=8,neighbors=512",
    "fox",
    "pope",
    "xpos",
)
PLAIN = "none"
VARIANTS = wavepe.variants()[1:] or wavepe.variants()  # the portable one takes minutes
Calls = dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]


def term_calls(x: Inputs) -> Calls:
    """Return each function with its arguments beside q, k and v; the first is the plain one."""
    _, heads, length, d = x.q.shape
    random = torch.Generator().manual_seed(1)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).requires_grad_()

    calls: Calls = {
        PLAIN: (ops.attention, ()),
        "sinks": (lambda q, k, v, sinks: ops.attention(q, k, v, sinks=sinks), (values(heads),)),
        f"{d} columns, read by q": (
            lambda q, k, v, p: ops.attention(q, k, v, p=p),
            (values(min(ROWS, length), d),),
        ),
    }
    for columns in COLUMNS:
        calls[f"{columns} columns"] = (
            lambda q, k, v, p, r: ops.attention(q, k, v, p=p, q_rel=r),
            (values(min(ROWS, length), columns), values(1, heads, length, columns)),
        )
    return {**calls, "PyTorch's attention": (sdpa, ())}


def encoding_calls(x: Inputs) -> Calls:
    """Return the same for a module of each encoding; its parameters have gradients, too."""
    _, heads, length, d = x.q.shape
    torch.manual_seed(2)
    given = torch.randn(1, length, d)
    calls: Calls = {}
    for spec in (PLAIN, *SPECS):
        module = module_of(spec, d, heads)

        def call(q, k, v, *parameters, module=module):
            return module(q, k, v, x=given)

        calls[spec] = (call, tuple(module.parameters()))
    return calls


def rows_of(calls: Calls, x: Inputs, repeats: int) -> list[dict]:
    """Return a row for each name and variant."""
    leaves, timed = trained(x, "q", "k", "v"), {}
    for name, (function, more) in calls.items():

        def forward(function=function, more=more):
            with torch.no_grad():
                return function(x.q, x.k, x.v, *more)

        for variant in VARIANTS:
            timed[name, variant, "forward"] = forward
            if "self_extend" not in name:  # it is for inference
                call = with_gradients(function, (*leaves, *more), x.grad)
                timed[name, variant, "with gradients"] = call

    def use(key):
        wavepe.use_variant(key[1])

    timings = take_turns(timed, before=use, repeats=repeats, budget=240, warm_up=2)
    rows: dict[tuple[str, str], dict] = {}
    for (name, variant, phase), timing in timings.items():
        plain = timings[PLAIN, variant, phase]
        row = rows.setdefault((name, variant), {"name": name, "variant": variant, "over_plain": {}})
        row["over_plain"][phase] = min(timing.seconds) / min(plain.seconds)
    return list(rows.values())


def measure(repeats: int, size: tuple[int, int, int] = SIZE) -> dict:
    """Measure both tables with one thread; return them ready for JSON."""
    about, before = {**surroundings("wavepe", "torch"), "threads": 1}, wavepe.variant()
    x = Inputs.make(*size)
    try:
        with prepared(1):
            terms = rows_of(term_calls(x), x, repeats)
            encodings = rows_of(encoding_calls(x), x, repeats)
    finally:
        wavepe.use_variant(before)
    tables = {"ops.attention": terms, "nn.Attention": encodings}
    return {"environment": about, "bar": BAR, "size": x.size, "tables": tables}


def table(results: dict) -> str:
    """Return the ratios as two tables of Markdown, with a column for each variant."""
    return "\n\n".join(_one(title, rows) for title, rows in results["tables"].items())


def _one(title: str, rows: list[dict]) -> str:
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    lines = [f"| `{title}` | {' | '.join(variants)} |", "|---|" + "---:|" * len(variants)]
    cells: dict[str, list[str]] = {}
    for row in rows:
        ratios = (f"{ratio:.2f}" for ratio in row["over_plain"].values())
        cells.setdefault(row["name"], []).append(" / ".join(ratios))
    lines += [f"| {name} | {' | '.join(line)} |" for name, line in cells.items() if name != PLAIN]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    parser = new_parser(__doc__)
    add_repeats(parser, 25, "rounds of all calls")
    add_json(parser)
    add_quick(parser)
    args = parser.parse_args(argv)
    results = measure(args.repeats, (2, 48, 16) if args.quick else SIZE)
    print(table(results))
    keep(results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
