"""Time decoding steps of whole Llamas, stock and with other position encodings.

`python -m benchmarks.hf_decoding` prints the table; `--json FILE` keeps the figures. `--models 2`
times the first two shapes only, and `--cached 16384` steps after so many tokens.

A step adds one token to each sequence of a batch; the caches hold 512 tokens before. Models of one
shape share their random weights, and take turns in one process with one thread. Figures are the
times of the other encodings over that of the stock model with SDPA, of the fastest steps. The
vocabulary is small, so that the logits do not hide the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from .command import measuring_command
from .hf_models import STOCK, compared, decoding_of, same_weights, shortener
from .machine import surroundings
from .memory import prepared
from .real_model import SELF_EXTEND, YARN
from .timing import take_turns

CACHED = 512
BATCHES = (1, 8)
RECOMMENDED = "wavelet:biases=true,projection=true+kerple"
INPUT = "wavelet:rank=24,from_input=true"
SPECS = ("rope", "wavelet", RECOMMENDED, INPUT, "alibi", "fox", "rope+sink", "none")
SPECS += (YARN, SELF_EXTEND)  # as "rope" up to 4096 cached tokens


class Shape(NamedTuple):
    """The sizes of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int

    def __str__(self) -> str:
        heads = f"{self.heads} / {self.kv_heads} heads"
        return f"{self.layers} layers of {self.hidden}, {heads}"


SHAPES = (
    Shape(512, 8, 8, 4, 1376),
    Shape(576, 30, 9, 3, 1536),  # SmolLM2-135M's
    Shape(2048, 8, 32, 8, 5632),
)
TINY = Shape(64, 2, 2, 1, 64)


def row_of(shape: Shape, batch: int, repeats: int, cached: int) -> dict:
    """Time all encodings of one shape and batch."""
    steps, caches = {}, {}
    for spec, model in same_weights(shape, (STOCK, *SPECS)).items():
        steps[spec], caches[spec] = decoding_of(model, cached, batch)
    again = shortener(caches, cached)
    timings = take_turns(steps, before=again, repeats=repeats, budget=25, warm_up=2)
    return {"shape": str(shape), "batch": batch, **compared(timings)}


def measure(
    repeats: int, models: int, shapes: Sequence[Shape] = SHAPES, cached: int = CACHED
) -> dict:
    """Measure the first `models` shapes with one thread; return their rows ready for JSON."""
    about = {**surroundings("wavepe", "torch", "transformers"), "threads": 1}
    with prepared(1):
        batches = BATCHES if cached <= CACHED else BATCHES[:1]  # long caches need gigabytes
        rows = [
            row_of(shape, batch, repeats, cached) for shape in shapes[:models] for batch in batches
        ]
    return {"environment": about, "cached": cached, "rows": rows}


def table(results: dict) -> str:
    """Return tokens per second of the stock model, and the ratios of time, as Markdown."""
    rows = results["rows"]
    heads = [f"{row['shape']}; batch {row['batch']}" for row in rows]
    rates = [f"{row['batch'] / row['seconds'][STOCK]['min']:,.0f}" for row in rows]
    lines = ["", *heads], ["---", *(["---:"] * len(rows))], ["stock, tokens/s", *rates]
    specs = [spec for spec in rows[0]["ratio"] if spec != STOCK]
    ratios = [[f"`{spec}`", *(f"{row['ratio'][spec]:.2f}" for row in rows)] for spec in specs]
    return "\n".join(f"| {' | '.join(line)} |" for line in (*lines, *ratios))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    tiny = {"shapes": (TINY,), "cached": 16}
    numbers = {"repeats": 41, "models": 3, "cached": CACHED}
    return measuring_command(__doc__, measure, table, argv, **numbers, quick=tiny)


if __name__ == "__main__":
    sys.exit(main())
