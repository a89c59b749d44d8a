"""The operators' speed, for README, docs/results/speed.md and docs/internals/rope-speed.md.

The figures of an operator come from the newest file in benchmarks/results that has it, of one
thread before several.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.command import RESULTS, Missing, table

from .pages import commit_of, in_threads, wrapped

# Rivals with the same result -> their names in README ...
RIVALS = {
    "hf": "transformers",
    "numpy": "NumPy",
    "eager": "PyTorch, written out",
    "skew": "PyTorch, written out",
    "gather": "PyTorch, written out",
    "dense": "PyTorch, with a mask of all scores",
    "compile": "torch.compile",
    "compile-skew": "torch.compile",
    "compile-flex": "compiled FlexAttention",
}
# ... and rivals that do less work.
LESS = {
    "clone": "a copy of the same memory",
    "matmul": "the matrix product alone",
    "sdpa": "PyTorch's attention without positions",
}
SHOWN = "ops.attention"  # in README
# The rivals that wavepe should be faster than.
AIMED_AT = RIVALS | {"sdpa": LESS["sdpa"]}
SLOWER = 0.95  # a ratio between this and 1 may be noise


def newest_results(root: Path) -> dict[str, Path]:
    """Return the newest file of each operator; files of --quick runs do not count."""
    dated, folder = [], root / RESULTS
    for path in folder.glob("*.json"):
        results = json.loads(path.read_text("utf-8"))
        if "machine" in results and not results["quick"]:  # rope-accuracy.json has no times
            about = results["environment"]
            dated.append((about["threads"] == 1, about["date"], path.name, path, results["rows"]))
    if not dated:
        raise Missing(f"no results in {folder}: python -m benchmarks.bench --json {folder}")
    dated.sort(key=lambda each: each[:3])
    return {row["op"]: path for *_, path, rows in dated for row in rows}


def own_rows(root: Path) -> tuple[dict[str, list[dict]], dict[str, tuple[Path, dict]]]:
    """Return wavepe's rows of each operator, and the file and the results that they come from.

    The rows are of the variant that wavepe chooses itself.
    """
    newest = newest_results(root)
    loaded = {path: json.loads(path.read_text("utf-8")) for path in set(newest.values())}
    files = {op: (path, loaded[path]) for op, path in sorted(newest.items())}
    rows = {
        op: [
            row
            for row in results["rows"]
            if row["op"] == op
            and row["who"] == "wavepe"
            and row["variant"] == results["environment"]["variant"]
        ]
        for op, (_, results) in files.items()
    }
    return rows, files


def bench_headline(root: Path) -> str:
    """Return README's sentence on the first headline row of SHOWN."""
    rows, files = own_rows(root)
    shown = next((row for row in rows.get(SHOWN, ()) if row["headline"]), None)
    if shown is None:
        raise Missing(f"the results in {RESULTS} hold no headline row of {SHOWN}")
    ratios = (_fastest(shown, names) for names in (RIVALS, LESS))
    others = " and ".join(f"{ratio:.2f} times as fast as {name}" for ratio, name in ratios)
    path, results = files[SHOWN]
    source = f"[{_where(results)}](benchmarks/results/{path.name})"
    return f"`{SHOWN}` ({shown['size']}, {shown['dtype']}) is {others}, on {source}."


def _headline_table(rows: Sequence[dict]) -> str:
    fresh = any(row["memory"] == "fresh" for row in rows)
    words = (
        "Each factor is the rival's time divided by wavepe's: above 1, wavepe is faster. Times are "
        "medians." + " *Fresh* memory comes from the system page by page." * fresh
    )
    others = ("fastest alternative with the same result", "other work, for comparison")
    heads = ("operation", "input", "wavepe", *others)
    shown = table(heads, [_cells(row, RIVALS, LESS) for row in rows], "llrl")
    return f"{wrapped(words)}\n\n{shown}"


