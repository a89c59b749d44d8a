"""Time wavepe's operators and their rivals, and check their results against float64.

Run `python -m benchmarks.bench [op ...]`. The exit code is 1 if an error is over its bound.

The calls of a case take turns in one process, A B C A B C ...: wavepe in every variant of this CPU,
and its rivals, which each bench_<op>.py lists. If a case takes long, only the fastest variant runs.
The first call of each is the warm-up, in which torch.compile compiles. It is not timed, and
its result is judged against a float64 oracle. memory.py explains fresh and warm memory.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import math
import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wavepe.common.errors import CommandError, UsageError, thread_count
from wavepe.common.files import new_file, part_of

_MOST_REPEATS = 1_000_000


def operators() -> list[str]:
    """Return the <op> of each bench_<op>.py in this folder."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return [m.name.removeprefix("bench_") for m in modules if m.name.startswith("bench_")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, which `wavepe bench` has too."""
    known = ", ".join(operators())
    parser.add_argument("op", nargs="*", help=f"operators to time: {known} (default: all)")
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="number of torch's threads (default 1)"
    )
    parser.add_argument(
        "--variants",
        metavar="NAMES",
        help="kernel variants of wavepe, such as avx2,avx512 (default: all that run here)",
    )
    parser.add_argument(
        "--repeats", type=int, default=21, metavar="N", help="most rounds of a case (default 21)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=4.0,
        metavar="SECONDS",
        help="end a case after this time, but not before 7 rounds (default 4)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the results to FILE; in a folder, the name is made of date, CPU and threads",
    )
    parser.add_argument("--rivals", action="store_true", help="print a row for each rival too")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--quick", action="store_true", help="tiny sizes, no torch.compile: a check that it runs"
    )
    sizes.add_argument(
        "--full",
        action="store_true",
        help="all sizes of attention, which take half an hour instead of minutes",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code.

    It is 1 if an error is over its bound or a package is missing, and 2 for wrong arguments.
    """
    parser = argparse.ArgumentParser(prog="benchmarks.bench", description=__doc__.split("\n")[0])
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (CommandError, ImportError) as error:
        message = str(error).replace("`threads`", "--threads")
        print(f"benchmarks: {message}", file=sys.stderr)
        return getattr(error, "code", 1)


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed arguments; return the exit code."""
    names = args.op or operators()
    for name in names:
        if name not in operators():
            raise UsageError(f"unknown operator '{name}'; known: {', '.join(operators())}")
    thread_count(args.threads)
    if not 1 <= args.repeats <= _MOST_REPEATS:
        raise UsageError(f"--repeats {args.repeats}: needs 1 to {_MOST_REPEATS}")
    if not (math.isfinite(args.budget) and args.budget >= 0):
        raise UsageError(f"--budget {args.budget:g}: needs a finite number of seconds, 0 or more")
    if args.json:
        _try_to_write(args.json)
    import wavepe.ops  # if torch is missing, its error says how to get it

    variants = _variants(args.variants)
    before = wavepe.variant()
    try:
        results = measure(names, variants, args)
    finally:
        wavepe.use_variant(before)
    from .report import print_report

    print_report(results, with_rivals=args.rivals)
    if args.json:
        sys.stdout.flush()  # the tables must be visible if the writing fails
        print(f"\nresults: {write(results, args.json)}")
    return 1 if any(row["ok"] is False for row in results["rows"]) else 0


def _variants(wanted: str | None) -> list[str]:
    import wavepe

    known = wavepe.variants()
    chosen = re.split(r"[,\s]+", wanted.strip()) if wanted else known
    for name in chosen:
        if name not in known:
            raise UsageError(f"variant '{name}' does not run here; known: {', '.join(known)}")
    return chosen


def measure(names: Sequence[str], variants: Sequence[str], args: argparse.Namespace) -> dict:
    """Run the cases of these operators; return all results ready for JSON."""
    import torch

    from .machine import Rates, facts, set_threads
    from .memory import Allocator

    allocator = Allocator()
    threads = torch.get_num_threads()
    blas = set_threads(args.threads)
    notes = [] if blas else ["NumPy's BLAS is out of reach: its threads are not set"]
    if not allocator.control:
        notes.append("this malloc cannot be told: fresh and warm are as it pleases")
    environment = facts(args.threads, blas, allocator)
    rates, rows = Rates(args.quick), []
    try:
        rates.sample(allocator)
        for case in _cases(names, args):
            print(f"  {case.op} {case.size} {case.dtype}", file=sys.stderr, flush=True)
            rows += time_case(case, variants, allocator, args)
            notes += [note for note in case.notes if note not in notes]
            rates.sample(allocator)
    finally:
        torch.set_num_threads(threads)
        torch.compiler.reset()
        allocator.leave()
    environment["load_average_at_the_end"] = list(os.getloadavg())
    results = {"environment": environment, "quick": args.quick, "machine": rates.results()}
    return {**results, "notes": notes, "rows": [_with_share(row, results) for row in rows]}


def _cases(names: Sequence[str], args: argparse.Namespace) -> Iterator[Any]:
    import torch

    from .case import Compiler

    for name in names:
        module = importlib.import_module(f".bench_{name}", __package__)
        compiler = Compiler(enabled=not args.quick)
        if args.full and not args.quick and hasattr(module, "full_cases"):
            pending = module.full_cases(compiler)
        else:
            pending = module.cases(args.quick, compiler)
        while True:
            torch.compiler.reset()  # torch would run a function of many shapes in eager mode
            case = next(pending, None)
            if case is None:
                break
            yield case


def time_case(case: Any, variants: Sequence[str], allocator: Any, args: Any) -> list[dict]:
    """Return the rows of one case: for each kind of memory, wavepe's variants and the rivals."""
    import torch
    import wavepe

    from .timing import take_turns

    def before(key):
        if key[1] is not None:
            wavepe.use_variant(key[1])

    if not case.every_variant:
        variants = [max(variants, key=wavepe.variants().index)]
    own_calls = {"wavepe": case.ours, **case.beside}
    calls = {(who, variant): call for variant in variants for who, call in own_calls.items()}
    calls |= {(name, None): call for name, call in case.rivals.items()}
    verdicts = {}
    for key in list(calls):
        before(key)
        if case.reset:
            case.reset()
        try:
            result = calls[key]()
        except Exception as error:
            if not key[0].startswith("compile"):
                raise
            case.notes.append(f"{key[0]} left out: {_one_line(error)}")
            del calls[key]
            continue
        verdicts[key] = None if key[0] in case.floor else case.judge(result)
        del result
    rows = []
    for memory in case.memory:
        allocator.enter(memory)
        with torch.inference_mode(case.inference):
            timings = take_turns(
                calls,
                before=before,
                allocator=allocator,
                repeats=args.repeats,
                budget=args.budget,
                batch=case.batch,
            )
        rows += [_row(case, memory, key, timings, verdicts[key], args.threads) for key in timings]
    return rows


def _row(case, memory: str, key: tuple, timings: dict, verdict, threads: int) -> dict:
    who, variant = key
    ours = who == "wavepe"
    timing = timings[key]
    theirs = {
        name: other
        for (name, of), other in timings.items()
        if name != "wavepe" and of in (variant, None)
    }
    return {
        "op": case.op,
        "size": case.size,
        "dtype": case.dtype,
        "memory": memory,
        "headline": memory in case.headline,
        "who": who,
        "variant": variant,
        "threads": threads,
        "seconds": timing.summary(),
        "unit": case.unit,
        "work": case.work,
        "ratios": {
            name: {
                "rounds": other.over(timing).median,
                "median": other.median / timing.median,
                "min": min(other.seconds) / min(timing.seconds),
            }
            for name, other in theirs.items()
        }
        if ours
        else {},
        "error": verdict and verdict.error,
        "error_of_bound": verdict and verdict.of_bound,
        "bound": case.bound if ours else None,
        "ok": verdict.ok if ours else None,
    }


def _with_share(row: dict, results: dict) -> dict:
    """Return the row with its rate, and the rate as a share of the machine's.

    The machine's rate is that of sgemm, of a clone (fresh memory) or of a copy.
    """
    rate = row["work"] / row["seconds"]["median"]
    reference = "clone" if row["memory"] == "fresh" else "copy"
    reference = reference if row["unit"] == "GB/s" else "sgemm"
    share = rate / results["machine"][reference]["rate"]
    return {**row, "rate": rate, "share": share, "share_of": reference}


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def write(results: dict, target: Path) -> Path:
    """Write the JSON file and return its path; in a folder, its name has date, CPU and threads.

    If writing fails, an older file stays as it was.
    """
    environment = results["environment"]
    if target.is_dir():
        cpu = re.sub(r"[^a-z0-9]+", "-", environment["cpu"].lower()).strip("-")
        target = target / f"{environment['date'][:10]}-{cpu}-{environment['threads']}t.json"
    head = json.dumps({key: value for key, value in results.items() if key != "rows"}, indent=1)
    rows = ",\n".join("  " + json.dumps(_rounded(row)) for row in results["rows"])
    text = f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'
    try:
        if _is_device(target):
            target.write_text(text, "utf-8")
        else:
            with new_file(target.resolve()) as part:  # so that a link stays a link
                part.write_text(text, "utf-8")
    except OSError as error:
        raise CommandError(f"--json {target}: {error.strerror}") from error
    return target


def _try_to_write(target: Path) -> None:
    """Raise UsageError if `write` would fail after a run of minutes."""
    try:
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not _is_device(target):
            part = part_of((target / "results.json" if target.is_dir() else target).resolve())
            part.touch()
            part.unlink()
    except OSError as error:
        raise UsageError(f"--json {target}: {error.strerror}") from error


def _is_device(target: Path) -> bool:
    """Return whether the target is a device, which is written to and not replaced."""
    return target.exists() and not (target.is_file() or target.is_dir())


def _rounded(value: Any) -> Any:
    """Round floats to 6 digits, which is more than a measurement has."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
