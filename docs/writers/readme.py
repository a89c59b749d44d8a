"""README: how to get the sources, what was found, which encoding to take, and figures of speed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from wavepe.analysis.plots.drawing import COLOURS, GRID, new_figure

from benchmarks.command import PICTURES, RESULTS, table
from benchmarks.real_model import TRAINED_LENGTH

from .adapt import largest
from .choose import YARN, cases, decoding, means
from .claims import BEST, LARGE_BEST
from .headlines import bench_headline
from .pages import addresses, commit_of, wrapped
from .runs import comparison

PAGE = Path("README.md")
WIDTH = 120
# Rows of the picture: label and colour.
LINES = {
    BEST: ("wavelets + KERPLE", COLOURS[0]),
    "alibi": ("ALiBi", COLOURS[2]),
    YARN: ("RoPE with YaRN", COLOURS[5]),
    "rope": ("RoPE", COLOURS[1]),
}


def blocks(root: Path) -> dict[str, str]:
    return {
        "found": found(root),
        "address": how_to_get(root),
        "choice": choice(root),
        "bench": bench_headline(root),
        "gpu-step": gpu_step(root),
    }


def draw(root: Path) -> None:
    """Draw the share of hidden facts that are found, over the length of the text.

    The lines have their names beside them, so that a phone shows them, too.
    """
    needle = comparison(root, "tasks-needle")
    lengths = needle["environment"]["settings"]["lengths"]
    figure = new_figure(5.2, 3.0)
    axes = figure.subplots()
    for row, (label, colour) in LINES.items():
        runs = [run["accuracy"] for run in needle["runs"] if run["encoding"] == row]
        shares = [statistics.fmean(run[str(n)] for run in runs) for n in lengths]
        axes.plot(lengths, shares, color=colour, marker="o", linewidth=2.5)
        axes.annotate(label, (lengths[-1], shares[-1]), xytext=(9, 0), color=colour,
            textcoords="offset points", va="center", weight="bold")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n}\n({n // needle['train_length']}x)" for n in lengths])
    axes.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
    axes.set(xlabel="bytes of text (times the trained length)", ylabel="hidden facts found")
    axes.grid(True, **GRID)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(root / PICTURES / "found.png")


def found(root: Path) -> str:
    """Return the main findings, each with what it does not show."""
    needle = means(root, "tasks-needle", "accuracy")
    chains = means(root, "tasks-tracking", "accuracy")
    small, recent = means(root, "combinations"), means(root, "recent")
    real = largest(root)
    arms = {row["arm"]: row["perplexity"] for row in real["rows"]}
    once, twice = str(TRAINED_LENGTH), str(2 * TRAINED_LENGTH)
    behind = arms["plain"][once] / arms["control"][once] - 1
    facts = (
        f"**Hidden facts.** In texts 16 times as long as those of the training, small Llamas with "
        f"wavelets and KERPLE find the hidden fact in {_percent(needle(BEST, 16))} of the cases, "
        f"with ALiBi in {_percent(needle('alibi', 16))}, with RoPE and YaRN in "
        f"{_percent(needle(YARN, 16))}. For chains of facts YaRN is better: "
        f"{_percent(chains(YARN, 8))} against {_percent(chains(BEST, 8))} at 8 times the length.",
        f"**Perplexity** of these models at 16 times the length is {small(BEST, 16)} with wavelets "
        f"and KERPLE, {small('transformer_xl', 16)} with Transformer-XL, {recent('kerple', 16)} "
        f"with KERPLE alone, {recent(YARN, 16)} with YaRN. Low perplexity [does not "
        "show](docs/concepts/extrapolation.md#what-does-not-follow) that a model uses distant "
        "context.",
        f"**A real model.** After a swap and {real['settings']['tokens'] // 10**6} million tokens "
        f"of fine-tuning, SmolLM2-135M has a perplexity of {arms['plain'][twice]:.2f} at twice "
        f"its trained length; without the swap the same fine-tuning {arms['control'][twice]:.2f}. "
        f"Within the trained length the swap costs up to {behind:.0%}. YaRN without any training "
        f"has {arms['yarn'][twice]:.2f} ([all figures](docs/results/adapt.md)).",
    )
    return "\n".join(wrapped(f"- {fact}", "  ", WIDTH) for fact in facts)


def _percent(share: str) -> str:
    return f"{float(share):.0%}"


def gpu_step(root: Path) -> str:
    """Return how long a training step takes on a GPU, beside RoPE."""
    run = json.loads((root / RESULTS / "gpu-h200.json").read_text("utf-8"))
    (step,) = (row for row in run["rows"] if row["name"] == "training 128")
    wavelet, rope = (step["seconds"][way] for way in ("wavelet, wavepe", "RoPE, SDPA"))
    return wrapped(
        f"On a GPU ({run['environment']['gpu']}, {commit_of(run['environment'])}) a "
        f"training step of a small Llama took {1e3 * wavelet:.1f} ms with wavelets and "
        f"{1e3 * rope:.1f} ms with RoPE and PyTorch's attention, so {wavelet / rope - 1:.0%} more "
        "([GPUs](docs/guides/gpu.md#results)). On a CPU a decoding step with the recommended "
        f"encoding takes {decoding(root, LARGE_BEST)} times as long as with the stock model. [All "
        "figures](docs/results/speed.md) include where wavepe is slower.",
        width=WIDTH,
    )


def how_to_get(root: Path) -> str:
    """Return the command that clones the sources, where they have an address."""
    urls = addresses(root)
    if "Repository" not in urls:
        return "In a checkout of the sources:"
    documentation = urls.get("Documentation")
    lines = [f"[Documentation]({documentation})", ""] if documentation else []
    return "\n".join([*lines, "```", f"git clone {urls['Repository']} wavepe", "cd wavepe", "```"])


def choice(root: Path) -> str:
    """Return rows of the table of docs/guides/choose.md, without the evidence and the losses.

    A row with the price of the row above it has no place here.
    """
    rows = [case[:3] for case in cases(root) if case.price != "as above"]
    text = table(("you have", "take", "price"), rows, "l")
    return text.replace("](adapt.md)", "](docs/guides/adapt.md)")
