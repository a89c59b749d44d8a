"""Tell where the time of whole Llamas goes, stock and with other position encodings.

`python -m benchmarks.hf_profile` prints the table; `--json FILE` keeps the figures.

Models of one shape share their random weights, and take turns in one process with one thread. Then
torch's profiler measures the self time of each kind of operator. The rest is the time of Python and
autograd between operators. The profiler slows a call down, so only the shares come from it, and not
the times. The wide shape has two layers, as all layers are alike.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from .command import measuring_command
from .hf_decoding import CACHED, TINY, Shape
from .hf_models import (
    STOCK,
    Size,
    compared,
    decoding_of,
    forward_of,
    same_weights,
    shortener,
    step_of,
)
from .machine import surroundings
from .memory import prepared
from .timing import take_turns

SPECS = (STOCK, "rope", "wavelet")
SHAPES = (Shape(512, 8, 8, 4, 1376), Shape(2048, 2, 32, 8, 5632))
PROFILED = 3  # calls
KINDS = {  # kind -> beginnings of the names of its operators; the first match counts
    "linear layers": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear"),
    "attention": ("wavepe::attention", "aten::_scaled_dot_product", "aten::_flash_attention"),
    "loss, optimizer": ("aten::_log_softmax", "aten::nll_loss", "aten::_fused_adamw", "Optimizer"),
    "other operators": ("aten::", "wavepe::"),
}
BETWEEN = "between operators"


class Situation(NamedTuple):
    """A pass of a model: forward, a decoding step, or a training step."""

    phase: str
    length: int  # in decoding, of the caches
    sequences: int = 1

    def __str__(self) -> str:
        return f"{self.phase}, {self.sequences} x {self.length}"


FORWARD, DECODING, TRAINING = "forward", "decoding", "training"
SITUATIONS = (
    *(Situation(FORWARD, length) for length in (512, 2048)),
    *(Situation(DECODING, CACHED, sequences) for sequences in (1, 8)),
    Situation(TRAINING, 512),
)


def kind_of(operator: str) -> str | None:
    """Return the kind of an operator; None for another event, such as a node of autograd."""
    for kind, beginnings in KINDS.items():
        if operator.startswith(beginnings):
            return kind
    return None


def shares(call: Callable[[], Any], count: int = PROFILED) -> dict[str, float]:
    """Return the share of each kind in the time of `count` profiled calls; they sum to 1."""
    with profile(activities=[ProfilerActivity.CPU]):
        call()  # the first call under the profiler is slower
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        for _ in range(count):
            call()
        seconds = time.perf_counter() - began
    spent = dict.fromkeys(KINDS, 0.0)
    for event in profiler.key_averages():
        kind = kind_of(event.key)
        if kind is not None:
            spent[kind] += 1e-6 * event.self_cpu_time_total / seconds
    return {**spent, BETWEEN: 1 - sum(spent.values())}


def row_of(models: dict[str, Any], situation: Situation, repeats: int) -> dict:
    """Time one situation of all models, and divide its time."""
    phase, length, sequences = situation
    size, calls, caches = Size(length, sequences), {}, {}
    # the models share their weights, and so AdamW's state
    weights = list(models[STOCK].parameters())
    optimizer = torch.optim.AdamW(weights, lr=0.0, fused=True)
    for spec, model in models.items():
        model.train(phase == TRAINING)
        if phase == DECODING:
            calls[spec], caches[spec] = decoding_of(model, length, sequences)
        elif phase == FORWARD:
            calls[spec] = forward_of(model, size)
        else:
            calls[spec] = step_of(model, optimizer, size)
    before = shortener(caches, length) if caches else lambda _: None
    timings = take_turns(calls, before=before, repeats=repeats, budget=20, warm_up=1)
    return {
        **situation._asdict(),
        **compared(timings),
        "shares": {spec: shares(call) for spec, call in calls.items()},
    }


def measure(
    repeats: int,
    shapes: Sequence[Shape] = SHAPES,
    situations: Sequence[Situation] = SITUATIONS,
) -> dict:
    """Measure all rows with one thread; return them ready for JSON."""
    about = {**surroundings("wavepe", "torch", "transformers"), "threads": 1}
    rows = []
    with prepared(1):
        for shape in shapes:
            models = same_weights(shape, SPECS)
            for situation in situations:
                print(f"  {shape}: {situation}", file=sys.stderr, flush=True)
                rows.append({"shape": str(shape), **row_of(models, situation, repeats)})
    return {"environment": about, "rows": rows}


def table(results: dict) -> str:
    """Return the milliseconds of a call, divided by the profiler's shares, as Markdown."""
    lines = [
        f"| | | whole | {' | '.join(KINDS)} | {BETWEEN} |",
        "|---|---|---:|" + "---:|" * (len(KINDS) + 1),
    ]
    shape = None
    for row in results["rows"]:
        if row["shape"] != shape:
            shape = row["shape"]
            lines.append(f"| **{shape}** |" + " |" * (len(KINDS) + 3))
        label = str(Situation(*(row[key] for key in Situation._fields)))
        for spec, seconds in row["seconds"].items():
            parts = [1e3 * seconds["min"] * share for share in row["shares"][spec].values()]
            cells = [f"{1e3 * seconds['min']:,.1f} ms", *(f"{x:,.1f}" if x else "" for x in parts)]
            name = spec if spec == STOCK else f"`{spec}`"
            lines.append(f"| {label} | {name} | {' | '.join(cells)} |")
            label = ""
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    situations = [situation._replace(length=16) for situation in SITUATIONS]
    tiny = {"shapes": (TINY,), "situations": situations}
    return measuring_command(__doc__, measure, table, argv, repeats=21, quick=tiny)


if __name__ == "__main__":
    sys.exit(main())