def bench_section(root: Path, to_root: str) -> str:
    """Return the headline rows, the rows where a rival is faster, and the sources.

    Of the latter rows, each operator shows the slowest. All rows are of the variants that wavepe
    chooses itself. `to_root` leads from the page to the repository's root.
    """
    rows, files = own_rows(root)
    headline: list[dict] = []
    slower: list[dict] = []
    for op_rows in rows.values():
        headline += [row for row in op_rows if row["headline"]]
        worst = min(op_rows, key=lambda row: _fastest(row, AIMED_AT)[0], default=None)
        if worst and _fastest(worst, AIMED_AT)[0] < SLOWER:
            slower.append(worst)
    if not headline:
        raise Missing(f"the results in {RESULTS} hold no headline rows")
    heads = ("operation", "input", "wavepe", "what is faster")
    sources = _sources(files, (*headline, *slower), to_root)
    parts = [
        _headline_table(headline),
        "In these cases wavepe is slower by more than 5 %, the worst case of each operation:",
        table(heads, [_cells(row, AIMED_AT) for row in slower], "llrl"),
        wrapped(f"All rows: `make bench` and {sources}."),
    ]
    return "\n\n".join(parts)


def kernel_rates(root: Path, to_root: str) -> str:
    """Return the rate of each operator's largest case, by dtype, and its share of the machine.

    Rates are those of the variant that wavepe chooses, in memory that was used before.
    """
    largest: dict[tuple[str, str], dict] = {}
    rows, files = own_rows(root)
    for op, op_rows in rows.items():
        for row in op_rows:
            if op.startswith("ops.") and row["memory"] != "fresh":
                key = (op, row["dtype"])
                largest[key] = max(largest.get(key, row), row, key=lambda each: each["work"])
    cells = []
    for (op, dtype), row in largest.items():
        rate = f"{row['rate'] / 1e9:,.1f} {row['unit']}"
        of = "the matrix product" if row["share_of"] == "sgemm" else "a copy"
        share = f"{100 * row['share']:.0f} % of {of}"
        cells.append((f"`{op}`", f"{row['size']}, {dtype}", rate, share))
    shown = table(("operation", "input", "rate", "share of the machine"), cells, "llr")
    return f"{shown}\n\n{wrapped(f'{_sources(files, largest.values(), to_root)}.')}"


def _cells(row: dict, *rivals: dict[str, str]) -> list[str]:
    """Return a row of a table: the case, wavepe's time, and the fastest of each kind of rivals."""
    memory = ", fresh memory" if row["memory"] == "fresh" else ""
    size = f"{row['size']}, {row['dtype']}{memory}"
    fastest = (_fastest(row, names) for names in rivals)
    cells = (f"{ratio:.2f}, {name}" if name else "" for ratio, name in fastest)
    return [f"`{row['op']}`", size, _time(row["seconds"]["median"]), *cells]


def _fastest(row: dict, names: dict[str, str]) -> tuple[float, str]:
    """Return the ratio and the name of the fastest of these rivals, or (inf, "")."""
    return min(
        (
            (row["ratios"][key]["rounds"], name)
            for key, name in names.items()
            if key in row["ratios"]
        ),
        default=(math.inf, ""),
    )


def _sources(files: dict[str, tuple[Path, dict]], rows: Iterable[dict], to_root: str = "") -> str:
    """Return the files that these rows come from, each once."""
    shown = dict(files[row["op"]] for row in rows)
    return "; ".join(_source(path, shown[path], to_root) for path in sorted(shown))


def _source(path: Path, results: dict, to_root: str) -> str:
    about, machine = results["environment"], results["machine"]
    return (
        f"[{path.name}]({to_root}benchmarks/results/{path.name}) ({_where(results)}, "
        f"{commit_of(about)}; torch {about['torch']}, NumPy {about['numpy']}, transformers "
        f"{about['transformers']}; copies {machine['copy']['rate'] / 1e9:.1f} GB/s and multiplies "
        f"matrices at {machine['sgemm']['rate'] / 1e9:.0f} GFLOP/s in the same run)"
    )


def _where(results: dict) -> str:
    about = results["environment"]
    where = f"{about['cpu']}, {about['variant']}, {in_threads(about['threads'])}"
    return f"{where}, {about['date'][:10]}"


def _time(seconds: float) -> str:
    if seconds < 1e-4:
        return f"{1e6 * seconds:.1f} us"
    return f"{1e3 * seconds:.{1 if seconds >= 0.01 else 2}f} ms"
