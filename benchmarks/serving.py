"""Time continuous batching of transformers: tokens a second, stock and with other encodings.

`python -m benchmarks.serving` prints the table; `--json FILE` keeps the figures. `--most 8` leaves
out what has more requests.

Each of several requests has a prompt of 256 random tokens and gets 64 new ones. Models of SmolLM2's
shape share their random weights, and take turns in one process with one thread. A figure is the new
tokens of all requests, divided by the seconds from the first request to the last token, of the
fastest turn. The vocabulary is small, so that the logits do not hide the rest.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from .command import measuring_command
from .command import table as markdown
from .hf_decoding import RECOMMENDED, SHAPES, TINY, Shape
from .hf_models import STOCK, VOCABULARY, same_weights
from .machine import surroundings
from .memory import prepared

REQUESTS = (1, 8, 32)
PROMPT, NEW = 256, 64
SPECS = ("rope", "wavelet", RECOMMENDED)
PAGE = 32


def serving_of(model: Any, requests: int, prompt: int, new: int) -> Callable[[], float]:
    """Return a call that serves requests, and returns the seconds from the first to the last."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (requests, prompt), generator=generator).tolist()
    blocks = requests * -(-(prompt + new) // PAGE) + 2
    config = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=blocks, max_batch_tokens=512, allow_block_sharing=False
    )
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)

    def call() -> float:
        outputs = model.generate_batch(
            ids, generation_config=greedy, continuous_batching_config=config
        ).values()
        if [len(output.generated_tokens) for output in outputs] != [new] * requests:
            raise RuntimeError("a request did not get all its tokens")
        began = min(output.created_time for output in outputs)
        return max(output.lifespan[1] for output in outputs) - began

    return call


def row_of(shape: Shape, requests: int, repeats: int, prompt: int, new: int) -> dict:
    """Time all encodings for a number of requests, by turns."""
    models = same_weights(shape, (STOCK, *SPECS))
    calls = {spec: serving_of(model, requests, prompt, new) for spec, model in models.items()}
    seconds: dict[str, list[float]] = {spec: [] for spec in calls}
    for _ in range(repeats):
        for spec, call in calls.items():
            seconds[spec].append(call())
    return {"requests": requests, "tokens": requests * new, "seconds": seconds}


def measure(
    repeats: int, most: int, shape: Shape = SHAPES[1], prompt: int = PROMPT, new: int = NEW
) -> dict[str, Any]:
    """Measure all numbers of requests with one thread; return the rows ready for JSON."""
    about = {**surroundings("wavepe", "torch", "transformers"), "threads": 1}
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    with prepared(1):
        counts = [requests for requests in REQUESTS if requests <= most]
        rows = [row_of(shape, requests, repeats, prompt, new) for requests in counts]
    return {"environment": about, "shape": str(shape), "rows": rows}


def table(results: dict) -> str:
    """Return tokens a second, with their ratio to those of the stock model, as Markdown."""
    rows = results["rows"]
    heads = ["", *(f"{row['requests']} requests" for row in rows)]

    def cells(spec: str) -> list[str]:
        rates, stock = (
            [row["tokens"] / min(row["seconds"][name]) for row in rows] for name in (spec, STOCK)
        )
        return [f"{rate:,.0f} ({rate / base:.2f})" for rate, base in zip(rates, stock, strict=True)]

    specs = list(rows[0]["seconds"])
    return markdown(heads, [(x if x == STOCK else f"`{x}`", *cells(x)) for x in specs])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    tiny = {"shape": TINY, "prompt": 16, "new": 4}
    return measuring_command(__doc__, measure, table, argv, repeats=3, most=32, quick=tiny)


if __name__ == "__main__":
    sys.exit(main())
