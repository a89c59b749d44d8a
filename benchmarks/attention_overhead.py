"""Measure what a call costs beside its kernel, and what `import wavepe.ops` costs.

`python -m benchmarks.attention_overhead` prints the table; `--json FILE` keeps it.

The inputs are so small that the kernels take a fraction of the time. The calls take turns in one
process, with one thread. Times are minima. An import is timed in new processes, after torch's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import wavepe.ops as ops
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .attention_inputs import Inputs, sdpa
from .bench_attention import trained, with_gradients
from .command import add_json, add_quick, add_repeats, keep, new_parser
from .machine import surroundings
from .timing import take_turns

BATCH = 400  # calls that are timed together
IMPORT = """
import time, torch
begin = time.perf_counter()
import wavepe.ops
print(time.perf_counter() - begin)
"""


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def calls_of() -> dict[str, dict[str, Callable | None]]:
    """Return the calls, and PyTorch's attention for the same inputs."""
    x = Inputs.make(1, 8, 8)
    q, k, v = x.q, x.k, x.v
    leaves, known = trained(x, "q", "k", "v"), ops.relative_table(x.p)
    step = torch.randn(1, 32, 1, 64), torch.randn(1, 8, 16, 64), torch.randn(1, 8, 16, 64)
    cos, sin = ops.rope_table(torch.arange(8), torch.ones(4))
    return {
        "attention": {"wavepe": lambda: ops.attention(q, k, v), "torch": lambda: sdpa(q, k, v)},
        "attention, wavelets": {"wavepe": lambda: ops.attention(q, k, v, p=known)},
        "attention, recorded by autograd": {
            "wavepe": lambda: ops.attention(*leaves),
            "torch": lambda: sdpa(*leaves),
        },
        "attention with gradients": {
            "wavepe": with_gradients(ops.attention, leaves, x.grad),
            "torch": with_gradients(sdpa, leaves, x.grad),
        },
        "attention, one query of 32 heads, 16 keys of 8 heads": {
            "wavepe": lambda: ops.attention(*step),
            "torch": lambda: grouped(*step),
        },
        "rope": {"wavepe": lambda: ops.rope(q, cos, sin)},
        "rope_qk": {"wavepe": lambda: ops.rope_qk(q, k, cos, sin)},
        "relative_bias": {"wavepe": lambda: ops.relative_bias(q, x.p, 8)},
    }


def import_seconds(repeats: int) -> float:
    """Return the shortest time of `import wavepe.ops` in a process that has imported torch."""
    command = [sys.executable, "-c", IMPORT]
    return min(float(subprocess.check_output(command)) for _ in range(repeats))


def measure(repeats: int, batch: int = BATCH) -> dict:
    """Measure everything with one thread; return it ready for JSON."""
    threads, about = torch.get_num_threads(), surroundings("wavepe", "torch")
    calls = {(name, who): call for name, of in calls_of().items() for who, call in of.items()}
    try:
        torch.set_num_threads(1)
        timings = take_turns(calls, repeats=repeats, budget=60, warm_up=2, batch=batch)
    finally:
        torch.set_num_threads(threads)
    rows: dict[str, dict[str, float]] = {}
    for (name, who), timing in timings.items():
        rows.setdefault(name, {})[who] = min(timing.seconds)
    return {"environment": about, "rows": rows, "import": import_seconds(min(repeats, 5))}


def table(results: dict) -> str:
    """Return the times as Markdown, with those of `--before` if there are some."""
    before = results.get("before")
    heads = ["", *["before"] * bool(before), "wavepe", "PyTorch's attention"]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]

    for name, row in results["rows"].items():
        times = [before["rows"][name]["wavepe"]] if before else []
        times += [row["wavepe"], *([row["torch"]] if "torch" in row else [])]
        cells = [f"{seconds * 1e6:.1f} µs" for seconds in times]
        cells += [""] * (len(heads) - 1 - len(cells))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    times = [run["import"] for run in (before, results) if run]
    cells = [f"{seconds:.2f} s" for seconds in times]
    lines.append("| `import wavepe.ops` after `import torch` | " + " | ".join(cells) + " | |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    parser = new_parser(__doc__)
    add_repeats(parser, 25, "rounds of all calls")
    parser.add_argument(
        "--before", type=Path, metavar="FILE", help="results of an earlier commit, to stand beside"
    )
    add_json(parser)
    add_quick(parser, "few calls")
    args = parser.parse_args(argv)
    results = measure(args.repeats, 2 if args.quick else BATCH)
    if args.before:
        results["before"] = json.loads(args.before.read_text("utf-8"))
    print(table(results))
    keep(results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
