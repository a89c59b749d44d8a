"""Count the Python calls of wavepe in a forward pass and in a decoding step of a small Llama.

`python -m benchmarks.hf_calls` prints the table; `--json FILE` keeps the figures. `--microseconds`
also times the calls beside the stock model, which needs a quiet machine.

A pass of a model with one layer and one with two, both warm, tells calls per pass from calls per
layer. A call is an event of sys.setprofile: a function, a generator that goes on, a property. Files
are the different modules of wavepe that are entered. The module imports only `patch` of wavepe, so
that it also measures other versions: PYTHONPATH=OTHER/python python -m benchmarks.hf_calls.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import wavepe
from transformers import LlamaConfig, LlamaForCausalLM
from wavepe.hf import patch

RECOMMENDED = "wavelet:scales=4,biases=true,projection=true+kerple"
SPECS = ("rope", "wavelet", RECOMMENDED)
TOKENS, CACHED = 16, 16
PHASES = ("forward", "decoding")
PACKAGE = str(Path(wavepe.__file__).parent)


def model_of(layers: int, spec: str | None) -> LlamaForCausalLM:
    """Return a small Llama with random weights, patched with an encoding unless `spec` is None."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    return model if spec is None else patch(model, spec)


def call_of(model: LlamaForCausalLM, phase: str) -> Callable[[], Any]:
    """Return a warm call: a forward pass, or a decoding step whose cache is cut again after it."""
    ids = torch.arange(TOKENS)[None]
    if phase == "forward":

        def call() -> None:
            model(ids, use_cache=False)

    else:
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values

        def call() -> None:
            model(ids[:, :1], past_key_values=cache, use_cache=True)
            cache.crop(-1)

    with torch.no_grad():
        for _ in range(3):
            call()
    return call


def calls_in(call: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """Return how often each function of wavepe is called, by file and name."""
    counts: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            counts[code.co_filename[len(PACKAGE) + 1 :], code.co_qualname] += 1

    with torch.no_grad():
        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(None)
    return counts


def microseconds(calls: dict[str, Callable[[], Any]], rounds: int = 200) -> dict[str, float]:
    """Return the time of the fastest of many calls that take turns."""
    best = dict.fromkeys(calls, float("inf"))
    with torch.no_grad():
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                best[name] = min(best[name], 1e6 * (time.perf_counter() - start))
    return best


def measure(specs: Sequence[str] = SPECS, *, timed: bool = False) -> list[dict[str, Any]]:
    """Return a row for each phase and encoding, ready for JSON."""
    rows = []
    for phase in PHASES:
        two_layers = {spec: call_of(model_of(2, spec), phase) for spec in specs}
        if timed:
            seconds = microseconds({"stock": call_of(model_of(2, None), phase), **two_layers})
        for spec in specs:
            one, two = calls_in(call_of(model_of(1, spec), phase)), calls_in(two_layers[spec])
            per_layer = two.total() - one.total()
            row = {
                "phase": phase,
                "encoding": spec,
                "per pass": one.total() - per_layer,
                "per layer": per_layer,
                "files": len({file for file, _ in two}),
                "functions": len(two),
                "calls": {f"{file} {name}": count for (file, name), count in two.most_common()},
            }
            if timed:
                row["microseconds over stock"] = seconds[spec] - seconds["stock"]
            rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    heads = [name for name in rows[0] if name != "calls"]
    lines = [heads, ["---"] * 2 + ["---:"] * (len(heads) - 2)]
    lines += [
        [f"{row[name]:.0f}" if isinstance(row[name], float) else str(row[name]) for name in heads]
        for row in rows
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--specs", nargs="+", default=SPECS, metavar="SPEC")
    parser.add_argument("--microseconds", action="store_true", help="time the calls, too")
    parser.add_argument("--functions", action="store_true", help="list calls of each function")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = measure(args.specs, timed=args.microseconds)
    print(table(rows))
    if args.functions:
        for row in rows:
            print(f"\n{row['phase']}, {row['encoding']}, two layers:")
            for function, count in row["calls"].items():
                print(f"{count:5} {function}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
