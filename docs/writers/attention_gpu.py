"""docs/internals/attention-gpu.md: what Triton gives each kernel of attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import attention_kernels
from benchmarks.command import RESULTS, table

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
    kernels = f"{attention_kernels.table(results)}\n\n{wrapped(sentence)}"
    return {"kernels": kernels, "kernels-before": changes(root, results)}


def changes(root: Path, results: dict[str, Any]) -> str:
    """Return registers and spills before and after scores in base 2, and instructions after."""
    before = kept(root, RESULTS / "attention-kernels-before.json")
    archs = list(dict.fromkeys(row["arch"] for row in before["rows"]))
    now = {
        _place(row): row for row in results["rows"] if row["queries"] == attention_kernels.LENGTH
    }
    rows: dict[tuple[Any, ...], list[str]] = {}
    for old in before["rows"]:
        new = now[_place(old)]
        pairs = (f"{row['registers']}, {row['spilled']} B" for row in (old, new))
        rows.setdefault(_place(old)[:-1], []).append(" -> ".join(pairs))
    lines = [
        (f"`{place[0]}`", *map(str, place[1:]), *cells, _instructions(now[(*place, 90)]))
        for place, cells in sorted(rows.items())
    ]
    heads = ("kernel", "table", "head size", *(f"sm_{arch}" for arch in archs))
    return table((*heads, "instructions of the loops, sm_90"), lines, "llr")


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kernel"], row["table"], row["head_size"], row["arch"]


def _instructions(row: dict[str, Any]) -> str:
    return ", ".join(map(str, row["loops"]))
