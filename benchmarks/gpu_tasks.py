"""Run tasks of `benchmarks.gpu_window`: `python -m benchmarks.gpu_tasks SECONDS NAME ...`.

A fault of a GPU ends all GPU work of the process, so `in_processes` runs tasks in a process of
their own. The process prints each line of a measurement, and the row of each task, in JSON, as soon
as it is there. If it ends before its last task, the others run in a new process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
NEEDS_TRITON = "attention's kernels need Triton: pip install triton"
LATE = "the deadline came first"
CLOSING = 5.0  # seconds before its deadline in which a task may still end

Row = dict[str, Any]


def in_processes(
    names: Sequence[str], left: Callable[[], float], environment: dict[str, str], *options: str
) -> Iterator[Row]:
    """Yield the row of each task, and before it {"of": task, "line": ...} for each of its lines.

    The row of a task that fails or is too late says so. It has the lines that came before.
    """
    waiting, lines = list(names), []
    while waiting and left() > 0:
        command = [sys.executable, "-m", f"{__package__}.gpu_tasks", *options]
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            process = subprocess.Popen(
                [*command, str(left()), *waiting],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                env=environment,
            )
            timer = threading.Timer(left() + CLOSING, process.kill)
            timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    row = _row(line)
                    if "line" in row:
                        lines.append(row["line"])
                        yield row
                    elif row.get("name") in waiting:
                        waiting.remove(row["name"])
                        lines = []
                        yield row
                code = process.wait()
            finally:
                timer.cancel()
                process.kill()
                process.communicate()
            errors.seek(0)
            words = [line for line in errors.read().splitlines() if line.strip()]
        if waiting and (left() > 0 or lines):
            cause = words[-1][:300] if words else "nothing said"
            error = f"exit code {code}: {cause}" if left() > 0 else LATE
            yield {"name": waiting.pop(0), "error": error, "lines": lines}
            lines = []
    yield from ({"name": name, "not_run": LATE} for name in waiting)


def _row(line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def run(place: Any, name: str, seconds: float) -> Row:
    """Run a task; return its row, which has the error of a task that fails."""
    from .gpu_attention import brief

    began = time.perf_counter()
    try:
        figures = _figures(place, name, seconds)
    except Exception as error:
        figures = {"error": brief(error)}
    return {"name": name, **figures, "wall": time.perf_counter() - began}


def _figures(place: Any, name: str, seconds: float) -> Row:
    kind, _, rest = name.partition(" ")
    numbers = [int(word) for word in rest.split() if word.isdigit()]
    missing = no_interpreter(place)
    if missing and name not in ("probe", "host", "check kernels", "rope", "tables", "compare"):
        return {"not_run": missing}
    if kind == "probe":
        from . import gpu_parts

        return {"environment": environment(place), **_lines(name, gpu_parts.probe(place))}
    if kind in ("host", "kernels", "tiles", "variants", "decode", "tables", "exits"):
        from . import gpu_parts

        return _lines(name, getattr(gpu_parts, kind)(place, *numbers))
    if kind == "check":
        return _checks(place, rest)
    if kind in ("first", "times"):
        from . import gpu_attention

        return gpu_attention.row(place, *numbers, once=kind == "first")
    if kind == "training":
        from . import gpu_training

        return gpu_training.row(place, *numbers, **(gpu_training.TOY if place.emulated else {}))
    if place.emulated:
        return {"not_run": "it needs a GPU"}
    if kind == "sanitizer":
        from . import gpu_parts

        return _lines(name, gpu_parts.sanitizer(place, rest, seconds))
    if kind == "rope":
        from .gpu_kernels import time_rope

        return {"rows": list(time_rope())}
    if kind == "compare":
        from . import gpu_training

        return gpu_training.compare(seconds)
    raise ValueError(f"no task is called {name!r}")


def _lines(name: str, lines: Any) -> Row:
    """Print each line as it comes; return all."""
    figures = []
    for line in lines:
        figures.append(line._asdict())
        print(json.dumps({"of": name, "line": figures[-1]}), flush=True)
    return {"lines": figures}


def _checks(place: Any, name: str) -> Row:
    import torch

    if name == "kernels":
        from .gpu_kernels import check

        checks = check(place)
    else:
        from . import gpu_attention_checks

        dtypes = tuple(getattr(torch, x) for x in (DTYPES[:1] if place.emulated else DTYPES))
        checks = gpu_attention_checks.check(place, name, dtypes)
    row: Row = {"checks": [x._asdict() for x in checks]}
    if name == "kernels" and place.emulated:
        left = torch.ops.wavepe.emulate_cuda(False)
        row["checks"].append({"name": "kernels never launched", "error": left * 2, "largest": left})
    return row


def environment(place: Any) -> Row:
    """Return what the figures belong to."""
    import datetime

    import torch
    from wavepe.experiments.environment import version_of

    from .machine import commit

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": "none: the CPU" if place.emulated else torch.cuda.get_device_name(),
        "interpreted": place.emulated,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "transformers": version_of("transformers"),
        **commit(),
    }


def no_interpreter(place: Any) -> str:
    """Return why attention's kernels cannot run on this device, or ""."""
    if importlib.util.find_spec("triton") is None:
        return NEEDS_TRITON
    if place.emulated and os.environ.get("TRITON_INTERPRET") != "1":
        return "without a GPU attention's kernels need TRITON_INTERPRET=1"
    return ""


def main(argv: Sequence[str]) -> int:
    """Run the tasks, and print the row of each; return 0."""
    from .gpu_measure import Place

    dry = argv[0] == "--dry"
    seconds, *names = argv[dry:]
    end = time.monotonic() + float(seconds)
    for name in names:
        left = end - time.monotonic()
        row = {"name": name, "not_run": LATE} if left <= 0 else None
        print(json.dumps(row or run(Place("cpu" if dry else "cuda"), name, left)), flush=True)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # Python's end would free objects that autograd's thread holds, which sometimes aborts the
    # process: https://github.com/pytorch/pytorch/issues/38228
    os._exit(code)
