"""docs/internals/attention-gpu.md: what Triton gives each kernel of attention."""

from __future__ import annotations

from pathlib import Path

from benchmarks import attention_kernels
from benchmarks.command import RESULTS

from .pages import kept, wrapped

PAGE = Path("docs", "internals", "attention-gpu.md")


def blocks(root: Path) -> dict[str, str]:
    results = kept(root, RESULTS / "attention-kernels.json", "attention kernels")
    sentence = (
        "A cell lists registers per thread, bytes of stack where the kernel spills (with a star: "
        "in a loop, too), kilobytes of shared memory, and warps, for bfloat16. All of these "
        "kernels use tensor cores; `diagonal_sums`, which sums the gradient of `bias`, and "
        "`merge_splits` do not. "
        f"Triton {results['triton']}."
    )
    return {"kernels": f"{attention_kernels.table(results)}\n\n{wrapped(sentence)}"}
