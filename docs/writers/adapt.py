"""docs/results/adapt.md, from real-model-*.json and adapt-*.json in benchmarks/results.

benchmarks.real_model and benchmarks.adapt_recipes make these.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.adapt_recipes import means

from .pages import commit_of, kept_results, wrapped

PAGE = Path("docs", "results", "adapt.md")
PAIRS = 12  # of the small models' heads
STOCK = {"stock": "stock model", "yarn": "stock, YaRN", "control": "stock, fine-tuned"}


def blocks(root: Path) -> dict[str, str]:
    return {
        "real": "\n\n".join(map(real, kept_results(root, "real-model"))),
        "small": "\n\n".join(map(small, kept_results(root, "adapt"))),
    }


def largest(root: Path) -> dict[str, Any]:
    """Return the kept run of benchmarks.real_model with the most tokens."""
    return max(kept_results(root, "real-model"), key=lambda run: run["settings"]["tokens"])


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
    """Return the table of a run of benchmarks.real_model."""
    rows, settings = run["rows"], run["settings"]
    about = run.get("environment") or rows[0]["environment"]
    rows = sorted(rows, key=lambda row: row["arm"] not in STOCK)
    lengths = list(rows[0]["perplexity"])
    lines = [f"| | recipe | {' | '.join(f'{n} tokens' for n in lengths)} | training |"]
    lines.append("|---|---|" + "---:|" * (len(lengths) + 1))
    for row in rows:
        named = STOCK.get(row["arm"]) or f"`{row['encoding']}`"
        cells = [f"{row['perplexity'][n]:.2f}" for n in lengths]
        took = f"{row['seconds']:.0f} s" if "seconds" in row else ""
        lines.append(f"| {named} | {row.get('recipe', '')} | {' | '.join(cells)} | {took} |")
    steps = settings["tokens"] // (settings["length"] * settings["batch"])
    words = (
        f"{run['model']}: {settings['tokens']:,} tokens of training in {steps} steps of "
        f"{settings['batch']} x {settings['length']} tokens, rate {settings['lr']:g}"
        f"{', bfloat16' if settings['bf16'] else ''}. {about.get('gpu') or about['cpu']}, torch "
        f"{about['torch']}, transformers {about['transformers']}; {about['date'][:10]}, "
        f"{commit_of(about)}."
    )
    return "\n".join([*lines, "", wrapped(words)])


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
