"""Measure time and peak memory of a small Llama, stock and with other position encodings.

`python -m benchmarks.hf_models` prints the tables; `--json FILE` keeps the figures.

The models have the same weights and read the same random tokens. First their forward passes
(evaluation mode, no gradient, no cache) take turns in one process, then their training steps
(forward, loss, backward, AdamW). In the padded rows, a quarter of the first sequence is padding, on
the left. The vocabulary is small, so that the logits do not hide the time and memory of attention.

Peak memory is measured in a process for each contender (Linux only). The process makes the model,
calls it on a short text and makes a training step, so that everything is loaded and AdamW has its
state. It notes its resident memory. The figure is the growth to the peak (VmHWM, reset beforehand)
in a forward pass, and in a training step.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import wavepe.hf
from transformers import LlamaConfig, LlamaForCausalLM

from .attention_memory import kilobytes
from .command import add_json, keep, new_parser
from .machine import surroundings
from .memory import prepared
from .timing import Timing, take_turns

STOCK = "stock"
CONTENDERS = {STOCK: None, "wavelet": "wavelet", "alibi": "alibi", "rope": "rope", "none": "none"}
PHASES = {"forward": "forward", "step": "training step"}
LENGTHS, PADDED = (512, 2048, 8192), 2048
VOCABULARY, HEAD_SIZE = 256, 64
M_MMAP_THRESHOLD = -3  # malloc.h
SHORT = 16  # tokens in the calls before the resident memory is noted
LEAST_ROUNDS = 3
_ROOT = Path(__file__).resolve().parent.parent


class Size(NamedTuple):
    """The size of an input."""

    length: int
    sequences: int = 1
    padded: bool = False

    def rounds(self, most: int) -> int:
        """Return `most` for 512 tokens, and fewer in proportion for more tokens."""
        return min(most, max(LEAST_ROUNDS, most * 512 // (self.length * self.sequences)))


def sizes_of(args: argparse.Namespace) -> list[Size]:
    """Return the sizes of the rows."""
    padded = [Size(args.padded, 2, True)] if args.padded else []
    return [*map(Size, args.lengths), *padded]


# ------------------------------------------------------------------ the measured calls


def stock_model(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int
) -> LlamaForCausalLM:
    """Return a stock Llama with random weights, the same in each call."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max(LENGTHS),
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def same_weights(shape: Sequence[int], specs: Sequence[str]) -> dict[str, LlamaForCausalLM]:
    """Return a model of `stock_model`'s sizes for each encoding; all have the same parameters."""
    stock = stock_model(*shape).eval()
    weights = {id(weight): weight for weight in stock.parameters()}
    copies = {spec: copy.deepcopy(stock, dict(weights)) for spec in specs}
    return {
        spec: model if spec == STOCK else wavepe.hf.patch(model, spec)
        for spec, model in copies.items()
    }


