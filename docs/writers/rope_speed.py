"""docs/internals/rope-speed.md: the roofline of one case of rope_qk, and multi-scale rotations.

The case is ops.rope_qk, float32, 32 + 8 heads x 2048 x 128, half-split. The page shows the bytes
that the call must move, the time for them at the copy bandwidth of the same run, and the measured
time. The figures come from the results file that README shows.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import multiscale_rope
from benchmarks.command import RESULTS, Missing

from .headlines import newest_results
from .pages import commit_of, in_threads, kept, wrapped

PAGE = Path("docs", "internals", "rope-speed.md")
MULTISCALE = RESULTS / "multiscale-rope.json"
OP, SIZE, DTYPE = "ops.rope_qk", "32+8 heads x 2048 x 128, half-split", "float32"
HEADS, LENGTH, DIM, BYTES = 32 + 8, 2048, 128, 4
HEAD_BYTES = HEADS * LENGTH * DIM * BYTES  # the bytes of q and k
TABLE_BYTES = 2 * LENGTH * DIM // 2 * BYTES
FLOPS = 6 * HEADS * LENGTH * DIM // 2  # four products and two sums for each pair
SITUATIONS = {"warm": ("copy", "copy_"), "fresh": ("clone", "clone")}  # bandwidth, rival


def blocks(root: Path) -> dict[str, str]:
    return {"roofline": roofline(newest(root)), "multiscale": multiscale(kept(root, MULTISCALE))}


def row_of(results: dict, memory: str) -> dict:
    """Return the row of this case and memory, in the variant that wavepe chooses itself."""
    wanted = {
        "op": OP,
        "size": SIZE,
        "dtype": DTYPE,
        "memory": memory,
        "who": "wavepe",
        "variant": results["environment"]["variant"],
    }
    for row in results["rows"]:
        if all(row[key] == value for key, value in wanted.items()):
            if row["work"] != 2 * HEAD_BYTES + TABLE_BYTES:
                raise ValueError(f"{OP} counts {row['work']} bytes, the page another number")
            return row
    raise Missing(f"no row {wanted} in the newest results: python -m benchmarks.bench rope")


def roofline(path: Path) -> str:
    """Return both tables, for warm and fresh memory, as Markdown."""
    results = json.loads(path.read_text("utf-8"))
    machine, about = results["machine"], results["environment"]
    rows = {memory: row_of(results, memory) for memory in SITUATIONS}
    seconds = {memory: row["seconds"] for memory, row in rows.items()}
    least = {
        memory: rows[memory]["work"] / machine[bandwidth]["rate"]
        for memory, (bandwidth, _) in SITUATIONS.items()
    }
    faults = seconds["fresh"]["page_faults"]
    more = seconds["fresh"]["median"] - seconds["warm"]["median"]
    a_page = f"{1e6 * more / faults:.1f} us" if faults else ""
    lines = {
        "q and k read": [_mb(HEAD_BYTES)] * 2,
        "results written": [_mb(HEAD_BYTES)] * 2,
        "cos and sin read": [_mb(TABLE_BYTES)] * 2,
        "**sum: the bytes that rates count**": [_mb(2 * HEAD_BYTES + TABLE_BYTES)] * 2,
        "cache lines of the results, fetched before they are written": [_mb(HEAD_BYTES)] * 2,
        "new pages that the system zeroes": ["", _mb(HEAD_BYTES)],
        "bandwidth of a large copy in the same run": [
            f"{machine[bandwidth]['rate'] / 1e9:.1f} GB/s" for bandwidth, _ in SITUATIONS.values()
        ],
        "**time of the sum at that bandwidth**": [_ms(least[m]) for m in SITUATIONS],
        "**measured, median**": [_ms(seconds[m]["median"]) for m in SITUATIONS],
        "measured, fastest tenth": [_ms(seconds[m]["p10"]) for m in SITUATIONS],
        "measured / time at that bandwidth": [
            f"{seconds[m]['median'] / least[m]:.2f}" for m in SITUATIONS
        ],
        "measured / a copy of q and k in the same rounds": [
            f"{1 / rows[m]['ratios'][rival]['rounds']:.2f}" for m, (_, rival) in SITUATIONS.items()
        ],
        "page faults": [str(seconds[m]["page_faults"]) for m in SITUATIONS],
        "(fresh - warm) / page faults": ["", a_page],
        "arithmetic alone, at the rate of sgemm": [_ms(FLOPS / machine["sgemm"]["rate"]), ""],
    }
    rows_of_table = [f"| {name} | {' | '.join(cells)} |" for name, cells in lines.items()]
    made = (
        f"{about['cpu']}, {about['variant']}, {in_threads(about['threads'])}, last-level cache "
        f"{about['last_level_cache'] / 2**20:.0f} MiB, {about['date'][:10]}; "
        f"[{path.name}](../../benchmarks/results/{path.name})."
    )
    heads = ["| | warm memory | fresh memory |", "|---|---:|---:|"]
    return "\n".join([*heads, *rows_of_table, "", made])


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def newest(root: Path) -> Path:
    path = newest_results(root).get(OP)
    if not path:
        raise Missing(f"no results of {OP}: python -m benchmarks.bench rope --json FILE")
    return path


def multiscale(results: dict) -> str:
    """Return the times of multi-scale rotations over RoPE's, and how they were measured."""
    about, one = results["environment"], results["rows"][0]
    worst = max(error for each in results["rows"] for error in each["errors"].values())
    made = (
        f"Ratio to the time of RoPE: the fastest call over the fastest call, taken in turns. "
        f"{one['heads']} heads of {one['head_size']}, float32. The error of matrices and prefix "
        f"sums is at most {worst:.0e} of the largest number. {about['cpu']}, {about['variant']}, "
        f"one thread, load average {max(about['load_average']):.1f} of {about['cpus']} cores; "
        f"torch {about['torch']}; {about['date'][:10]}, {commit_of(about)}."
    )
    return f"{multiscale_rope.table(results)}\n\n{wrapped(made)}"
