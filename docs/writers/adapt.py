"""docs/results/adapt.md, from real-model-*.json and adapt-*.json in benchmarks/results.

benchmarks.real_model and benchmarks.adapt_recipes make these.
"""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.adapt_recipes import means
from benchmarks.command import RESULTS, table
from benchmarks.real_model import DECIDING, DEPTHS

from .pages import commit_of, in_threads, kept, kept_results, wrapped

PAGE = Path("docs", "results", "adapt.md")
PAIRS = 12  # of the small models' heads
STOCK = {
    "stock": "stock model",
    "yarn": "stock, YaRN",
    "self-extend": "stock, Self-Extend",
    "control": "stock, fine-tuned",
    "yarn-trained": "stock, YaRN, fine-tuned",
    "yarn-long": "stock, YaRN, fine-tuned on longer texts",
}


def blocks(root: Path) -> dict[str, str]:
    return {
        "real": real(largest(root)),
        "budget": f"{real(deciding(root))}\n\n{verdict(deciding(root))}",
        "small": "\n\n".join(map(small, kept_results(root, "adapt"))),
    }


def largest(root: Path) -> dict[str, Any]:
    """Return the kept run of benchmarks.real_model with the most tokens."""
    return max(kept_results(root, "real-model"), key=lambda run: run["settings"]["tokens"])


def deciding(root: Path) -> dict[str, Any]:
    """Return the kept run of benchmarks.real_model on a CPU, or as much of it as there is."""
    return kept(root, RESULTS / "real-model-cpu.json", "real_model FOLDER")


def same_training(root: Path, length: int) -> str:
    """Say what RoPE, YaRN and a swap have at a length after the same training, where measured."""
    run = deciding(root)
    settings, rows = run["settings"], {row["arm"]: row for row in run["rows"]}
    names = {"control": "plain RoPE", "yarn-trained": "YaRN", "wavelet-kerple": "`wavelet+kerple`"}
    figures = {name: rows.get(name, {}).get("perplexity", {}).get(str(length)) for name in names}
    if figures["yarn-trained"] is None:
        return "YaRN with the same fine-tuning was not measured"
    listed = ", ".join(
        f"{names[name]} {'not measured' if value is None else f'{value:.2f}'}"
        for name, value in figures.items()
    )
    trained = f"{settings['tokens']:,} tokens in sequences of {settings['length']}"
    return f"After the same training, {trained}, the perplexity at {length} is: {listed}"


def untrained(root: Path, length: int) -> str:
    """Say what the model has at a length without training: Self-Extend, YaRN and plain RoPE."""
    run = deciding(root)
    arms = {row["arm"]: row["perplexity"][str(length)] for row in run["rows"]}
    return (
        f"{run['model'].removesuffix('-Instruct')} at {length} tokens: {arms['self-extend']:.2f}, "
        f"YaRN {arms['yarn']:.2f}, plain RoPE {arms['stock']:.2f}"
    )


def farthest(root: Path, spec: str) -> str:
    """Return the mean perplexity, at the longest length, of the smallest models with `spec`.

    They are those of 300 steps without transfer and LoRA.
    """
    run = min(kept_results(root, "adapt"), key=lambda run: run["length"])
    perplexities = [
        list(row["perplexity"].values())[-1]
        for row in run["rows"]
        if (row["spec"], row["steps"], row["transfer"], row["lora"]) == (spec, 300, 0, None)
    ]
    return f"{statistics.fmean(perplexities):.2f}"


# ---- a real model --------------------------------------------------------------------------------