def new_model(spec: str | None, layers: int, hidden: int) -> LlamaForCausalLM:
    """Return a small Llama; the weights are the same for every encoding."""
    heads = hidden // HEAD_SIZE
    inner = -(-8 * hidden // 48) * 16  # 8/3, rounded up to a multiple of 16
    model = stock_model(hidden, layers, heads, max(1, heads // 2), inner)
    return model if spec is None else wavepe.hf.patch(model, spec)


def inputs(size: Size) -> dict[str, torch.Tensor]:
    """Return tokens, and a mask if there is padding; `step_of` adds labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (size.sequences, size.length), generator=generator)
    if not size.padded:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[0, : size.length // 4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def forward_of(model: LlamaForCausalLM, size: Size) -> Callable[[], Any]:
    """Return a call that makes a forward pass."""
    batch = inputs(size)

    def call() -> torch.Tensor:
        with torch.no_grad():
            return model(**batch, use_cache=False).logits

    return call


def step_of(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, size: Size
) -> Callable[[], Any]:
    """Return a call that makes a training step."""
    batch = inputs(size)
    labels = batch["input_ids"]
    if size.padded:
        labels = labels.masked_fill(batch["attention_mask"] == 0, -100)

    def call() -> float:
        loss = model(**batch, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return call


def call_of(model: LlamaForCausalLM, phase: str, size: Size) -> Callable[[], Any]:
    """Return the call of one of PHASES, and set the mode of the model."""
    model.train(phase == "step")
    if phase == "forward":
        return forward_of(model, size)
    return step_of(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), size)


def compared(timings: dict[str, Timing]) -> dict:
    """Return seconds, and their ratio to those of the first, ready for JSON."""
    first = next(iter(timings.values()))
    return {
        "seconds": {name: timing.summary() for name, timing in timings.items()},
        "ratio": {
            name: min(timing.seconds) / min(first.seconds) for name, timing in timings.items()
        },
        "rounds": {name: timing.over(first).median for name, timing in timings.items()},
    }


def times(models: dict[str, LlamaForCausalLM], size: Size, most: int) -> dict:
    """Time both phases of all contenders at one size; return the results by phase."""
    rounds = size.rounds(most)
    row: dict[str, Any] = {**size._asdict()}
    for phase in PHASES:
        calls = {name: call_of(model, phase, size) for name, model in models.items()}
        # If there are few rounds, the first one is the warm-up; the minimum leaves it out.
        timings = take_turns(calls, repeats=rounds, budget=120, warm_up=rounds > LEAST_ROUNDS)
        row[phase] = compared(timings)
    return row


# ------------------------------------------------------------------ memory


def growth(call: Callable[[], Any]) -> int:
    """Return the bytes by which this process's resident memory grows to its peak in a call."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    before = kilobytes("VmRSS")
    call()
    return 1024 * (kilobytes("VmHWM") - before)


def memory_here(name: str, sizes: Sequence[Size], layers: int, hidden: int) -> list[dict]:
    """Measure the memory of one contender in this process, the smaller sizes first."""
    model = new_model(CONTENDERS[name], layers, hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = []
    for size in sorted(sizes):
        short = size._replace(length=SHORT)
        forward_of(model, short)()
        step_of(model, optimizer, short)()
        model.eval()
        grown = {"forward": growth(forward_of(model, size))}
        model.train()
        grown["step"] = growth(step_of(model, optimizer, size))
        rows.append({**size._asdict(), **grown})
    return rows


def memory(name: str, args: argparse.Namespace) -> list[dict]:
    """Run `memory_here` in a process of its own."""
    words = ["--memory-of", name, "--padded", args.padded, "--threads", args.threads]
    words += ["--layers", args.layers, "--hidden", args.hidden, "--lengths", *args.lengths]
    command = [sys.executable, "-m", __spec__.name, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()}")
    return json.loads(done.stdout)


# ------------------------------------------------------------------ decoding


def decoding_of(
    model: LlamaForCausalLM, length: int, sequences: int = 1
) -> tuple[Callable[[], Any], Any]:
    """Return a call that makes a decoding step, and its cache, which has `length` tokens.

    A longer cache than 512 tokens repeats these: a forward pass of many tokens takes minutes.
    """
    ids = inputs(Size(min(length, LENGTHS[0]), sequences))["input_ids"]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    for layer in cache.layers if length > LENGTHS[0] else ():
        times = -(-length // LENGTHS[0])
        layer.keys, layer.values = (
            x.repeat(1, 1, times, 1)[:, :, :length] for x in (layer.keys, layer.values)
        )

    def call() -> torch.Tensor:
        with torch.no_grad():
            return model(ids[:, :1], past_key_values=cache, use_cache=True).logits

    return call, cache


def shortener(caches: dict[str, Any], length: int) -> Callable[[str], None]:
    """Return a function that cuts a cache to `length` tokens again."""

    def shorten(name: str) -> None:
        if added := caches[name].get_seq_length() - length:
            caches[name].crop(-added)  # the meaning of a positive argument differs between versions

    return shorten


# ------------------------------------------------------------------ all rows


def measure(args: argparse.Namespace) -> dict:
    """Measure all rows; return them ready for JSON."""
    began = time.perf_counter()

    def tell(what: str) -> None:
        print(f"{time.perf_counter() - began:4.0f} s  {what}", file=sys.stderr, flush=True)

    about = {**surroundings("wavepe", "torch", "transformers"), "threads": args.threads}
    rows = []
    with prepared(args.threads):
        models = {
            name: new_model(CONTENDERS[name], args.layers, args.hidden) for name in args.contenders
        }
        for size in sizes_of(args):
            rows.append(times(models, size, args.rounds))
            tell(f"time, {size.sequences} x {size.length}{', padded' * size.padded}")
        del models
    for name in args.contenders:
        for row in memory(name, args):
            (timed,) = (r for r in rows if all(r[key] == row[key] for key in Size._fields))
            timed.setdefault("memory", {})[name] = {phase: row[phase] for phase in PHASES}
        tell(f"memory, {name}")
    shape = {"layers": args.layers, "hidden": args.hidden, "heads": args.hidden // HEAD_SIZE}
    return {"environment": about, "sizes": shape, "vocabulary": VOCABULARY, "rows": rows}


def label(row: dict) -> str:
    """Return the name of a row: the size of its input."""
    return f"{row['sequences']} x {row['length']}{', padded' * row['padded']}"


def time_table(results: dict) -> str:
    """Return milliseconds, and in brackets the ratio to the first contender, as Markdown."""
    return _table(
        results,
        lambda row, phase, name: row[phase]["seconds"][name]["min"],
        lambda seconds: f"{1e3 * seconds:,.{0 if seconds >= 0.1 else 1}f} ms",
    )


def memory_table(results: dict) -> str:
    """Return the memory, and in brackets the ratio to the first contender, as Markdown."""
    return _table(
        results,
        lambda row, phase, name: row["memory"][name][phase],
        lambda size: f"{size / 2**20:,.0f} MiB",
    )


def _table(
    results: dict, value: Callable[[dict, str, str], float], written: Callable[[float], str]
) -> str:
    names = list(results["rows"][0]["memory"])
    lines = [f"| sequences x length | | {' | '.join(names)} |", "|---|---|" + "---:|" * len(names)]
    for row in results["rows"]:
        for phase, words in PHASES.items():
            first, *values = [value(row, phase, name) for name in names]
            cells = [written(first), *(f"{written(each)} ({each / first:.2f})" for each in values)]
            lines.append(f"| {label(row)} | {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--threads", type=int, default=1, metavar="N", help="number of torch's threads (default 1)")
    add(
        "--rounds",
        type=int,
        default=20,
        metavar="N",
        help="rounds for 512 tokens, fewer for more (default 20)",
    )
    add("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N", help="numbers of tokens")
    add("--padded", type=int, default=PADDED, metavar="N",
        help=f"tokens of the two padded sequences; 0: no such row (default {PADDED})")  # fmt: skip
    add("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS,
        help="models to compare; ratios are to the first (default: all)")  # fmt: skip
    add("--layers", type=int, default=2, metavar="N", help="number of layers (default 2)")
    add(
        "--hidden",
        type=int,
        default=256,
        help=f"hidden size, a multiple of the head size {HEAD_SIZE} (default 256)",
    )
    add("--memory-of", choices=CONTENDERS, help="measure memory in this process, and print JSON")
    add_json(parser)
    args = parser.parse_args(argv)
    if args.memory_of:
        torch.set_num_threads(args.threads)
        # Each large tensor is a mapping, which is freed at once, so the heap has no holes to count.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
        print(json.dumps(memory_here(args.memory_of, sizes_of(args), args.layers, args.hidden)))
        return 0
    results = measure(args)
    for table in (time_table, memory_table):
        print(f"\n{table(results)}")
    keep(results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
