"""docs/results/swap.md, from docs/results/hf-swap.json.

That file is the results.json of examples/hf_swap_and_train.py.
"""

from __future__ import annotations

from pathlib import Path

from wavepe.experiments.report import headings, rows_of
from wavepe.experiments.tables import markdown_rows

from .pages import in_threads, kept, wrapped

PAGE = Path("docs", "results", "swap.md")
SWAP = Path("docs", "results", "hf-swap.json")


def blocks(root: Path) -> dict[str, str]:
    results = kept(root, SWAP)
    about, settings = results["environment"], results["settings"]
    threads = in_threads(about["threads"])
    runs, length = results["runs"], results["train_length"]
    lengths = list(map(int, runs[0]["perplexity"]))
    table = markdown_rows("encoding", headings(lengths, length), rows_of(runs, lengths))
    made = (
        f"Figures are perplexities per byte of held-out text, whole sequences. The model has "
        f"{settings['layers']} layers of {settings['hidden']} and {results['parameters']:,} "
        f"parameters. A step takes {settings['batch']} sequences of {length} bytes. There were "
        f"{runs[0]['steps']:,} steps with RoPE ({runs[0]['seconds']:.0f} s) and "
        f"{settings['more']:,} after the swap ({runs[-1]['seconds']:.0f} s). The text is "
        f"{results['text']['description']}; {results['evaluated_bytes']} of these bytes are held "
        f"out. Seed {settings['seed']}. {about['machine']}, {threads}, Python {about['python']}, "
        f"torch {about['torch']}, transformers {about['transformers']}, {about['date']}."
    )
    return {"hf-swap": f"{table}\n{wrapped(made)}"}
