"""README: what was found, with figures of speed, how to get the sources, which encoding to take."""

from __future__ import annotations

import statistics
from pathlib import Path

from wavepe.analysis.plots.drawing import COLOURS, GRID, new_figure

from benchmarks.command import PICTURES, RESULTS, table
from benchmarks.real_model import TRAINED_LENGTH

from .adapt import deciding, largest
from .choose import YARN, cases, decoding, means
from .claims import BEST, LARGE_BEST, W, loaded
from .headlines import bench_headline
from .pages import addresses, kept, wrapped
from .runs import comparison

PAGE = Path("README.md")
WIDTH = 120
# Rows of the picture: label, colour, and by how many points the label is moved up.
LINES = {
    BEST: ("wavelets, biases,\nprojection, KERPLE", COLOURS[0], 8),
    "kerple": ("KERPLE alone", COLOURS[3], -16),
    "alibi": ("ALiBi", COLOURS[2], 0),
    YARN: ("RoPE with YaRN", COLOURS[5], 0),
    "rope": ("RoPE", COLOURS[1], 0),
}


def blocks(root: Path) -> dict[str, str]:
    return {
        "found": found(root),
        "address": how_to_get(root),
        "choice": choice(root),
    }


def draw(root: Path) -> None:
    """Draw the share of hidden facts that are found, over the length of the text.

    The lines have their names beside them, so that a phone shows them, too.
    """
    needle = comparison(root, "tasks-needle")
    lengths = needle["environment"]["settings"]["lengths"]
    figure = new_figure(5.2, 3.0)
    axes = figure.subplots()
    for row, (label, colour, up) in LINES.items():
        runs = [run["accuracy"] for run in needle["runs"] if run["encoding"] == row]
        shares = [statistics.fmean(run[str(n)] for run in runs) for n in lengths]
        axes.plot(lengths, shares, color=colour, marker="o", linewidth=2.5)
        axes.annotate(label, (lengths[-1], shares[-1]), xytext=(9, up), color=colour,
            textcoords="offset points", va="center", weight="bold")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n}\n({n // needle['train_length']}x)" for n in lengths])
    axes.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
    axes.set(xlabel="bytes of text (times the trained length)", ylabel="hidden facts found")
    axes.grid(True, **GRID)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(root / PICTURES / "found.png")


def found(root: Path) -> str:
    """Return the main findings, each with what it does not show, and figures of speed."""
    needle = means(root, "tasks-needle", "accuracy")
    keys, chains = (means(root, f"tasks-{task}", "accuracy") for task in ("keys", "tracking"))
    small, combined = (means(root, x) for x in ("wavelet", "combinations"))
    real = largest(root)
    arms = {row["arm"]: row["perplexity"] for row in real["rows"]}
    (swap,) = (row["encoding"] for row in real["rows"] if row["arm"] == "plain")
    once, twice = (str(TRAINED_LENGTH * factor) for factor in (1, 2))
    few = deciding(root)
    short = {row["arm"]: row["perplexity"] for row in few["rows"]}
    yarn, kerple, control = (short[x] for x in ("yarn-trained", "wavelet-kerple", "control"))
    lengths = [n for n in yarn if yarn[n] < kerple[n]]
    better = "every length" if len(lengths) == len(yarn) else f"{', '.join(lengths)} tokens"
    behind = arms["plain"][once] / arms["control"][once] - 1
    facts = (
        "**Hidden facts.** Small Llamas (0.2 million parameters, three seeds), trained on texts of "
        f"128 bytes, find a fact hidden in 2048 bytes in {_percent(needle(BEST, 16))} of cases "
        "with wavelets with biases, projection and KERPLE, "
        f"{_percent(needle('kerple', 16))} with KERPLE alone, "
        f"{_percent(needle('transformer_xl', 16))} with Transformer-XL, "
        f"{_percent(needle('alibi', 16))} with ALiBi, {_percent(needle(W, 16))} with wavelets "
        f"alone, and {_percent(needle(YARN, 16))} with RoPE and YaRN at inference. Of eight "
        f"facts the first two encodings find {_percent(keys(BEST, 16))} and "
        f"{_percent(keys('kerple', 16))}, but one of the wavelets' three seeds never "
        "learns the task. For chains of facts YaRN is better: "
        f"{_percent(chains(YARN, 8))} against the wavelets' {_percent(chains(BEST, 8))} at 8 times "
        "the length ([all tasks](docs/results/index.md#tasks)).",
        f"**Perplexity** of such models at 16 times the length is {small(BEST, 16)} with these "
        f"wavelets, {small('transformer_xl', 16)} with Transformer-XL{alike(root)}, "
        f"{small('kerple', 16)} with KERPLE, and {small(YARN, 16)} with YaRN. Evaluated on more "
        f"text, the wavelets reach {combined(BEST, 16)}, and Transformer-XL with KERPLE "
        f"{combined('transformer_xl+kerple', 16)} ([what this does not "
        "show](docs/concepts/extrapolation.md#what-does-not-follow)).",
        "**A real model**, SmolLM2-135M. After [the same "
        f"{few['settings']['tokens']:,} tokens of "
        "fine-tuning](docs/results/adapt.md#yarn-or-a-swap-with-the-same-training), YaRN is better "
        f"than a swap to `wavelet+kerple` at {better}: {yarn[once]:.2f} against {kerple[once]:.2f} "
        f"at the trained length, {yarn[twice]:.2f} against {kerple[twice]:.2f} at twice that; "
        f"plain RoPE reaches {control[once]:.2f} and {control[twice]:.2f}. A longer run, "
        f"{real['settings']['tokens'] // 10**6} million tokens of other text, did not include "
        f"fine-tuned YaRN: at twice the trained length a swap to `{swap}` reaches "
        f"{arms['plain'][twice]:.2f}, plain RoPE {arms['control'][twice]:.2f}, and untrained YaRN "
        f"{arms['yarn'][twice]:.2f}. Within the trained length that swap costs up to {behind:.0%}.",
        f"**Speed on a CPU.** {bench_headline(root)} A decoding step with these wavelets "
        f"takes {decoding(root, LARGE_BEST)} times as long as with the stock model. [All "
        "figures](docs/results/speed.md) show where wavepe is slower.",
        f"**Speed on a GPU.** {gpu_speed(root)}",
    )
    return "\n".join(wrapped(f"- {fact}", "  ", WIDTH) for fact in facts)


def alike(root: Path) -> str:
    """Return a remark if the best wavelets may be no better than Transformer-XL at 16 times."""
    row = loaded(root, "wavelet").paired(BEST, "transformer_xl")[-1]
    return " (a difference that may be chance)" if row["low"] <= 1 <= row["high"] else ""


def _percent(share: str) -> str:
    return f"{float(share):.0%}"


def gpu_speed(root: Path) -> str:
    """Return a sentence on a training step on a GPU."""
    run = kept(root, RESULTS / "gpu-h200.json")
    (step,) = (row for row in run["rows"] if row["name"] == "training 128")
    wavelet, rope = (step["seconds"][way] for way in ("wavelet, wavepe", "RoPE, SDPA"))
    return (
        f"On an {run['environment']['gpu']}, before the kernels were rewritten, a training step of "
        f"a small Llama took {1e3 * wavelet:.1f} ms with wavelets and {1e3 * rope:.1f} ms with "
        f"RoPE and PyTorch's attention, [{wavelet / rope - 1:.0%} "
        "more](docs/guides/gpu.md#results)."
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

    A row with the take and the price of the row above joins it.
    """
    rows: list[tuple[str, str, str]] = []
    for case in cases(root):
        if case.price != "as above":
            rows.append(case[:3])
        elif case.take == rows[-1][1]:
            rows[-1] = f"{rows[-1][0]}, or {case.have.removeprefix('a new model, ')}", *rows[-1][1:]
    text = table(("you have", "use", "price"), rows, "l")
    return text.replace("](", "](docs/guides/")
