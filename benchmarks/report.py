"""The results as text."""

from __future__ import annotations

from collections.abc import Sequence

_COLUMNS = (
    "size",
    "dtype",
    "memory",
    "variant",
    "thr",
    "min",
    "median",
    "p10-p90",
    "rate",
    "share",
)


def print_report(results: dict, with_rivals: bool = False) -> None:
    """Print machine, tables and notes on stdout."""
    for line in _heading(results):
        print(line)
    ops = list(dict.fromkeys(row["op"] for row in results["rows"]))
    for op in ops:
        rows = [row for row in results["rows"] if row["op"] == op]
        rivals = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
        shown = [row for row in rows if with_rivals or row["who"] == "wavepe"]
        unit = rows[0]["unit"]
        heads = [unit if name == "rate" else name for name in _COLUMNS]
        heads = [*heads, *rivals, "max error", "of bound"]
        print(f"\n{op}")
        print(_aligned([heads, *(_cells(row, rivals) for row in shown)]))
        print("bound: " + "; ".join(dict.fromkeys(row["bound"] for row in rows if row["bound"])))
    for note in results["notes"]:
        print(f"\n{note}")
    failed = [row for row in results["rows"] if row["ok"] is False]
    for row in failed:
        where = " ".join(row[key] for key in ("op", "size", "dtype", "memory", "variant"))
        print(f"\nFAIL {where}: error {row['error']:.3g}, {row['error_of_bound']:.3g} of its bound")


def _heading(results: dict) -> list[str]:
    about, machine = results["environment"], results["machine"]
    commit = about["commit"] or "no commit"
    lines = [
        f"wavepe {about['wavepe']} ({commit[:12]}{', changed' if about['dirty'] else ''}), "
        f"{about['date']}",
        f"{about['cpu']}, {about['cpus']} CPUs, threads {about['threads']}, "
        f"load {about['load_average'][0]:.1f}, {about['compiler']} {about['flags'] or ''}".rstrip(),
        f"torch {about['torch']} ({about['torch_cpu_capability']}), numpy {about['numpy']}, "
        f"transformers {about['transformers']}",
        f"this run: copy {machine['copy']['rate'] / 1e9:.1f} GB/s, clone into fresh memory "
        f"{machine['clone']['rate'] / 1e9:.1f} GB/s (read + written, "
        f"{machine['buffer_bytes'] >> 20} MiB), "
        f"sgemm {machine['sgemm']['rate'] / 1e9:.1f} GFLOP/s ({machine['sgemm_order']}^3)",
        "",
        "times in ms; share: of this run's clone (fresh), copy (warm, in place) or sgemm rate,",
        "  above 100% where caches (or the huge pages NumPy asks for) help;",
        "columns of rivals: their time / wavepe's, median over rounds: above 1 wavepe is faster",
    ]
    if results["quick"]:
        lines.append("--quick: tiny sizes, so these times mean nothing")
    return lines


def _cells(row: dict, rivals: Sequence[str]) -> list[str]:
    seconds = row["seconds"]
    ratios = [row["ratios"].get(name) for name in rivals]
    error = "" if row["error"] is None else f"{row['error']:.1e}"
    share = "" if row["error"] is None else f"{100 * row['error_of_bound']:.2g}%"
    return [
        row["size"],
        row["dtype"],
        row["memory"],
        row["variant"] or row["who"],
        str(row["threads"]),
        f"{1e3 * seconds['min']:.3f}",
        f"{1e3 * seconds['median']:.3f}",
        f"{1e3 * seconds['p10']:.3f}-{1e3 * seconds['p90']:.3f}",
        f"{row['rate'] / 1e9:.2f}",
        f"{100 * row['share']:.0f}%",
        *(f"{ratio['rounds']:.2f}" if ratio else "" for ratio in ratios),
        error,
        share + (" FAIL" if row["ok"] is False else ""),
    ]


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Text columns to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = 4
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