def real(run: dict[str, Any]) -> str:
    """Return the table of a run of benchmarks.real_model, the best at the longest length first."""
    settings = run["settings"]
    lengths = _lengths(run, "perplexity")
    needles = _lengths(run, "needle")
    rows = sorted(run["rows"], key=lambda row: row["perplexity"].get(lengths[-1], math.inf))
    heads = ["", "recipe", "rate", *(f"{n} tokens" for n in lengths)]
    heads += [*(f"needle, {n}" for n in needles), "training"]
    cells = []
    for row in rows:
        line = [_named(row), row.get("recipe", ""), f"{row['rate']:g}" if "rate" in row else ""]
        line += [_figure(row["perplexity"].get(n)) for n in lengths]
        shares = (row.get("needle", {}).get(n) for n in needles)
        line += [_figure(None if x is None else statistics.fmean(x)) for x in shares]
        cells.append([*line, f"{row['seconds']:.0f} s" if "seconds" in row else ""])
    steps = settings["tokens"] // (settings["length"] * settings["batch"])
    words = [
        f"{run['model']}: {settings['tokens']:,} tokens of training in {steps} steps of "
        f"{settings['batch']} x {settings['length']} tokens, rate {settings['lr']:g}"
        f"{', bfloat16' if settings['bf16'] else ''}. {settings['held_out']:,} held-out tokens, "
        "one seed."
    ]
    if needles:
        trials = sorted({row["trials"] for row in rows if "trials" in row})
        words.append(
            f"Needle: the share of facts found, {' or '.join(map(str, trials))} at each of the "
            f"depths {', '.join(map(str, DEPTHS))}."
        )
    machines: dict[str, list[str]] = {}
    for row in rows:
        about = row.get("environment") or run["environment"]
        machines.setdefault(_machine(about), []).append(_named(row))
    for machine, names in machines.items():
        which = f" ({'; '.join(names)})" if len(machines) > 1 else ""
        words.append(f"{machine}{which}.")
    missing = {arm.name: arm for arm in DECIDING if "environment" not in run}
    for row in rows:
        missing.pop(row["arm"], None)
    if missing:
        left = "; ".join(STOCK.get(name) or f"`{arm.spec}`" for name, arm in missing.items())
        words.append(f"Not measured yet: {left}.")
    return "\n\n".join([table(heads, cells, "llr"), wrapped(" ".join(words))])


def verdict(run: dict[str, Any]) -> str:
    """Return a sentence that compares a swap with YaRN after the same training."""
    rows = {row["arm"]: row["perplexity"] for row in run["rows"]}
    if not {"yarn-trained", "wavelet-kerple"} <= rows.keys():
        return "YaRN and `wavelet+kerple` cannot be compared yet: the table lacks one of them."
    yarn, swap = rows["yarn-trained"], rows["wavelet-kerple"]
    differences = [f"{swap[n] / yarn[n] - 1:+.0%} at {n}" for n in yarn if n in swap]
    return wrapped(
        "Perplexity of `wavelet+kerple` over that of YaRN, after the same training: "
        f"{', '.join(differences)} tokens."
    )


def _lengths(run: dict[str, Any], key: str) -> list[str]:
    """Return all lengths for which a row of the run has figures under `key`, in their order."""
    return sorted({n for row in run["rows"] for n in row.get(key, {})}, key=int)


def _named(row: dict[str, Any]) -> str:
    return STOCK.get(row["arm"]) or f"`{row['encoding']}`"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _machine(about: dict[str, Any]) -> str:
    """Return a sentence, without its end, about where and when a row was measured."""
    threads = f", {in_threads(about['threads'])}" if "threads" in about else ""
    return (
        f"{about.get('gpu') or about['cpu']}{threads}, torch {about['torch']}, transformers "
        f"{about['transformers']}; {about['date'][:10]}, {commit_of(about)}"
    )


# ---- small models --------------------------------------------------------------------------------


def small(run: dict[str, Any]) -> str:
    """Return the table of a run of benchmarks.adapt_recipes, means over seeds."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for row in run["rows"]:
        arms.setdefault(row["arm"], []).append(row)
    lengths = list(run["rows"][0]["perplexity"])
    lines = [f"| encoding | steps | of transfer | {' | '.join(lengths)} |"]
    lines.append("|---|---:|---:|" + "---:|" * len(lengths))
    stock = {row["seed"]: row["stock"] for row in run["rows"]}
    lines.append(f"| stock model | | | {means(list(stock.values()))} |")
    by_steps = sorted(arms.values(), key=lambda arm: -arm[0]["steps"])
    for arm in by_steps:
        first = arm[0]
        named = f"`{_short(first['spec'])}`" if first["spec"] else STOCK["control"]
        lora = f", LoRA of rank {first['lora']}" if first["lora"] else ""
        figures = means([row["perplexity"] for row in arm])
        lines.append(
            f"| {named}{lora} | {first['steps']} | {first['transfer'] or '-'} | {figures} |"
        )
    seeds = len(stock)
    words = (
        f"Perplexity by length in bytes, means of {seeds} seeds, of models with {run['layers']} "
        f"layers that were trained with RoPE at {run['length']} bytes, 1200 steps. A step has 2048 "
        f"tokens. {run['cpu']}, one thread, torch {run['torch']}, {run['date'][:10]}."
    )
    return "\n".join([f"### {run['length']} bytes, {run['layers']} layers", "", *lines, "",
                      wrapped(words)])  # fmt: skip


def _short(spec: str) -> str:
    """Return a spec with the number of pairs that rotate instead of many digits."""
    return re.sub(
        r"(?<=rope:fraction=)[\d.]{6,}",
        lambda match: f"{int(float(match[0]) * PAIRS)}/{PAIRS}",
        spec,
    )
