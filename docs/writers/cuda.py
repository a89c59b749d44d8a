"""docs/internals/cuda.md: what nvcc gives each CUDA kernel."""

from __future__ import annotations

from pathlib import Path

from benchmarks import cuda_kernels
from benchmarks.command import RESULTS

from .pages import kept

PAGE = Path("docs", "internals", "cuda.md")


def blocks(root: Path) -> dict[str, str]:
    results = kept(root, RESULTS / "cuda-kernels.json", "cuda_kernels")
    legend = "Registers per thread, the most instructions of an architecture, and bytes per access."
    return {"kernels": f"{cuda_kernels.table(results)}\n\n{legend} {results['nvcc']}."}
