"""docs/internals/attention-speed.md, from the kept results of the attention benchmarks.

Times come from the newest results of `benchmarks.bench --full` with one thread and with two, of
each kind of machine. The other figures come from `benchmarks.attention NAME`, in the files
attention-NAME.json and attention-NAME-MACHINE.json.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wavepe.analysis.plots.drawing import COLOURS, GRID, new_figure

from benchmarks.attention import STUDIES
from benchmarks.bench_attention import BY_DISTANCE
from benchmarks.command import PICTURES, RESULTS, Missing, table

from .pages import commit_of, in_threads, wrapped

if TYPE_CHECKING:
    from matplotlib.artist import Artist

PAGE = Path("docs", "internals", "attention-speed.md")
FORWARD, TRAINED = "ops.attention", "ops.attention + gradients"
DECODE = "ops.attention, one query"
# The studies whose tables are on the page.
SHOWN = ("profile", "decode", "tails", "threads", "terms", "memory", "overhead")
SHORT = {FORWARD: "forward", TRAINED: "with gradients"}
# Columns of the table and lines of a picture: calls that are compared to PyTorch's attention.
OVER_SDPA = {
    "wavelets, forward": (FORWARD, "wavelets"),
    "wavelets, with gradients": (TRAINED, "wavelets"),
    "learned, 512 rows": (TRAINED, "learned, {few} rows"),
    "learned, L rows": (TRAINED, "learned, {length} rows"),
}
# The lines of the other pictures: name, colour and style. What compiles was timed at one length,
# for the table of docs/results/speed.md.
WAYS = {
    "gather": ("gather", COLOURS[1], "-"),
    "skew": ("skew", COLOURS[5], "-"),
    "dense": ("dense", COLOURS[2], "-"),
    "sdpa": ("PyTorch, no positions", "0.4", "--"),
    "plain": ("wavepe, no positions", COLOURS[0], "--"),
}
KERNELS = {
    "wavepe": ("wavepe, wavelets", COLOURS[0], "-"),
    "plain": WAYS["plain"],
    "sdpa": WAYS["sdpa"],
}
THREADS = (1, 2)
SIZE = re.compile(r"\d+ heads x (\d+) x (\d+), (.*)")


class Rows:
    """The attention rows of one results file, for the variant that wavepe chooses."""

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
        """Return the row, or None."""
        return self.found.get((op, dtype, who, kind, length, d))

    @staticmethod
    def rival_over(row: dict | None, rival: str) -> str:
        """Return the rival's time over wavepe's, or "" if the row or the rival is missing."""
        ratio = row and row["ratios"].get(rival)
        return f"{ratio['rounds']:.1f}" if ratio else ""

    def sizes(self) -> list[tuple[int, int]]:
        """Return (length, head size) of the cases with wavelets."""
        keys = [key for key in self.found if key[:4] == (FORWARD, "float32", "wavepe", "wavelets")]
        return sorted((length, d) for *_, length, d in keys)


def read(root: Path) -> list[dict[int, Rows]]:
    """Return the newest results with attention of each kind of machine, by number of threads.

    The machine that was measured last is the first. A kind of machine is a CPU and a variant.
    """
    by_row: dict[tuple[str, str], dict[int, tuple]] = {}
    for path in (root / RESULTS).glob("*.json"):
        results = json.loads(path.read_text("utf-8"))
        if "machine" not in results or results["quick"]:
            continue
        about = results["environment"]
        if any(row["op"] == FORWARD for row in results["rows"]):
            newest = by_row.setdefault((about["cpu"], about["variant"]), {})
            dated = (about["date"], path.name, path, results)
            newest[about["threads"]] = max(newest.get(about["threads"], dated), dated)
    complete = [newest for newest in by_row.values() if set(newest) >= set(THREADS)]
    if not complete:
        some = next(iter(by_row.values()), {})
        threads = next(count for count in THREADS if count not in some)
        raise Missing(
            f"no results of attention with {threads} threads in {RESULTS}: "
            f"python -m benchmarks.bench --full --threads {threads} --json {RESULTS}"
        )
    complete.sort(key=lambda newest: newest[THREADS[0]][:2], reverse=True)
    return [{threads: Rows(*of[threads][2:]) for threads in THREADS} for of in complete]


def kept(root: Path, study: str) -> list[dict]:
    """Return the results of a study by machine: attention-STUDY.json, attention-STUDY-*.json."""
    folder, stem = root / RESULTS, f"attention-{study}"
    paths = [*folder.glob(f"{stem}.json"), *sorted(folder.glob(f"{stem}-*.json"))]
    if not paths:
        path = RESULTS / f"{stem}.json"
        raise Missing(f"{path} is missing: python -m benchmarks.attention {study} --json {path}")
    return [json.loads(path.read_text("utf-8")) for path in paths]


# ------------------------------------------------------------------ tables


def filled(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, without the rows whose cells are all empty."""
    return table(heads, [row for row in rows if any(row[1:])])


