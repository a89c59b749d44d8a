"""docs/results/fairseq.md: the demo, from fairseq-demo.json, and the speed of training."""

from __future__ import annotations

from pathlib import Path

from wavepe.experiments.report import headings, rows_of
from wavepe.experiments.tables import markdown_rows

from benchmarks import fairseq_training
from benchmarks.command import RESULTS

from .pages import in_threads, kept, wrapped

PAGE = Path("docs", "results", "fairseq.md")
DEMO = Path("docs", "results", "fairseq-demo.json")
SPEED = RESULTS / "fairseq-training.json"


def blocks(root: Path) -> dict[str, str]:
    return {"fairseq-demo": demo(kept(root, DEMO)), "fairseq-speed": speed(kept(root, SPEED))}


def demo(results: dict) -> str:
    """Return the picture, a table for each protocol, and how they were made, as Markdown."""
    length, about = results["train_length"], results["environment"]
    protocols = {
        "blocks": "In blocks (`--context-window 0`)",
        "sliding": "Sliding: three quarters of each block are read again and not scored",
    }
    lines = ["![Perplexity per word over the evaluated length](fairseq-demo.png)", ""]
    lines += ["Figures are perplexities per word. The best of each column is bold.", ""]
    for protocol, words in protocols.items():
        runs = [run for run in results["runs"] if run["protocol"] == protocol]
        lengths = sorted(map(int, runs[0]["perplexity"]))
        lines += [f"{words}:", ""]
        lines += [markdown_rows("encoding", headings(lengths, length), rows_of(runs, lengths))]
    seconds = {run["seconds"] for run in results["runs"]}
    package = "fairseq" if "fairseq" in about else "fairseq-fixed"
    made = (
        f"The text is {results['text']}; {results['scored_tokens']} tokens are scored. A training "
        f"takes {results['updates']} updates of {results['tokens_per_update']} tokens, and "
        f"{min(seconds):.0f} to {max(seconds):.0f} s with {about['jobs']} at a time. Seed "
        f"{results['runs'][0]['seed']}. {about['machine']}, Python {about['python']}, "
        f"torch {about['torch']}, {package} {about[package]}, {about['date']}."
    )
    return "\n".join([*lines, wrapped(made)])


def speed(results: dict) -> str:
    """Return the words per second, and the machine and versions, as Markdown."""
    about, sizes = results["environment"], results["sizes"]
    threads = in_threads(about["threads"])
    words = (
        f"Words per second of training; in brackets the ratio to fairseq's own encoding. The model "
        f"is `transformer_lm_wiki103` with {sizes['layers']} layers of {sizes['embed_dim']}, "
        f"{sizes['attention_heads']} heads and {results['vocabulary']} words. fairseq's Trainer "
        "makes the updates. The models take turns in one process, and the fastest of several "
        "updates counts."
    )
    made = (
        f"{about['cpu']}, {threads}, {about['variant']}; torch {about['torch']}, fairseq "
        f"{about['fairseq']}; {about['date'][:10]}, commit {str(about['commit'])[:12]}: "
        "`python -m benchmarks.fairseq_training`."
    )
    table = fairseq_training.table(results)
    return "\n".join([wrapped(words), "", table, "", wrapped(made)])
