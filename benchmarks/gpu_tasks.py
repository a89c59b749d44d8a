"""Run the tasks of `python -m benchmarks.gpu`; a task that fails does not end the others.

On a GPU each task is a process of its own, `python -m benchmarks.gpu_tasks NAME SECONDS`, because a
fault of the GPU ends all GPU work of the process. The last line of its output is its row in JSON.
The checks run side by side, because they mostly compile. So do the "first" tasks, which compile the
kernels of the timed tasks and leave them on the disk. Then the timed tasks run one at a time.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .gpu_attention import brief
from .gpu_measure import Check, Place

DEADLINE = 480.0  # seconds; a task that has not begun by then is not run
GRACE = 90.0  # seconds after the deadline that a running task may take
WORKERS = min(8, os.cpu_count() or 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The most important first. A task "first NAME" compiles the kernels of the task NAME.
TIMES = (
    *("times 128 8192", "times 128 2048", "training 128", "times 64 2048", "times 128 32768"),
    *("times 64 8192", "rope", "times 64 32768", "training 64", "times 128 512", "times 64 512"),
    "compare",
)
NEEDS_TRITON = "attention's kernels need Triton: pip install triton"

Row = dict[str, Any]
Do = Callable[[str, float], Row]  # takes the name of a task and its time limit in seconds


def names(place: Place) -> tuple[list[str], list[str]]:
    """Return the tasks that run side by side, and those that run one after the other."""
    from . import gpu_attention_checks as checks

    if not place.emulated:
        first = [f"first {name}" for name in TIMES if name.startswith("times")]
        return ["check kernels", *(f"check {name}" for name in checks.NAMES), *first], list(TIMES)
    toys = [f"check {name}" for name in checks.TOY_NAMES]
    return ["check kernels"], [*toys, "times 16 65", "training 16", "rope", "compare"]


def run(place: Place, left: Callable[[], float]) -> Iterator[Row]:
    """Run all tasks; yield the row of each when it ends."""
    together, alone = names(place)
    do = functools.partial(in_this_process, place) if place.emulated else in_a_process
    yield from rows(together, do, left, 1 if place.emulated else WORKERS)
    yield from rows(alone, do, left)


def rows(
    tasks: Sequence[str], do: Do, left: Callable[[], float], workers: int = 1
) -> Iterator[Row]:
    """Run tasks and yield their rows.

    The row of a task that fails has its error; that of a task that is too late says so.
    """

    def row(name: str) -> Row:
        if left() <= 0:
            return {"name": name, "not_run": "the deadline came first"}
        began = time.perf_counter()
        try:
            figures = do(name, left() + GRACE)
        except Exception as error:
            figures = {"error": brief(error)}
        return {"name": name, **figures, "wall": time.perf_counter() - began}

    if workers == 1:  # run in this thread
        yield from map(row, tasks)
        return
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for done in concurrent.futures.as_completed([pool.submit(row, name) for name in tasks]):
            yield done.result()


def in_a_process(name: str, timeout: float) -> Row:
    command = [sys.executable, "-m", f"{__package__}.gpu_tasks", name, str(timeout - 10)]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, errors="replace"
    )
    lines, errors = done.stdout.strip().splitlines(), done.stderr.strip().splitlines()
    failed = f"exit code {done.returncode}: {errors[-1] if errors else 'nothing said'}"
    try:
        row = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise RuntimeError(failed) from None
    # torch's threads sometimes end a process that is ending already; its results stand.
    return row | ({"ended": failed} if done.returncode else {})


def in_this_process(place: Place, name: str, timeout: float) -> Row:
    """Run a task in this process; return its row."""
    kind, _, rest = name.partition(" ")
    missing = no_interpreter(place)
    if missing and name not in ("check kernels", "rope", "compare"):
        return {"not_run": missing}
    if kind == "check":
        return _checks(place, rest)
    if kind in ("first", "times"):
        from . import gpu_attention

        d, length = map(int, rest.split()[-2:])
        return gpu_attention.row(place, d, length, once=kind == "first")
    if kind == "training":
        from . import gpu_training

        return gpu_training.row(place, int(rest), **(gpu_training.TOY if place.emulated else {}))
    if place.emulated:
        return {"not_run": "it needs a GPU"}
    if kind == "rope":
        from .gpu_kernels import time_rope

        return {"rows": list(time_rope())}
    if kind == "compare":
        from . import gpu_training

        return gpu_training.compare(timeout)
    raise ValueError(f"no task is called {name!r}")


def _checks(place: Place, name: str) -> Row:
    checks: Iterator[Check]
    if name == "kernels":
        from .gpu_kernels import check

        checks = check(place)
    else:
        from . import gpu_attention_checks

        dtypes = DTYPES[:1] if place.emulated else DTYPES
        checks = gpu_attention_checks.check(place, name, dtypes)
    return {"checks": [{"name": c.name, "error": c.error, "largest": c.largest} for c in checks]}


def no_interpreter(place: Place) -> str:
    """Return why attention's kernels cannot run on this device, or ""."""
    if importlib.util.find_spec("triton") is None:
        return NEEDS_TRITON
    if place.emulated and os.environ.get("TRITON_INTERPRET") != "1":
        return "without a GPU attention's kernels need TRITON_INTERPRET=1"
    return ""


def main(argv: Sequence[str]) -> int:
    """Run a task, and print its row on the last line; return 0."""
    name, timeout = argv
    print(json.dumps(in_this_process(Place("cuda"), name, float(timeout))))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # Python's end would free objects that autograd's thread holds, which sometimes aborts the
    # process: https://github.com/pytorch/pytorch/issues/38228
    os._exit(code)
