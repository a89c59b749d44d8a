"""Write the tables of docs/results/speed.md and docs/results/swap.md.

The sources are hf-models.json, hf-decoding.json and hf-profile.json in benchmarks/results, which
the modules of these names make with --json, and docs/results/hf-swap.json, the results.json of
examples/hf_swap_and_train.py.

python -m benchmarks.hf_page --write | --check
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from wavepe.experiments.report import markdown_table

from .attention_page import commit_of
from .command import RESULTS, add_page, new_parser, write_page
from .readme import Missing, bench_section, in_threads, kernel_rates, replaced, wrapped

SPEED_PAGE, SWAP_PAGE = Path("docs", "results", "speed.md"), Path("docs", "results", "swap.md")
SPEED = RESULTS / "hf-models.json"
DECODING = RESULTS / "hf-decoding.json"
PROFILE = RESULTS / "hf-profile.json"
SWAP = Path("docs", "results", "hf-swap.json")


def kept(source: Path, root: Path) -> dict:
    """Return the figures of a file."""
    path = root / source
    if not path.exists():
        raise Missing(f"{source} is missing")
    return json.loads(path.read_text("utf-8"))


def speed_updated(text: str, root: Path) -> str:
    """Return docs/results/speed.md with the tables of the kept figures."""
    from . import hf_decoding, hf_models, hf_profile  # need torch and transformers

    results = kept(SPEED, root)
    for name, table in (
        ("hf-time", hf_models.time_table),
        ("hf-memory", hf_models.memory_table),
        ("hf-fused-rope", hf_models.fused_table),
    ):
        section = f"{table(results)}\n\n{wrapped(measured_on(results))}"
        text = replaced(text, name, section, SPEED_PAGE)
    decoding = kept(DECODING, root)
    made = wrapped(f"Caches of {decoding['cached']} tokens. {versions(decoding['environment'])}")
    section = f"{hf_decoding.table(decoding)}\n\n{made}"
    text = replaced(text, "hf-decoding", section, SPEED_PAGE)
    profiled = kept(PROFILE, root)
    section = f"{hf_profile.table(profiled)}\n\n{wrapped(versions(profiled['environment']))}"
    text = replaced(text, "hf-profile", section, SPEED_PAGE)
    text = replaced(text, "bench", bench_section(root / RESULTS, "../../"), SPEED_PAGE)
    return replaced(text, "kernels", kernel_rates(root / RESULTS), SPEED_PAGE)


def measured_on(results: dict) -> str:
    """Return the machine and versions of the figures."""
    sizes = results["sizes"]
    return (
        f"The model has {sizes['layers']} layers of {sizes['hidden']} with {sizes['heads']} heads, "
        f"and a vocabulary of {results['vocabulary']}. {versions(results['environment'])}"
    )


def versions(about: dict) -> str:
    """Return the machine and the versions as a sentence."""
    return (
        f"{about['cpu']}, {in_threads(about['threads'])}, {about['variant']}; "
        f"torch {about['torch']}, transformers {about['transformers']}; {about['date'][:10]}, "
        f"{commit_of(about)}."
    )


def swap_updated(text: str, root: Path) -> str:
    """Return docs/results/swap.md with the table of the kept figures."""
    results = kept(SWAP, root)
    about, settings = results["environment"], results["settings"]
    threads = in_threads(about["threads"])
    runs, length = results["runs"], results["train_length"]
    table = markdown_table(runs, list(map(int, runs[0]["perplexity"])), length)
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
    section = f"{table}\n{wrapped(made)}"
    return replaced(text, "hf-swap", section, SWAP_PAGE)


PAGES: dict[Path, Callable[[str, Path], str]] = {
    SPEED_PAGE: speed_updated,
    SWAP_PAGE: swap_updated,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if a page is stale (--check) or a source is missing."""
    parser = new_parser(__doc__)
    add_page(parser, Path("the pages"), required=True)
    args = parser.parse_args(argv)
    codes = [write_page(page, new, args.root, args.check) for page, new in PAGES.items()]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
