"""The peak memory of attention, forward and backward, over the bytes of q, k and v.

`python -m benchmarks.attention memory` measures it, on Linux only.

Each row is measured in a process of its own. The process makes the position table, and calls
attention on short tensors, so that everything is loaded. It notes its resident memory. Then it
makes q, k, v and the gradient of the output, calls attention and asks for the gradients.
The figure is the growth to the peak (VmHWM, reset beforehand). It includes q, k and v, the output,
its gradient, and the gradients of q, k and v; these alone are 2.67 times the bytes of q, k and v.

*narrow* is a learned table of 16 columns and 1024 rows with queries of its own; their gradients are
asked for, too. A spec is a `wavepe.nn.Attention`, with the gradients of its parameters.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .command import ROOT

HEAD_SIZE = 64
LENGTH = 16384
SHORTER = 4096  # also measured, because the scores of gather would take gigabytes at LENGTH
BAR = 6.0
OURS = ("plain", "wavelets", "learned", "narrow", "sinks")
SPECS = (
    "none",
    "relative:extent=1024,rank=16",
    "wavelet:rank=8",
    "rope",
    "rope+sink+window:size=1024",
    "rope+temperature:kind=llama4",
    "rope:self_extend=8,neighbors=1024",
    "fox",
    "pope",
    "xpos",
)


def configurations(quick: bool) -> list[dict]:
    """Return the configurations; each is measured in a process of its own."""
    length, shorter = (256, 128) if quick else (LENGTH, SHORTER)
    rows = [
        {"kind": kind, "heads": heads, "length": length, "threads": threads}
        for kind in (*OURS, "sdpa")
        for heads in (1, 8)
        for threads in (1, 2)
    ]
    for kind in ("wavelets", "gather"):
        rows.append({"kind": kind, "heads": 1, "length": shorter, "threads": 1})
    for spec in SPECS:
        rows.append({"kind": spec, "heads": 8, "length": length, "threads": 1})
    return rows


# ------------------------------------------------------------------ in the measured process


def kilobytes(field: str) -> int:
    """Return a field of /proc/self/status, such as VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def training_call(kind: str, heads: int, length: int) -> Callable[..., Any]:
    """Make what the kind has learned; return its call on q, k, v and the output's gradient."""
    import torch

    forward, parameters = (of_a_module if kind in SPECS else of_a_function)(kind, heads, length)

    def call(q, k, v, grad):
        leaves = [t.requires_grad_() for t in (q, k, v)] + parameters
        out = forward(q, k, v)
        return out, torch.autograd.grad(out, leaves, grad)

    return call


def of_a_function(kind: str, heads: int, length: int) -> tuple[Callable[..., Any], list]:
    """Return a function of q, k and v, and what it has learned."""
    import torch
    import wavepe.ops as ops

    from .attention_inputs import gathered, sdpa, table

    p = torch.from_numpy(table(length, HEAD_SIZE))
    known = ops.relative_table(p.clone())
    few, queries = torch.randn(1024, 16), torch.randn(1, heads, length, 16)
    sinks = torch.randn(heads)
    delta = torch.arange(length if kind == "gather" else 1)[:, None]
    delta = delta - delta.T

    def gather(q, k, v):
        rows = slice(q.shape[2])  # the short call has fewer queries
        index = delta[rows, rows].clamp(min=0).expand(*q.shape[:2], -1, -1)
        return gathered(q, k, v, p, index, delta[rows, rows] < 0)

    def narrow(q, k, v):
        return ops.attention(q, k, v, p=few, q_rel=queries[:, :, : q.shape[2]])

    forward = {
        "plain": ops.attention,
        "wavelets": lambda q, k, v: ops.attention(q, k, v, p=known),
        "learned": lambda q, k, v: ops.attention(q, k, v, p=p),
        "narrow": narrow,
        "sinks": lambda q, k, v: ops.attention(q, k, v, sinks=sinks),
        "sdpa": sdpa,
        "gather": gather,
    }[kind]
    parameters = {"learned": [p], "narrow": [few, queries], "sinks": [sinks]}.get(kind, [])
    return forward, [t.requires_grad_() for t in parameters]


def of_a_module(spec: str, heads: int, length: int) -> tuple[Callable[..., Any], list]:
    """Return the same for a module with an encoding."""
    import torch

    from .attention_inputs import module_of

    module, x = module_of(spec, HEAD_SIZE, heads), torch.randn(1, length, HEAD_SIZE)
    return lambda q, k, v: module(q, k, v, x=x[:, : q.shape[2]]), list(module.parameters())


def measure_here(kind: str, heads: int, length: int, threads: int) -> dict:
    """Return the bytes by which this process's resident memory grows to its peak."""
    import torch

    torch.set_num_threads(threads)
    call = training_call(kind, heads, length)
    call(*torch.randn(4, 1, heads, min(256, length), HEAD_SIZE).unbind())
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    before = kilobytes("VmRSS")
    tensors = [torch.randn(1, heads, length, HEAD_SIZE) for _ in range(4)]
    call(*tensors)
    growth = 1024 * (kilobytes("VmHWM") - before)
    inputs = sum(t.nbytes for t in tensors[:3])
    return {"inputs": inputs, "growth": growth, "over_inputs": growth / inputs}


# ------------------------------------------------------------------ all rows


def measure(quick: bool = False) -> dict:
    """Measure all rows; return them ready for JSON."""
    import datetime

    from wavepe.experiments.environment import cpu_name, version_of

    from .machine import commit

    rows = []
    for row in configurations(quick):
        words = [str(row[key]) for key in ("kind", "heads", "length", "threads")]
        command = [sys.executable, "-m", "benchmarks.attention_memory", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
        rows.append({**row, "head_size": HEAD_SIZE, **json.loads(done.stdout)})
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **commit(),
        "cpu": cpu_name(),
        **{name: version_of(name) for name in ("wavepe", "torch")},
    }
    return {"environment": about, "bar": BAR, "rows": rows}


def table(results: dict) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| | heads x length x head size | threads | q, k, v | growth | growth / q, k, v |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in results["rows"]:
        size = f"{row['heads']} x {row['length']} x {row['head_size']}"
        lines.append(
            f"| {row['kind']} | {size} | {row['threads']} | {row['inputs'] / 2**20:.1f} MiB "
            f"| {row['growth'] / 2**20:.1f} MiB | {row['over_inputs']:.2f} |"
        )
    return "\n".join(lines)


def too_much(results: dict) -> list[dict]:
    """Return wavepe's rows at the full length that are over the bar."""
    ours = [row for row in results["rows"] if row["kind"] in OURS]
    return [row for row in ours if row["length"] == LENGTH and row["over_inputs"] > BAR]


if __name__ == "__main__":
    kind, *numbers = sys.argv[1:]
    print(json.dumps(measure_here(kind, *map(int, numbers))))
