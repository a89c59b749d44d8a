"""Writes the kept results of the attention benchmarks into docs/internals/attention-speed.md.

python -m benchmarks.attention_page --write | --check

Times come from the newest results of `benchmarks.bench --full` with one and with two threads, the
rest from attention-memory.json, attention-tails-*.json (one of each machine),
attention-threads.json and training-step.json beside them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from . import attention_memory, attention_tails, attention_threads, training_step
from .bench_attention import BY_DISTANCE
from .command import page_command
from .readme import Missing, in_threads, replaced

RESULTS = Path("benchmarks", "results")
PAGE = Path("docs", "internals", "attention-speed.md")
FORWARD, TRAINED = "ops.attention", "ops.attention + gradients"
DECODE = "ops.attention, one query"
SHORT = {FORWARD: "forward", TRAINED: "with gradients"}
THREADS = (1, 2)
SIZE = re.compile(r"\d+ heads x (\d+) x (\d+), (.*)")


class Rows:
    """The attention rows of one results file, of the variant that wavepe uses by itself."""

    def __init__(self, path: Path, results: dict):
        self.path, self.about, self.machine = path, results["environment"], results["machine"]
        self.found: dict[tuple, dict] = {}
        for row in results["rows"]:
            size = SIZE.fullmatch(row["size"])
            ours = row["variant"] in (self.about["variant"], None)
            if "attention" in row["op"] and ours and size:
                length, d, kind = size.groups()
                self.found[row["op"], row["dtype"], row["who"], kind, int(length), int(d)] = row

    def get(self, op: str, kind: str, length: int, d: int, who="wavepe", dtype="float32"):
        """The row, or None."""
        return self.found.get((op, dtype, who, kind, length, d))

    @staticmethod
    def over(row: dict | None, rival: str) -> str:
        """wavepe's time over the rival's; nothing where there is no such row or rival."""
        ratio = row and row["ratios"].get(rival)
        return f"{1 / ratio['rounds']:.2f}" if ratio else ""

    @staticmethod
    def times(row: dict | None, rival: str) -> str:
        """The rival's time over wavepe's."""
        ratio = row and row["ratios"].get(rival)
        return f"{ratio['rounds']:.1f}" if ratio else ""

    def sizes(self) -> list[tuple[int, int]]:
        """(length, head size) of the cases with wavelets."""
        keys = [key for key in self.found if key[:4] == (FORWARD, "float32", "wavepe", "wavelets")]
        return sorted((length, d) for *_, length, d in keys)


def read(root: Path) -> dict[int, Rows]:
    """threads -> the newest results that hold attention."""
    newest: dict[int, tuple] = {}
    for path in sorted((root / RESULTS).glob("*.json")):
        results = json.loads(path.read_text("utf-8"))
        if "machine" not in results or results["quick"]:
            continue
        about = results["environment"]
        if any(row["op"] == FORWARD for row in results["rows"]):
            found = (about["date"], path.name, path, results)
            newest[about["threads"]] = max(newest.get(about["threads"], found), found)
    for threads in THREADS:
        if threads not in newest:
            raise Missing(
                f"no results of attention with {threads} threads in {RESULTS}: "
                f"python -m benchmarks.bench --full --threads {threads} --json {RESULTS}"
            )
    return {threads: Rows(*newest[threads][2:]) for threads in THREADS}


def kept(root: Path, module: ModuleType) -> list[dict]:
    """The results of one of the other measurements, of one machine or of several:
    attention-memory.json and attention-memory-*.json of attention_memory."""
    name = module.__name__.rpartition(".")[2]
    stem = name.replace("_", "-")
    folder = root / RESULTS
    paths = [*folder.glob(f"{stem}.json"), *sorted(folder.glob(f"{stem}-*.json"))]
    if not paths:
        path = RESULTS / f"{stem}.json"
        raise Missing(f"{path} is missing: python -m benchmarks.{name} --json {path}")
    return [json.loads(path.read_text("utf-8")) for path in paths]


# ------------------------------------------------------------------ tables


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, without the rows that hold nothing."""
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows if any(row[1:])]
    return "\n".join(lines)


def made_with(rows: Rows) -> str:
    """What a reader needs beside a ratio."""
    about, machine = rows.about, rows.machine
    threads = in_threads(about["threads"])
    return (
        f"{about['cpu']}, {about['variant']}, {threads}, torch {about['torch']} whose matrix "
        f"product reached {machine['sgemm']['rate'] / 1e9:.0f} GFLOP/s in the same run, "
        f"{about['date'][:10]}, {commit_of(about)}; "
        f"[{rows.path.name}](../../benchmarks/results/{rows.path.name})."
    )


def commit_of(about: dict) -> str:
    return "commit " + (about["commit"] or "unknown")[:12] + " with changes" * bool(about["dirty"])


