"""Time a training step of the demo's Llama with wavelets, ALiBi, or stock RoPE and SDPA.

`python -m benchmarks.training_step` prints the tables; `--json FILE` keeps the figures.

The step is that of `wavepe compare`: forward, loss, backward, clipping of the gradients, AdamW.
The models have the same sizes and read the same random bytes. Their steps take turns in one
process.
Then torch's profiler measures the self time of each kind of operator. The rest of a step is the
time of Python and autograd between operators. The profiler slows a step down, so only the shares
come from it, and not the times.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM
from wavepe.cli import compare
from wavepe.cli.compare import training
from wavepe.cli.compare.settings import Settings, settings_from
from wavepe.cli.device import CPU

from .command import add_json, add_quick, add_repeats, keep, new_parser
from .machine import surroundings
from .memory import prepared
from .timing import take_turns

WAVELETS, ALIBI, STOCK = "wavelets", "alibi", "stock"
SPEC = "wavelet:scales=6"
LONGER = (1024, 1)  # length, sequences in a step; as many tokens as the demo's 128 x 8
PROFILED_STEPS = 10
KINDS = {  # kind -> beginnings of the names of its operators; the first match counts
    "attention": ("wavepe::", "aten::_scaled_dot_product", "aten::_flash_attention"),
    "linear layers": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear"),
    "optimizer": ("aten::_fused_adamw", "aten::_foreach", "aten::linalg_vector_norm", "Optimizer"),
    "loss": ("aten::_log_softmax", "aten::nll_loss", "aten::cross_entropy"),
    "element by element, copies": ("aten::",),
}
BETWEEN = "between operators"
SAME = (  # settings of the configuration that all models share
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
)


def demo_settings() -> Settings:
    """Return the default settings of `wavepe compare`."""
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    return settings_from(parser.parse_args([]))


def models(settings: Settings) -> dict[str, Any]:
    """Return the demo's models with wavelets and ALiBi, and a stock Llama of the same sizes."""
    ours = training.new_model(SPEC, 0, settings)
    same = {key: getattr(ours.config, key) for key in SAME}
    stock = LlamaForCausalLM(LlamaConfig(**same, attn_implementation="sdpa"))
    return {WAVELETS: ours, ALIBI: training.new_model(ALIBI, 0, settings), STOCK: stock}


def steps(settings: Settings) -> dict[str, Callable[[], float]]:
    """Return calls that make one training step, by name."""
    random = torch.Generator().manual_seed(0)
    shape = (settings.batch, settings.train_length + 1)
    batch = torch.randint(training.VOCABULARY, shape, generator=random)
    calls = {}
    for name, model in models(settings).items():
        state = training.State(model.train(), training._optimizer(model, settings))
        calls[name] = lambda state=state: training._train_step(
            state, training.Batch(batch, None), settings.learning_rate, CPU
        )
    return calls


# ------------------------------------------------------------------ shares of the time


def kind_of(operator: str) -> str | None:
    """Return the kind of an operator; None for another event, such as a node of autograd."""
    for kind, beginnings in KINDS.items():
        if operator.startswith(beginnings):
            return kind
    return None


def shares(step: Callable[[], Any], count: int = PROFILED_STEPS) -> dict[str, float]:
    """Return the share of each kind in the time of `count` profiled steps; they sum to 1."""
    with profile(activities=[ProfilerActivity.CPU]):
        step()  # the first step under the profiler is slower
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        for _ in range(count):
            step()
        seconds = time.perf_counter() - began
    spent = dict.fromkeys(KINDS, 0.0)
    for event in profiler.key_averages():
        kind = kind_of(event.key)
        if kind is not None:
            spent[kind] += 1e-6 * event.self_cpu_time_total / seconds
    return {**spent, BETWEEN: 1 - sum(spent.values())}


# ------------------------------------------------------------------ all rows


def row(settings: Settings, repeats: int, profiled: int = PROFILED_STEPS) -> dict:
    """Time the steps at one size; return them, and wavelets over each of the others."""
    calls = steps(settings)
    timings = take_turns(calls, repeats=repeats, budget=30, warm_up=3)
    ours, others = timings[WAVELETS], (ALIBI, STOCK)
    return {
        "length": settings.train_length,
        "batch": settings.batch,
        "layers": settings.layers,
        "heads": settings.heads,
        "head_size": settings.head_dim,
        "seconds": {name: timing.summary() for name, timing in timings.items()},
        "ratio": {
            name: {
                "min": min(ours.seconds) / min(timings[name].seconds),
                "rounds": ours.over(timings[name]).median,
            }
            for name in others
        },
        "shares": {name: shares(call, profiled) for name, call in calls.items()},
    }


def measure(settings: Sequence[Settings], threads: int, repeats: int, profiled: int) -> dict:
    """Measure all rows; return them ready for JSON."""
    about = {**surroundings("wavepe", "torch", "transformers"), "threads": threads}
    with prepared(threads):
        rows = [row(one, repeats, profiled) for one in settings]
    return {"environment": about, "encoding": SPEC, "rows": rows}


def table(results: dict) -> str:
    """Return the milliseconds of a step and the profiler's shares, as Markdown."""
    lines = [
        f"| sequences x length | | whole step | {' | '.join(KINDS)} | {BETWEEN} |",
        "|---|---|---:|" + "---:|" * (len(KINDS) + 1),
    ]
    labels = {WAVELETS: f"`{results['encoding']}`", ALIBI: "`alibi`", STOCK: "stock: RoPE, SDPA"}
    for row in results["rows"]:
        for name, label in labels.items():
            time, parts = row["seconds"][name]["min"], row["shares"][name]
            cells = [f"{1e3 * time * part:.1f}" for part in parts.values()]
            lines.append(
                f"| {row['batch']} x {row['length']} | {label} | {1e3 * time:.1f} ms "
                f"| {' | '.join(cells)} |"
            )
        for name, ratio in row["ratio"].items():
            label = f"wavelets / {name}"
            lines.append(f"| | {label} | {ratio['min']:.2f} |" + " |" * (len(KINDS) + 1))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="number of torch's threads (default 1)"
    )
    add_repeats(parser, 51, "steps of each model")
    add_json(parser)
    add_quick(parser, "tiny sizes")
    args = parser.parse_args(argv)
    demo = demo_settings()
    if args.quick:
        sizes, profiled = [replace(demo, layers=1, train_length=16, batch=2)], 1
    else:
        length, batch = LONGER
        sizes, profiled = [demo, replace(demo, train_length=length, batch=batch)], PROFILED_STEPS
    results = measure(sizes, args.threads, args.repeats, profiled)
    print(table(results))
    keep(results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
