"""docs/results/speed.md: whole models, from hf-*.json in benchmarks/results, and the operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import hf_decoding, hf_models, hf_profile
from benchmarks.command import RESULTS

from .headlines import bench_section, kernel_rates
from .pages import commit_of, in_threads, kept, wrapped

PAGE = Path("docs", "results", "speed.md")
MODELS = RESULTS / "hf-models.json"
DECODING = RESULTS / "hf-decoding.json"
PROFILE = RESULTS / "hf-profile.json"


def blocks(root: Path) -> dict[str, str]:
    models, decoding, profile = (kept(root, path) for path in (MODELS, DECODING, PROFILE))
    sizes = models["sizes"]
    shape = (
        f"The model has {sizes['layers']} layers of {sizes['hidden']} with {sizes['heads']} heads, "
        f"and a vocabulary of {models['vocabulary']}."
    )
    found = {
        "hf-time": (models, hf_models.time_table, shape),
        "hf-memory": (models, hf_models.memory_table, shape),
        "hf-fused-rope": (models, hf_models.fused_table, shape),
        "hf-decoding": (
            decoding,
            hf_decoding.table,
            f"Caches of {decoding['cached']} tokens.",
        ),
        "hf-profile": (profile, hf_profile.table, ""),
    }
    texts = {
        name: f"{table(results)}\n\n{wrapped(f'{words} {versions(results)}'.strip())}"
        for name, (results, table, words) in found.items()
    }
    return {
        **texts,
        "bench": bench_section(root, "../../"),
        "kernels": kernel_rates(root, "../../"),
    }


def versions(results: dict[str, Any]) -> str:
    """Return the machine and the versions as a sentence."""
    about = results["environment"]
    return (
        f"{about['cpu']}, {in_threads(about['threads'])}, {about['variant']}; "
        f"torch {about['torch']}, transformers {about['transformers']}; {about['date'][:10]}, "
        f"{commit_of(about)}."
    )
