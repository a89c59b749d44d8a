"""Print the results of `bench` as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from wavepe.experiments.tables import GAP, columns, groups

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


def wrapped(text):
    """Wrap a line to the terminal."""
    width = columns()
    options = {"break_long_words": False, "break_on_hyphens": False}
    return text if width is None else textwrap.fill(text, width, **options)


def print_report(results: dict, with_rivals: bool = False) -> None:
    """Print the machine, the tables and the notes on stdout."""
    for line in _heading(results):
        print(wrapped(line))
    ops = list(dict.fromkeys(row["op"] for row in results["rows"]))
    for op in ops:
        rows = [row for row in results["rows"] if row["op"] == op]
        rivals = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
        shown = [row for row in rows if with_rivals or row["who"] == "wavepe"]
        unit = rows[0]["unit"]
        heads = [unit if name == "rate" else name for name in _COLUMNS]
        heads = [*heads, *rivals, "max error", "of bound"]
        print(f"\n{op}")
        print(_table([heads, *(_cells(row, rivals) for row in shown)]))
        bounds = dict.fromkeys(row["bound"] for row in rows if row["bound"])
        print(wrapped("bound: " + "; ".join(bounds)))
    for note in results["notes"]:
        print("\n" + wrapped(note))
    failed = [row for row in results["rows"] if row["ok"] is False]
    for row in failed:
        where = " ".join(row[key] for key in ("op", "size", "dtype", "memory", "variant"))
        error = f"error {row['error']:.3g}, {row['error_of_bound']:.3g} of its bound"
        print("\n" + wrapped(f"FAIL {where}: {error}"))


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
        "times in ms; share: of this run's clone (fresh), copy (warm, in place) or sgemm",
        "  rate, above 100% where caches (or the huge pages NumPy asks for) help;",
        "columns of rivals: their time / wavepe's, median over rounds: above 1 wavepe is",
        "  faster",
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


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Return the table in one piece, or in parts that fit a narrow terminal.

    In a part, the first three columns are a line above their rows. Columns of numbers that do not
    fit are in the next part.
    """
    room, cases = columns(), 3
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if room is None or sum(widths) + GAP * (len(widths) - 1) <= room:
        return _aligned(lines, widths, left=4)
    parts = []
    for part in groups(widths[cases], widths[cases + 1 :], room):
        numbers = [[line[cases], *line[cases + 1 :][part]] for line in lines]
        taken = [widths[cases], *widths[cases + 1 :][part]]
        heading, *rows = _aligned(numbers, taken, left=1).split("\n")
        text, last = [heading], None
        for line, row in zip(lines[1:], rows, strict=True):
            case = ", ".join(line[:cases])
            text += [row] if case == last else [wrapped(case), row]
            last = case
        parts.append("\n".join(text))
    return "\n\n".join(parts)


def _aligned(lines: Sequence[Sequence[str]], widths: Sequence[int], left: int) -> str:
    """Align the first `left` columns to the left, and the others to the right."""
    return "\n".join(
        (" " * GAP)
        .join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        .rstrip()
        for line in lines
    )
