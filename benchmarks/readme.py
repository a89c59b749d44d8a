"""Write README's tables, or check with --check whether they are stale.

Run `python -m benchmarks.readme`. Each table is between two markers, `<!-- NAME:begin -->` and
`<!-- NAME:end -->`:

address    the command that gets the sources
choice     `choice_page.readme_table`
bench      the first headline row of some operators, from the newest file in benchmarks/results that
           has the operator (one thread before several); docs/results/speed.md has all of them
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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
    "compile-flex": "FlexAttention, compiled",
}
# ... and rivals that do less work.
LESS = {
    "clone": "a copy of the same memory",
    "matmul": "the matrix product alone",
    "sdpa": "PyTorch's attention without positions",
}
SHOWN = ("ops.attention", "ops.attention + gradients", "ops.rope_qk")  # in README
# The rivals that wavepe should be faster than.
AIMED_AT = RIVALS | {"sdpa": LESS["sdpa"]}
SLOWER = 0.95  # a ratio between this and 1 may be noise


class Missing(Exception):
    """A source or a marker is missing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if README is stale (--check) or a source is missing."""
    parser = argparse.ArgumentParser(prog="benchmarks.readme", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if README is stale"
    )
    add_root(parser)
    args = parser.parse_args(argv)
    readme = args.root / "README.md"
    old = readme.read_text("utf-8")
    new, problems = updated(old, args.root)
    if args.check and new != old:
        problems.append("README.md is stale: run python -m benchmarks.readme")
    elif new != old:
        readme.write_text(new, "utf-8")
    for problem in problems:
        print(f"benchmarks.readme: {problem}", file=sys.stderr)
    return 1 if problems else 0


def add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root",
        type=Path,
        default=ROOT,
        metavar="DIR",
        help="folder of the repository (default: this one)",
    )


def updated(text: str, root: Path) -> tuple[str, list[str]]:
    """Return README's text with the tables of the committed figures, and what is missing."""
    from .choice_page import readme_table

    sections = {
        "address": lambda: how_to_get(root),
        "choice": lambda: readme_table(root),
        "bench": lambda: bench_headline(root / "benchmarks" / "results"),
    }
    problems = []
    for name, section in sections.items():
        try:
            text = replaced(text, name, section())
        except Missing as error:
            problems.append(str(error))
    return text, problems


