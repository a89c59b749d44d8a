"""Where attention's time goes, and how fast its matrix products are.

`python -m benchmarks.attention profile` measures it. It needs Linux's `perf`, which samples a
process of its own for each row. A row has the share of the time of each part of the kernels. Beside
it stands the rate of the products alone, as a share of the rate of PyTorch's matrix product in the
same process. Counted are the operations of pairs that a causal query sees, so what is computed
beyond the diagonal lowers the rate.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import wavepe.ops as ops

from .attention_inputs import Inputs
from .bench_attention import inputs, trained, with_gradients
from .command import Missing
from .command import table as markdown
from .machine import surroundings
from .memory import prepared
from .timing import take_turns

SIZES = ((128, 64), (1024, 64), (4096, 64), (1024, 128), (4096, 128))
# The matrix products of each kind, of 2 L^2 d operations for all pairs: forward, and with gradients
PRODUCTS = {"plain": (2, 7), "learned": (3, 11)}
# The parts of the kernels, by what their names begin with; the first match counts.
PARTS = {
    "products": r"gemm_",
    "weights": r"softmax|row_max|adjust|keep_row|load_bias|gradient_|forward_block|backward_block",
    "packing": r"pack_|read_row|write_row|load_rows|store_rows|any_not_finite|__mem",
    "table": r"table_|finish_gradient|place_band",
}
REST = "rest"


def call_of(x: Inputs, kind: str, gradients: bool) -> Callable:
    """Return a call of attention; "learned" has a table of a row for each distance."""
    more = {"p": x.with_learned(x.length).p} if kind == "learned" else {}
    if not gradients:
        return lambda: ops.attention(x.q, x.k, x.v, **more)
    x = x.with_learned(x.length)
    leaves = trained(x, "q", "k", "v", *more)
    return with_gradients(lambda q, k, v, p=None: ops.attention(q, k, v, p=p), leaves, x.grad)


def rate_of_products(dtype: torch.dtype = torch.float32, order: int = 1024) -> Callable:
    a, b = torch.randn(2, order, order, dtype=dtype)
    return lambda: torch.mm(a, b)


def work(length: int, d: int, kind: str, gradients: bool) -> None:
    """Time a call beside PyTorch's matrix product, print JSON, then repeat the call for ever."""
    x = inputs(length, d)
    with prepared(1):
        call = call_of(x, kind, gradients)
        timings = take_turns({"call": call, "mm": rate_of_products()}, repeats=15, warm_up=2)
        seconds = {name: min(timing.seconds) for name, timing in timings.items()}
        operations = PRODUCTS[kind][gradients] * x.flops / 2
        print(json.dumps(seconds | {"operations": operations, "size": x.size}), flush=True)
        while True:
            call()


def shares(samples: str) -> dict[str, float]:
    """Return the share of each part, from lines "percent|symbol" of perf's report."""
    parts = dict.fromkeys([*PARTS, REST], 0.0)
    for percent, symbol in re.findall(r"^\s*([\d.]+)%\s*\|(?:\[[.k]\] )?(\S+)", samples, re.M):
        names = (part for part, pattern in PARTS.items() if re.match(pattern, symbol))
        parts[next(names, REST)] += float(percent) / 100
    total = sum(parts.values())
    return {part: share / total for part, share in parts.items()}


def row_of(length: int, d: int, kind: str, gradients: bool, seconds: float) -> dict:
    """Return a row: start a process for it, and sample it for some seconds."""
    arguments = [str(length), str(d), kind, str(int(gradients))]
    worker = [sys.executable, "-m", "benchmarks.attention_profile", *arguments]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(worker, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            measured = json.loads(process.stdout.readline())
            file = str(Path(folder, "perf.data"))
            perf = ["perf", "record", "--quiet", "--output", file, "--pid", str(process.pid)]
            perf += ["--", "sleep", str(seconds)]
            subprocess.run(perf, check=True, capture_output=True, text=True)
        finally:
            process.kill()
        report = ["perf", "report", "--input", file, "--stdio", "--no-children", "-t", "|"]
        samples = subprocess.run(
            [*report, "--fields", "overhead,symbol"], check=True, capture_output=True, text=True
        ).stdout
    parts = shares(samples)
    rate = measured["operations"] / (measured["call"] * parts["products"])
    return {
        "size": measured["size"],
        "kind": kind,
        "gradients": gradients,
        "seconds": measured["call"],
        "parts": parts,
        "rate": rate,
        "over_mm": rate / (2 * 1024**3 / measured["mm"]),
    }


def measure(seconds: float, sizes: Sequence[tuple[int, int]] = SIZES) -> dict:
    """Measure all rows with one thread; return them ready for JSON."""
    if not shutil.which("perf"):
        raise Missing("the profile of attention needs perf (Debian: linux-perf)")
    try:
        rows = [
            row_of(*size, kind, gradients, seconds)
            for size in sizes
            for kind in PRODUCTS
            for gradients in (False, True)
        ]
    except subprocess.CalledProcessError as error:
        raise Missing(f"perf failed: {error.stderr}") from error
    return {"environment": {**surroundings("wavepe", "torch"), "threads": 1}, "rows": rows}


def table(results: dict) -> str:
    """Return the rows as Markdown."""
    parts = list(results["rows"][0]["parts"])
    rows = []
    for row in results["rows"]:
        phase = "with gradients" if row["gradients"] else "forward"
        shown = (f"{100 * row['parts'][part]:.0f} %" for part in parts)
        size = row["size"].replace(" heads", "")
        rows.append((size, f"{row['kind']}, {phase}", f"{row['over_mm']:.2f}", *shown))
    return markdown(("heads x L x d", "", "products' rate / PyTorch's", *parts), rows, "llr")


if __name__ == "__main__":
    length, d, kind, gradients = sys.argv[1:]
    work(int(length), int(d), kind, gradients == "1")
