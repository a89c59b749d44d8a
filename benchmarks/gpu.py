"""Check the results of the GPU's kernels in every dtype, then time the kernels.

`python -m benchmarks.gpu` prints both; `--json FILE` keeps them, row by row. A task that has not
begun after eight minutes (`--minutes`) is not run.

Without a GPU, the CUDA kernels are emulated on the CPU, and Triton's interpreter runs those of
attention at toy sizes. Then there are no figures, and the last line says so.

A result is right if every error is within its bound. Times are measured by CUDA events around many
calls. The calls take turns, and the fastest of several rounds counts.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import wavepe
from wavepe.experiments.environment import version_of

from . import gpu_tasks
from .command import ROOT, add_json, keep, new_parser
from .gpu_measure import Place
from .machine import commit

EMULATED = ROOT / "build" / "emulated"
NO_GPU = "no GPU: nothing was timed, and what ran was the kernels' emulation on the CPU"


def emulate(arguments: Sequence[str]) -> int:
    """Run the command again, with a build whose CUDA kernels run on the CPU."""
    places = (f"--build-base={EMULATED}", f"--build-lib={EMULATED / 'lib'}")
    environment = {**os.environ, "WAVEPE_EMULATE_CUDA": "1"}
    build = [sys.executable, "setup.py", "--quiet", "build", *places]
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"the emulation could not be built:\n{done.stderr[-4000:]}", file=sys.stderr)
        return 1
    environment |= {"PYTHONPATH": f"{EMULATED / 'lib'}{os.pathsep}{ROOT}"}
    environment |= {"TRITON_INTERPRET": "1"}
    again = [sys.executable, "-m", "benchmarks.gpu", "--emulated", *arguments]
    return subprocess.run(again, cwd=ROOT, env=environment).returncode


# ---- a row in words ------------------------------------------------------------------------------


def print_row(row: dict[str, Any], interpreted: bool) -> bool:
    """Print a row; return whether nothing in it is wrong."""
    for why in ("error", "not_run"):
        if why in row:
            print(f"  {why.replace('_', ' ')}: {row['name']}: {row[why]}", flush=True)
            return why == "not_run" or not row["name"].startswith("check")
    where = ""
    if interpreted and row["name"] != "check kernels":
        of_the_cpu = row["name"].startswith("training")
        where = " (not a GPU)" if of_the_cpu else " (interpreted, not a GPU)"
    if not row.get("checks"):
        print(f"  {row['name']}{where}: {row['wall']:.0f} s")
    if "ended" in row:
        print(f"  {row['name']} gave its results, and then {row['ended']}")
    right = True
    for check in row.get("checks", ()):
        ok = check["error"] <= 1
        right &= ok
        error = f"{check['error']:.2f} of the bound, {check['largest']:.1e} absolute"
        print(f"  {'ok' if ok else 'WRONG':5} {check['name']}{where}: {error}")
    first = row["name"].startswith("first")  # the timed row shows its errors again
    for name, error in () if first else row.get("errors", {}).items():
        print(f"    {name}: {error}")
    for line in _times(row.get("seconds", {}), row.get("memory", {})):
        print(f"    {line}")
    for each in row.get("rows", ()):  # rope
        times = ", ".join(f"{name} {1e6 * s:.1f} us" for name, s in each["seconds"].items())
        print(f"    {each['dtype']} {each['length']}: {times}")
    for name, ratio in _flat(row.get("ratios", {})).items():
        print(f"    {name}: {ratio:.2f}")
    sys.stdout.flush()
    return right


def _times(seconds: Any, memory: Any) -> list[str]:
    if not isinstance(seconds, dict):
        return [f"{seconds:.0f} s"]
    bytes_of = _flat(memory)
    lines = []
    for name, value in _flat(seconds).items():
        held = bytes_of.get(name)
        lines.append(f"{name}: {1e3 * value:.3f} ms")
        lines[-1] += "" if held is None else f", {held / 2**20:.0f} MiB more"
    return lines


def _flat(nested: dict[str, Any]) -> dict[str, Any]:
    """Return {phase: {name: x}} as {"phase, name": x}; other values stay as they are."""
    flat = {}
    for name, value in nested.items():
        inner = value if isinstance(value, dict) else {"": value}
        flat |= {f"{name}, {each}".removesuffix(", "): x for each, x in inner.items()}
    return flat


# ---- all of it -----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if a result is wrong or missing."""
    parser = new_parser(__doc__)
    add_json(parser)
    parser.add_argument(
        "--emulated", action="store_true", help="this build emulates the CUDA kernels on the CPU"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        default=gpu_tasks.DEADLINE / 60,
        help="no task begins after this time (default: %(default)g)",
    )
    args = parser.parse_args(argv)
    there = torch.cuda.is_available() and not args.emulated
    if not (there or args.emulated):
        return emulate(sys.argv[1:] if argv is None else argv)
    name = torch.cuda.get_device_name() if there else "none: kernels emulated on the CPU"
    print(f"GPU: {name}; torch {torch.__version__}, wavepe for {wavepe.build_info()['cuda_archs']}")
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": name,
        "interpreted": not there,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "transformers": version_of("transformers"),
        **commit(),
    }
    place = Place("cuda" if there else "cpu")
    if missing := gpu_tasks.no_interpreter(place):
        print(f"attention does not run: {missing}")
    end = time.monotonic() + 60 * args.minutes
    results: dict[str, Any] = {"environment": about, "rows": []}
    right = True
    for row in gpu_tasks.run(place, lambda: end - time.monotonic()):
        right &= print_row(row, not there)
        results["rows"].append(row)
        keep(results, args.json)
    if not there:
        left = torch.ops.wavepe.emulate_cuda(False)
        print(f"{left} kernels were never launched" if left else "every kernel was launched")
        print(NO_GPU)
        right = right and left == 0
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
