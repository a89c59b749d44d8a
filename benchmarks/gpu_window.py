"""Use a few minutes of a GPU: `python -m benchmarks.gpu_window {why,figures} --out FOLDER`.

"why" says where the time goes: the host, each kernel, its tiles, decoding, hazards. "figures"
checks the results of the GPU's kernels in every dtype and times them beside others;
docs/guides/gpu.md shows its rows.json. Each phase has its own processes and a deadline, so a late
one costs only the last rows. Every line is printed and appended to FOLDER/lines.txt at once. At the
end a table shows what was predicted beside what was measured.

`prepare` compiles the kernels ahead, without a GPU, into the folder of --cache. What is there
already is not compiled again, so it may be stopped and started.
`--dry` runs a window on the CPU, at toy sizes: the CUDA kernels are emulated, Triton's interpreter
runs those of attention, and the host's part runs with a libcuda that does nothing. No figure
counts.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import gpu_tasks
from .command import ROOT, keep, new_parser, table

EMULATED = ROOT / "build" / "emulated"
CACHE = ROOT / "build" / "triton"
NO_GPU = "no GPU: no figure counts, and what ran was an emulation on the CPU"
WORKERS = min(8, os.cpu_count() or 1)
MOST_LINES = 60  # of the table at the end

Row = dict[str, Any]


class Phase(NamedTuple):
    """Tasks with a deadline; `toys` are those of a dry run. Each of `apart` has its own process."""

    seconds: float
    tasks: tuple[str, ...]
    toys: tuple[str, ...]
    apart: bool = False
    interpreted: bool = True


CHECKS = (
    *("kernels", "wavelet", "learned table", "no table", "wavelet, d 128", "learned table, d 128"),
    *("learned table, decode", "key_mask, decode", "softcap, decode"),
    *("decode", "bias", "edge, per head, q_rel", "slopes", "key_mask", "segments", "window"),
    *("offsets", "softcap", "dropout", "wavelet, not causal", "bits", "graph", "stream", "compile"),
    *("reduce-overhead", "first call in a graph", "wavelet, d 80", "learned table, d 80"),
    *("wavelet, d 256", "learned table, d 256", "wavelet, lengths", "learned table, lengths"),
)
TIMES = tuple(
    f"times {d} {length}"
    for d, length in (
        *((128, 8192), (128, 2048), (64, 2048), (128, 32768)),
        *((128, 512), (64, 8192), (64, 512), (64, 32768)),
    )
)
_TILES = ("tiles 128 8192", "tiles 64 2048", "tiles 128 2048", "tiles 64 8192")
_KERNELS = tuple(f"kernels {d} {length}" for d in (128, 64) for length in (2048, 8192, 512, 32768))
_DECODE = tuple(f"decode {n} {batch}" for n in (8192, 1024, 32768) for batch in (1, 8))
PROBE = Phase(12, ("probe",), ("probe",))
WINDOWS: dict[str, tuple[Phase, ...]] = {
    "why": (
        PROBE,
        Phase(28, ("host",), ("host",), interpreted=False),
        Phase(40, _KERNELS, ("kernels 16 5",)),
        Phase(70, _TILES, ("tiles 16 5",)),
        Phase(20, ("variants 128 8192", "variants 64 8192"), ("variants 16 20",)),
        Phase(32, _DECODE, ("decode 20 1",)),
        Phase(20, ("rope", "tables"), ("rope", "tables")),
        Phase(25, ("exits",), ("exits",)),
        Phase(60, ("sanitizer racecheck", "sanitizer memcheck"), ("sanitizer racecheck",)),
    ),
    "figures": (
        PROBE,
        Phase(
            92,
            (*(f"check {name}" for name in CHECKS), *(f"first {name}" for name in TIMES)),
            ("check kernels", "check bias", "check wavelet", "check bits"),
            apart=True,
        ),
        Phase(15, ("check large",), ("check large",)),
        Phase(160, TIMES, ("times 16 5",)),
        Phase(40, ("training 128", "training 64"), ("training 16",)),
        Phase(40, ("rope", "compare"), ("rope", "compare")),
    ),
}
# By the name of a line in the table: the roofline, what was compiled and the host without a GPU say
# this of an H200. docs/internals/attention-gpu.md has the design that they belong to.
PREDICTED = {
    "probe: copy, GB/s": 4300,
    "probe: matmul, bfloat16, TFLOP/s": 790,
    "host: wavelets, forward, plan, us": 45,
    "host: wavelets, forward, no plan, us": 275,
    "host: wavelets, forward + backward, plan, us": 250,
    "host: wavelets, forward + backward, plan, one thread, us": 170,
    "host: wavelets, forward + backward, no plan, us": 1500,
    "host: plain, forward, plan, us": 40,
    "host: plain, forward + backward, plan, us": 200,
    "kernels 128 8192: plain, attention_forward, us": 340,
    "kernels 128 8192: plain, attention_forward, rate, TFLOP/s": 410,
    "kernels 128 8192: wavelet, attention_forward, us": 385,
    "kernels 128 8192: wavelet, all kernels, us": 1600,
    "kernels 128 2048: wavelet, all kernels, us": 600,
    "variants 128 8192: causal, shipped, us": 340,
    "variants 128 8192: causal, 128 x 128, 8 warps, 2 stages, us": 310,
    "variants 128 8192: causal, 128 x 64, 4 warps, 3 stages, specialised, us": 300,
    "decode 8192 1: wavelet, kernels, us": 15,
    "decode 8192 1: wavelet, eager, us": 45,
    "decode 8192 1: SDPA, kernels, us": 16,
    "decode 1024 1: wavelet, kernels, us": 6,
    "decode 32768 8: wavelet, kernels, us": 270,
    "tables: skew, zero, of a copy of the scores, %": 160,  # it reads less than a copy
    "tables: unskew, edge, of a copy of the scores, %": 120,
    "exits: ended as usual: aborted of 12": 0.4,
    "exits: ended at once: aborted of 12": 0,
    "sanitizer racecheck: exit code": 0,
    "sanitizer memcheck: exit code": 0,
    "times 128 8192: forward, wavepe, ms": 0.40,
    "times 128 8192: forward and backward, wavepe, ms": 1.6,
    "times 128 2048: forward, wavepe, ms": 0.11,
    "times 128 2048: forward and backward, wavepe, ms": 0.65,
    "times 64 2048: forward and backward, wavepe, ms": 0.55,
    "times 128 512: forward and backward, wavepe, ms": 0.45,
    "times 128 32768: forward and backward, wavepe, ms": 6.0,
    "training 128: wavelet, wavepe, ms": 19.2,
    "training 128: RoPE, SDPA, ms": 18.6,
}


# ---- running -------------------------------------------------------------------------------------


def run(
    phases: Sequence[Phase], environment: dict[str, str], dry: bool, clock: Any = time.monotonic
) -> Iterator[Row]:
    """Yield the lines and rows of all phases; each ends by its deadline, counted from the start."""
    end = clock()
    for phase in phases:
        end += phase.seconds * (20 if dry else 1)

        def left(end: float = end) -> float:
            return end - clock()

        interpreted = {"TRITON_INTERPRET": "1"} if dry and phase.interpreted else {}
        environ = {**environment, **interpreted}
        options = ["--dry"] if dry else []
        names = phase.toys if dry else phase.tasks
        if phase.apart and not dry:
            yield from _side_by_side(names, left, environ)
        else:
            yield from gpu_tasks.in_processes(names, left, environ, *options)


def _side_by_side(
    names: Sequence[str], left: Callable[[], float], environment: dict[str, str]
) -> Iterator[Row]:
    """Yield the rows of tasks that mostly compile, each in its own process."""
    rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
    two = {**environment, "TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}

    def work(name: str) -> None:
        for row in gpu_tasks.in_processes([name], left, two):
            rows.put(row)

    def work_all() -> None:
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(work, names))
        rows.put(None)

    threading.Thread(target=work_all, daemon=True).start()
    while (row := rows.get()) is not None:
        yield row


def environment(args: Any, emulated: bool) -> dict[str, str]:
    """Return the environment of the tasks' processes: where wavepe and compiled kernels are."""
    variables = {**os.environ, "TRITON_CACHE_DIR": str(args.cache.resolve())}
    places = [str(ROOT)]
    if emulated:
        places.insert(0, str(EMULATED / "lib"))
    elif args.wheel:
        folder = args.out.resolve() / "wheel"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        subprocess.run([*command, "--target", str(folder), str(args.wheel)], check=True)
        places.insert(0, str(folder))
    elif path := os.environ.get("PYTHONPATH"):
        places.insert(0, path)
    return variables | {"PYTHONPATH": os.pathsep.join(places)}