def made_with(rows: Rows) -> str:
    """Return the machine and versions of these results, as an item of a list."""
    about, machine = rows.about, rows.machine
    threads = in_threads(about["threads"])
    text = (
        f"- {about['cpu']}, {about['variant']}, {threads}, torch {about['torch']}, "
        f"{about['date'][:10]}, {commit_of(about)}. PyTorch's matrix product reached "
        f"{machine['sgemm']['rate'] / 1e9:.0f} GFLOP/s in the same run. "
        f"[{rows.path.name}](../../benchmarks/results/{rows.path.name})."
    )
    return wrapped(text, indent="  ")


def machine_of(rows: Rows) -> str:
    return f"{rows.about['cpu']}, {rows.about['variant']}"


def over_rival(rows: Sequence[dict | None], rival: str) -> str:
    """Return wavepe's time over the rival's with each number of threads; missing ones are left out.

    `rows` has the row of one case for each number of threads.
    """
    ratios = (row["ratios"].get(rival) for row in rows if row)
    return " / ".join(f"{1 / ratio['rounds']:.2f}" for ratio in ratios if ratio)


def times(machines: Sequence[dict[int, Rows]]) -> str:
    """Return wavepe's time over that of PyTorch's attention without positions, by machine."""
    return "\n\n".join(f"### {machine_of(of[1])}\n\n{times_on(of)}" for of in machines)