def times(by_threads: dict[int, Rows]) -> str:
    """wavepe's time over that of PyTorch's attention without positions, one and two threads."""
    columns = {
        "wavelets, forward": (FORWARD, "wavelets"),
        "wavelets, with gradients": (TRAINED, "wavelets"),
        "learned, 512 rows": (TRAINED, "learned, {few} rows"),
        "learned, L rows": (TRAINED, "learned, {length} rows"),
    }
    sizes, parts = by_threads[1].sizes(), []
    for d in sorted({d for _, d in sizes}):
        lines = []
        for length in (length for length, size in sizes if size == d):
            cells = [f"{length}"]
            for op, kind in columns.values():
                kind = kind.format(few=min(512, length), length=length)
                both = [rows.get(op, kind, length, d) for rows in by_threads.values()]
                cells.append(" / ".join(filter(None, (Rows.over(row, "sdpa") for row in both))))
            lines.append(cells)
        parts.append(markdown([f"L, d = {d}", *columns], lines))
    return "\n\n".join([*parts, "\n".join("- " + made_with(rows) for rows in by_threads.values())])


def rates(by_threads: dict[int, Rows]) -> str:
    """Useful GFLOP/s, one thread, and the share of the matrix product's rate."""
    rows = by_threads[1]
    sgemm, lines = rows.machine["sgemm"]["rate"], []
    names = {"wavepe": "wavelets", "plain": "plain kernel", "sdpa": "PyTorch, plain"}
    columns = [(op, who) for op in (FORWARD, TRAINED) for who in names]
    for length, d in rows.sizes():
        cells = [f"{length} x {d}"]
        for op, who in columns:
            row = rows.get(op, "wavelets", length, d, who)
            rate = row["rate"] if row else 0
            cells.append(f"{rate / 1e9:.0f} ({100 * rate / sgemm:.0f} %)" if rate else "")
        lines.append(cells)
    heads = [f"{names[who]}, {SHORT[op]}" for op, who in columns]
    return markdown(["L x d", *heads], lines)


def rivals(by_threads: dict[int, Rows]) -> str:
    """How many times as long a user's own ways take, and wavelets over the plain kernel."""
    rows, lines = by_threads[1], []
    names = ("gather", "skew", "dense", "compile", "compile-flex")
    columns = [(FORWARD, name) for name in names] + [(TRAINED, name) for name in names[:-1]]
    for length, d in rows.sizes():
        cells = [f"{length} x {d}"]
        cells += [rows.times(rows.get(op, "wavelets", length, d), name) for op, name in columns]
        for op in SHORT:
            cells.append(rows.over(rows.get(op, "wavelets", length, d), "plain"))
        lines.append(cells)
    heads = [f"{name}, {SHORT[op]}" for op, name in columns]
    heads += [f"wavelets / plain kernel, {word}" for word in SHORT.values()]
    return markdown(["L x d", *heads], lines)


def others(by_threads: dict[int, Rows]) -> str:
    """bfloat16, alibi, bias, one query, NumPy."""
    lines = []
    for key, row in by_threads[1].found.items():
        op, dtype, who, kind, *_ = key
        beside = op in (DECODE, "wavepe.attention") or dtype != "float32" or kind in BY_DISTANCE
        if who != "wavepe" or not beside:
            continue
        both = [rows.found.get(key) for rows in by_threads.values()]
        cells = [f"`{op}` {row['size']}, {dtype}", f"{1e3 * row['seconds']['median']:.2f} ms"]
        for name in ("sdpa", "plain"):
            ratios = (Rows.over(one, name) for one in both)
            cells.append(" / ".join(filter(None, ratios)))
        theirs = [name for name in row["ratios"] if name not in ("sdpa", "plain")]
        cells.append(", ".join(f"{Rows.times(row, name)} {name}" for name in theirs))
        lines.append(cells)
    heads = ["", "time", "/ PyTorch, plain", "/ plain kernel", "others, times as long"]
    return markdown(heads, lines)


def with_date(table: str, about: dict) -> str:
    words = [about["cpu"], f"torch {about['torch']}", about["date"][:10], commit_of(about)]
    return f"{table}\n\n{', '.join(words)}."


def updated(text: str, root: Path) -> str:
    """The page with the tables of the kept results."""
    by_threads = read(root)
    for name, section in TIMES.items():
        text = replaced(text, name, section(by_threads), PAGE)
    for name, module in OTHERS.items():
        runs = kept(root, module)
        tables = [with_date(module.table(run), run["environment"]) for run in runs]
        text = replaced(text, name, "\n\n".join(tables), PAGE)
    return text


TIMES = {"times": times, "rates": rates, "rivals": rivals, "others": others}
OTHERS = {
    "tails": attention_tails,
    "threads": attention_threads,
    "memory": attention_memory,
    "step": training_step,
}


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 if the page is stale (--check) or a source is missing."""
    return page_command(__doc__, PAGE, updated, argv)


if __name__ == "__main__":
    sys.exit(main())