def build_emulated() -> bool:
    """Build wavepe with CUDA kernels that run on the CPU; return whether it is there."""
    places = (f"--build-base={EMULATED}", f"--build-lib={EMULATED / 'lib'}")
    command = [sys.executable, "setup.py", "--quiet", "build", *places]
    variables = {**os.environ, "WAVEPE_EMULATE_CUDA": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    if done.returncode:
        print(f"the emulation could not be built:\n{done.stderr[-4000:]}", file=sys.stderr)
    return done.returncode == 0


def prepare(cache: Path, dry: bool = False) -> int:
    """Compile the kernels that the windows launch on an sm_90, without a GPU; if `dry`, a few.

    The launches are real, on a libcuda that does nothing: Triton's cache has other keys for kernels
    that are compiled and not launched.
    """
    os.environ["TRITON_CACHE_DIR"] = str(cache.resolve())
    from . import gpu_host, gpu_parts
    from .gpu_measure import Place

    gpu_host._stub()
    place = Place("cpu")
    place.emulated = False  # the sizes and dtypes of a GPU
    with gpu_host.on_a_gpu():
        for d in (64,) if dry else (128, 64):
            for name, call in gpu_parts.steps(place, d, 2048).items():
                call()
                print(f"head size {d}, {name}", flush=True)
            step = gpu_parts.steps(place, d, 2048)["wavelet"]
            for role, options in gpu_parts.TILES.items():
                for option in options[:1] if dry else options:
                    print(f"head size {d}, {role} {option}", flush=True)
                    with contextlib.suppress(Exception), gpu_parts.tile(role, *option):
                        step(gpu_parts.next_scale(d))
            for line in () if dry else gpu_parts.variants(place, d, 2048):
                print(f"head size {d}, {line.name.partition(':')[0]}", flush=True)
    for line in gpu_parts.cache():
        print(text_of(line._asdict()))
    return 0


# ---- in words ------------------------------------------------------------------------------------


def text_of(line: dict[str, Any]) -> str:
    if line["value"] is None:
        return str(line["name"])
    return f"{line['name']}: {_number(line['value'])} {line['unit']}".rstrip()


def _number(x: float) -> str:
    return f"{x:.0f}" if x == round(x) or abs(x) >= 1000 else f"{x:.3g}"


def measured(row: Row) -> dict[str, float]:
    """Return the figures of a row by their names in the table."""
    figures = {}
    for line in row.get("lines", ()):
        if line["value"] is not None:
            unit = f", {line['unit']}" if line["unit"] else ""
            figures[f"{row['name']}: {line['name']}{unit}"] = line["value"]
    seconds = row.get("seconds", {})
    for name, value in (seconds if isinstance(seconds, dict) else {"": seconds}).items():
        inner = value if isinstance(value, dict) else {"": value}
        for way, each in inner.items():
            label = f"{name}, {way}".strip(", ") + ", "
            figures[f"{row['name']}: {label.lstrip(', ')}ms"] = 1e3 * each
    return figures


def lines_of(row: Row) -> Iterator[str]:
    """Yield a row in words."""
    name = row["name"]
    for why in ("error", "not_run"):
        if why in row:
            yield f"  {why.replace('_', ' ')}: {name}: {row[why]}"
    for check in row.get("checks", ()):
        verdict = "ok" if check["error"] <= 1 else "WRONG"
        error = f"{check['error']:.2f} of the bound, {check['largest']:.1e} absolute"
        yield f"  {verdict:5} {check['name']}: {error}"
    for way, error in row.get("errors", {}).items() if not name.startswith("first") else ():
        yield f"    {way}: {error}"
    if "seconds" in row:
        for label, value in measured(row).items():
            yield f"    {label.removesuffix(', ms')}: {value:.3f} ms"
    for each in row.get("rows", ()):  # rope
        times = ", ".join(f"{way} {1e6 * s:.1f} us" for way, s in each["seconds"].items())
        yield f"    {each['dtype']} {each['length']}: {times}"
    if "wall" in row:
        yield f"  {name} ended after {row['wall']:.1f} s"


def right(row: Row) -> bool:
    """Tell whether nothing in a row is wrong."""
    failed = "error" in row and row["name"].startswith("check")
    return not failed and all(check["error"] <= 1 for check in row.get("checks", ()))


def best_tiles(figures: dict[str, float]) -> set[str]:
    """Return the names of the three fastest tiles of each kernel and problem."""
    by_kernel: dict[str, list[str]] = {}
    for key in sorted(
        (key for key in figures if key.startswith("tiles ")), key=figures.__getitem__
    ):
        by_kernel.setdefault(" ".join(key.split()[:4]), []).append(key)
    return {key for keys in by_kernel.values() for key in keys[:3]}


def comparison(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Return the table: predicted and measured, those with a prediction first."""
    figures: dict[str, float] = {}
    for row in rows:
        figures |= measured(row)
    ours = [key for key in PREDICTED if key.partition(":")[0] in names]
    tiles = best_tiles(figures)
    others = [x for x in figures if x not in PREDICTED and (x in tiles or x[:6] != "tiles ")]
    lines = []
    for key in [*ours, *others][:MOST_LINES]:
        wanted, value = PREDICTED.get(key), figures.get(key)
        ratio = f"{value / wanted:.2f}" if wanted and value is not None else ""
        shown = ["" if x is None or math.isnan(x) else _number(x) for x in (wanted, value)]
        lines.append((key, *shown, ratio))
    return table(("", "predicted", "measured", "measured / predicted"), lines)


# ---- the command ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if a result is wrong or a check is missing."""
    parser = new_parser(__doc__)
    parser.add_argument("window", choices=[*WINDOWS, "prepare"])
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=ROOT / "build" / "window")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", default=CACHE)
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="use this wheel of wavepe")
    parser.add_argument("--dry", action="store_true", help="on the CPU, at toy sizes")
    args = parser.parse_args(argv)
    if args.window == "prepare":
        return prepare(args.cache, args.dry)
    phases = WINDOWS[args.window]
    args.out.mkdir(parents=True, exist_ok=True)
    emulated = args.dry and any(
        name in ("check kernels", "tables") for phase in phases for name in phase.toys
    )
    if emulated and not build_emulated():
        return 1
    began = time.monotonic()
    rows: list[Row] = []
    results: dict[str, Any] = {"environment": {"interpreted": args.dry}, "rows": rows}
    with open(args.out / "lines.txt", "a", encoding="utf-8") as file:

        def say(text: str) -> None:
            print(text, flush=True)
            file.write(text + "\n")
            file.flush()

        for row in run(phases, environment(args, emulated), args.dry):
            if "line" in row:
                say(f"{time.monotonic() - began:5.0f} s  {row['of']}: {text_of(row['line'])}")
                continue
            results["environment"] |= row.pop("environment", {})
            rows.append(row)
            for line in lines_of(row):
                say(line)
            keep(results, args.out / "rows.json")
        names = [x for phase in phases for x in (phase.toys if args.dry else phase.tasks)]
        say("\n" + comparison(rows, names))
        about = json.dumps(results["environment"])
        say(f"{about}\n{time.monotonic() - began:.0f} s of {sum(p.seconds for p in phases):.0f} s")
        if args.dry:
            say(NO_GPU)
    return int(not all(map(right, rows)))


if __name__ == "__main__":
    sys.exit(main())