def times_on(by_threads: dict[int, Rows]) -> str:
    """Return the table of `times` for one machine."""
    sizes = by_threads[1].sizes()
    heads = sorted({d for _, d in sizes})
    d = heads[len(heads) // 2]  # the pictures show all head sizes
    lines = []
    for length in (length for length, size in sizes if size == d):
        cells = [f"{length}"]
        for op, kind in OVER_SDPA.values():
            both = [rows.get(op, _sized(kind, length), length, d) for rows in by_threads.values()]
            cells.append(over_rival(both, "sdpa"))
        lines.append(cells)
    shown = filled([f"L, d = {d}", *OVER_SDPA], lines)
    return "\n\n".join([shown, "\n".join(map(made_with, by_threads.values()))])


def _sized(kind: str, length: int) -> str:
    return kind.format(few=min(512, length), length=length)


def bfloat16(machines: Sequence[dict[int, Rows]]) -> str:
    """Return wavepe's time over PyTorch's attention without positions, in bfloat16, by machine."""
    keys = [
        key
        for key, row in machines[0][1].found.items()
        if key[1:3] == ("bfloat16", "wavepe") and "sdpa" in row["ratios"]
    ]
    lines = []
    for key in keys:
        cells = [f"`{key[0]}` {machines[0][1].found[key]['size']}"]
        for by_threads in machines:
            cells.append(over_rival([rows.found.get(key) for rows in by_threads.values()], "sdpa"))
        lines.append(cells)
    return filled(["", *(machine_of(by_threads[1]) for by_threads in machines)], lines)


def others(machines: Sequence[dict[int, Rows]]) -> str:
    """Return the table of ALiBi, bias, one query and NumPy in float32, for the newest machine."""
    lines, by_threads = [], machines[0]
    for key, row in by_threads[1].found.items():
        op, dtype, who, kind, *_ = key
        beside = op in (DECODE, "wavepe.attention") or kind in BY_DISTANCE
        if who != "wavepe" or dtype != "float32" or not beside:
            continue
        both = [rows.found.get(key) for rows in by_threads.values()]
        cells = [f"`{op}` {row['size']}, {dtype}", f"{1e3 * row['seconds']['median']:.2f} ms"]
        cells += [over_rival(both, name) for name in ("sdpa", "plain")]
        theirs = [name for name in row["ratios"] if name not in ("sdpa", "plain")]
        cells.append(", ".join(f"{Rows.rival_over(row, name)} {name}" for name in theirs))
        lines.append(cells)
    heads = ["", "time", "/ PyTorch, no positions", "/ wavepe, no positions", "other ways / wavepe"]
    return f"{filled(heads, lines)}\n\n{machine_of(by_threads[1])}: see its table above."


def with_date(text: str, about: dict) -> str:
    words = [about["cpu"], about.get("variant"), f"torch {about['torch']}", about["date"][:10]]
    return f"{text}\n\n{', '.join([*filter(None, words), commit_of(about)])}."


def blocks(root: Path) -> dict[str, str]:
    machines = read(root)
    texts = {"times": times(machines), "bfloat16": bfloat16(machines), "others": others(machines)}
    for name in SHOWN:
        runs = kept(root, name)
        tables = (with_date(STUDIES[name].table(run), run["environment"]) for run in runs)
        texts[name] = "\n\n".join(tables)
    return texts


# ------------------------------------------------------------------ pictures


class Line(NamedTuple):
    """A line of a panel; `value` is its height at a length and a head size, or None."""

    label: str
    colour: str
    style: str
    value: Callable[[int, int], float | None]


def draw(root: Path) -> None:
    """Draw the pictures of the newest machine; each has a panel for each head size."""
    by_threads = read(root)[0]
    rows, sizes = by_threads[1], by_threads[1].sizes()
    sgemm, folder = rows.machine["sgemm"]["rate"], root / PICTURES
    panels = partial(_panels, sizes=sizes, title=machine_of(rows))
    folder.mkdir(parents=True, exist_ok=True)

    def rival(op: str, who: str, length: int, d: int) -> float | None:
        ratio = (rows.get(op, "wavelets", length, d) or {"ratios": {}})["ratios"].get(who)
        return ratio and ratio["rounds"]

    def rate(op: str, who: str, length: int, d: int) -> float | None:
        row = rows.get(op, "wavelets", length, d, who)
        return row and 100 * row["rate"] / sgemm

    def over_sdpa(threads: int, op: str, kind: str, length: int, d: int) -> float | None:
        row = by_threads[threads].get(op, _sized(kind, length), length, d)
        return row and 1 / row["ratios"]["sdpa"]["rounds"]

    parts = {
        f"times as long, {phase}": [Line(*WAYS[who], partial(rival, op, who)) for who in WAYS]
        for op, phase in SHORT.items()
    }
    panels(parts, path=folder / "attention-rivals.png", log=True)
    parts = {
        f"% of the rate, {phase}": [Line(*KERNELS[who], partial(rate, op, who)) for who in KERNELS]
        for op, phase in SHORT.items()
    }
    panels(parts, path=folder / "attention-rates.png")
    lines = [
        Line(name if threads == 1 else "", colour, style, partial(over_sdpa, threads, *case))
        for threads, style in zip(THREADS, ("-", ":"), strict=True)
        for (name, case), colour in zip(OVER_SDPA.items(), COLOURS, strict=False)
    ]
    panels({"time / PyTorch's": lines}, path=folder / "attention-times.png")


def _panels(
    parts: Mapping[str, Sequence[Line]],
    *,
    sizes: Sequence[tuple[int, int]],
    title: str,
    path: Path,
    log: bool = False,
) -> None:
    """Draw a row of panels over the length for each part, and the legend below them."""
    heads = sorted({d for _, d in sizes})
    figure = new_figure(2.3 * len(heads), 1.4 + 2.2 * len(parts))
    grid = figure.subplots(len(parts), len(heads), sharex=True, sharey="row", squeeze=False)
    figure.suptitle(title, fontsize="medium")
    names: dict[str, Artist] = {}
    for row, (ylabel, lines) in zip(grid, parts.items(), strict=True):
        row[0].set_ylabel(ylabel.replace(", ", ",\n"))
        for axes, d in zip(row, heads, strict=True):
            lengths = [length for length, size in sizes if size == d]
            for line in lines:
                values = [line.value(length, d) for length in lengths]
                if any(values):
                    (drawn,) = axes.plot(
                        lengths, [value or math.nan for value in values], line.style,
                        color=line.colour, marker="o", markersize=3,
                    )  # fmt: skip
                    names |= {line.label: drawn} if line.label else {}
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths[::3], lengths[::3])
            axes.grid(True, **GRID)
            if "time" in ylabel:
                axes.axhline(1, color="0.5", linewidth=1)
            if log:
                axes.set_yscale("log", base=2)
                axes.yaxis.set_major_formatter("{x:g}")
    for axes, d in zip(grid[0], heads, strict=True):
        axes.set_title(f"head size {d}", fontsize="medium", loc="left")
    for axes in grid[-1]:
        axes.set_xlabel("length")
    figure.legend(
        list(names.values()), list(names), loc="outside lower center", frameon=False, ncols=3
    )
    figure.savefig(path)