def replaced(text: str, name: str, section: str, page: str | Path = "README.md") -> str:
    """Return `text` with a new section between the two markers of `name`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    if len(pattern.findall(text)) != 1:
        raise Missing(f"{page} needs {begin} ... {end} once")
    return pattern.sub(lambda _: f"{begin}\n{section.strip()}\n{end}", text)


def addresses(root: Path) -> dict[str, str]:
    """Return [project.urls] of pyproject.toml."""
    text = (root / "pyproject.toml").read_text("utf-8")
    return dict(re.findall(r'^(Repository|Documentation) = "(.+?)"', text, re.M))


def how_to_get(root: Path) -> str:
    """Return the command that clones the sources, where they have an address."""
    found = addresses(root)
    if "Repository" not in found:
        return "In a checkout of the sources:"
    documentation = found.get("Documentation")
    lines = [f"[Documentation]({documentation})", ""] if documentation else []
    return "\n".join([*lines, "```", f"git clone {found['Repository']} wavepe", "cd wavepe", "```"])


# ------------------------------------------------------------------ benchmarks


def newest_results(folder: Path) -> dict[str, Path]:
    """Return the newest file of each operator; files of --quick runs do not count."""
    dated = []
    for path in folder.glob("*.json"):
        results = json.loads(path.read_text("utf-8"))
        if "machine" in results and not results["quick"]:  # rope-accuracy.json has no times
            about = results["environment"]
            dated.append((about["threads"] == 1, about["date"], path.name, path, results["rows"]))
    if not dated:
        raise Missing(f"no results in {folder}: python -m benchmarks.bench --json {folder}")
    dated.sort(key=lambda each: each[:3])
    return {row["op"]: path for *_, path, rows in dated for row in rows}


def own_rows(folder: Path) -> tuple[dict[str, list[dict]], dict[str, tuple[Path, dict]]]:
    """Return wavepe's rows of each operator, and the file and the results that they come from.

    The rows are of the variant that wavepe chooses itself.
    """
    newest = newest_results(folder)
    loaded = {path: json.loads(path.read_text("utf-8")) for path in set(newest.values())}
    found = {op: (path, loaded[path]) for op, path in sorted(newest.items())}
    rows = {
        op: [
            row
            for row in results["rows"]
            if row["op"] == op
            and row["who"] == "wavepe"
            and row["variant"] == results["environment"]["variant"]
        ]
        for op, (_, results) in found.items()
    }
    return rows, found


def bench_headline(folder: Path) -> str:
    """Return the first headline row of the operators that README shows, and the source."""
    rows, found = own_rows(folder)
    each = ([row for row in rows.get(op, ()) if row["headline"]] for op in SHOWN)
    shown = [own[0] for own in each if own]
    if not shown:
        raise Missing(f"the results in {folder} hold no headline rows")
    return f"{_headline_table(shown)}\n\n{wrapped(f'{_sources(found, shown)}.')}"


def _headline_table(rows: Sequence[dict]) -> str:
    fresh = any(row["memory"] == "fresh" for row in rows)
    lines = [
        wrapped(
            "The number before a rival says how many times as long it takes: above 1 wavepe is "
            "faster. Times are medians."
            + " *Fresh* memory comes from the system page by page."
            * fresh
        ),
        "",
        "| operation | input | wavepe | fastest other way to the same | what does less work |",
        "|---|---|---:|---|---|",
        *(_line(row, _cell(*_fastest(row, RIVALS)), _cell(*_fastest(row, LESS))) for row in rows),
    ]
    return "\n".join(lines)


def bench_section(folder: Path, to_root: str = "") -> str:
    """Return the headline rows, the rows where a rival is faster, and the sources.

    Of the latter rows, each operator shows the slowest. All rows are of the variants that wavepe
    chooses itself. `to_root` leads from the page to the repository's root.
    """
    rows, found = own_rows(folder)
    headline: list[dict] = []
    slower: list[dict] = []
    for own in rows.values():
        headline += [row for row in own if row["headline"]]
        worst = min(own, key=lambda row: _fastest(row, AIMED_AT)[0], default=None)
        if worst and _fastest(worst, AIMED_AT)[0] < SLOWER:
            slower.append(worst)
    if not headline:
        raise Missing(f"the results in {folder} hold no headline rows")
    lines = [
        "In these cases wavepe is slower by more than 5 %, the worst case of each operation:",
        "",
        "| operation | input | wavepe | what is faster |",
        "|---|---|---:|---|",
        *(_line(row, _cell(*_fastest(row, AIMED_AT))) for row in slower),
        "",
        f"All rows: `make bench` and {_sources(found, (*headline, *slower), to_root)}.",
    ]
    text = "\n".join(line if line.startswith("|") else wrapped(line) for line in lines)
    return f"{_headline_table(headline)}\n\n{text}"


def kernel_rates(folder: Path) -> str:
    """Return the rate of each operator's largest case, by dtype, and its share of the machine.

    Rates are those of the variant that wavepe chooses, in memory that was used before.
    """
    largest: dict[tuple[str, str], dict] = {}
    rows, found = own_rows(folder)
    for op, own in rows.items():
        for row in own:
            if op.startswith("ops.") and row["memory"] != "fresh":
                key = (op, row["dtype"])
                largest[key] = max(largest.get(key, row), row, key=lambda each: each["work"])
    lines = ["| operation | input | rate | share of the machine |", "|---|---|---:|---:|"]
    for (op, dtype), row in largest.items():
        rate = f"{row['rate'] / 1e9:,.1f} {row['unit']}"
        of = "the matrix product" if row["share_of"] == "sgemm" else "a copy"
        lines.append(
            f"| `{op}` | {row['size']}, {dtype} | {rate} | {100 * row['share']:.0f} % of {of} |"
        )
    return "\n".join([*lines, "", wrapped(f"{_sources(found, largest.values(), '../../')}.")])


def _line(row: dict, *cells: str) -> str:
    memory = ", fresh memory" if row["memory"] == "fresh" else ""
    size = f"{row['size']}, {row['dtype']}{memory}"
    return f"| `{row['op']}` | {size} | {_time(row['seconds']['median'])} | {' | '.join(cells)} |"


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


def _cell(ratio: float, name: str) -> str:
    return f"{ratio:.2f}, {name}" if name else ""


def _sources(found: dict[str, tuple[Path, dict]], rows: Iterable[dict], to_root: str = "") -> str:
    """Return the files that these rows come from, each once."""
    shown = dict(found[row["op"]] for row in rows)
    return "; ".join(_source(path, shown[path], to_root) for path in sorted(shown))


def _source(path: Path, results: dict, to_root: str) -> str:
    about, machine = results["environment"], results["machine"]
    commit = (about["commit"] or "unknown")[:12] + (" with changes" if about["dirty"] else "")
    where = f"{about['cpu']}, {about['variant']}, {in_threads(about['threads'])}"
    return (
        f"[{path.name}]({to_root}benchmarks/results/{path.name}) ({where}, {about['date'][:10]}, "
        f"commit {commit}; torch {about['torch']}, NumPy {about['numpy']}, transformers "
        f"{about['transformers']}; copies {machine['copy']['rate'] / 1e9:.1f} GB/s and multiplies "
        f"matrices at {machine['sgemm']['rate'] / 1e9:.0f} GFLOP/s in the same run)"
    )


def wrapped(text: str) -> str:
    """Return the text in lines of at most 100 characters; names and links stay whole."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _time(seconds: float) -> str:
    if seconds < 1e-4:
        return f"{1e6 * seconds:.1f} us"
    return f"{1e3 * seconds:.{1 if seconds >= 0.01 else 2}f} ms"


def in_threads(count: int) -> str:
    """Return a number of threads in words."""
    return "one thread" if count == 1 else f"{count} threads"


if __name__ == "__main__":
    sys.exit(main())
