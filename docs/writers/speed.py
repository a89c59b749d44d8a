"""docs/results/speed.md: whole models, from hf-*.json in benchmarks/results, and the operators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import hf_decoding, hf_models, hf_profile
from benchmarks.command import RESULTS

from .headlines import bench_section, kernel_rates
from .pages import commit_of, in_threads, kept, wrapped

PAGE = Path("docs", "results", "speed.md")
MODELS = RESULTS / "hf-models.json"
DECODING = RESULTS / "hf-decoding.json"
DECODING_ELSEWHERE = "hf-decoding-*.json"  # of other machines
DECODING_LONG = RESULTS / "decoding-long.json"  # after many more tokens
PROFILE = RESULTS / "hf-profile.json"


def blocks(root: Path) -> dict[str, str]:
    models, profile = (kept(root, path) for path in (MODELS, PROFILE))
    sizes = models["sizes"]
    shape = (
        f"The model has {sizes['layers']} layers of {sizes['hidden']} with {sizes['heads']} heads, "
        f"and a vocabulary of {models['vocabulary']}."
    )
    tables = {
        "hf-time": (models, hf_models.time_table, shape),
        "hf-memory": (models, hf_models.memory_table, shape),
        "hf-profile": (profile, hf_profile.table, ""),
    }
    texts = {
        name: f"{table(results)}\n\n{wrapped(f'{words} {versions(results)}'.strip())}"
        for name, (results, table, words) in tables.items()
    }
    return {
        **texts,
        "hf-decoding": "\n\n".join(decoding(root)),
        "bench": bench_section(root, "../../"),
        "kernels": kernel_rates(root, "../../"),
    }


def decoding(root: Path) -> Iterator[str]:
    """Yield the table of each machine, and what stands below it."""
    for path in (DECODING, *sorted((root / RESULTS).glob(DECODING_ELSEWHERE)), DECODING_LONG):
        results = kept(root, path)
        words = f"Caches of {results['cached']} tokens. {versions(results)}"
        yield f"{hf_decoding.table(results)}\n\n{wrapped(words)}"


def versions(results: dict[str, Any]) -> str:
    """Return the machine and the versions as a sentence."""
    about = results["environment"]
    return (
        f"{about['cpu']}, {in_threads(about['threads'])}, {about['variant']}; "
        f"torch {about['torch']}, transformers {about['transformers']}; {about['date'][:10]}, "
        f"{commit_of(about)}."
    )
