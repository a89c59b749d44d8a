"""The registers, spills, shared memory and loops that Triton gives each attention kernel.

`python -m benchmarks.attention kernels` compiles the GPU's kernels with the arguments of real calls
and counts the instructions of tensor cores, too. It needs Triton, from `make extras`, but no GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import wavepe
from wavepe import ops

from .command import Missing
from .command import table as markdown

ARCHS = (80, 90, 100, 120)
# The most kilobytes of shared memory of a program, by architecture.
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
TENSOR_CORE = re.compile(r"\b(HMMA|HGMMA|UTCHMMA)\b")
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
SPILL = re.compile(r"\b(LDL|STL)\b")  # a load or a store of the stack
BRANCH = re.compile(r"\bBRA\b.*\b0x([0-9a-f]+)$")
LENGTH = 1024


class Case(NamedTuple):
    """One call: `table` is missing, constant (low-rank zones) or learned."""

    arch: int
    head_size: int
    table: str = "constant"
    dtype: torch.dtype = torch.bfloat16
    queries: int = LENGTH


CASES = [
    Case(arch, size, table)
    for arch in ARCHS
    for size in (64, 128)
    for table in ("none", "constant", "learned")
]
FEW = [
    Case(arch, size, table, queries=queries)
    for arch in ARCHS
    for size in (64, 128)
    for table, queries in (("none", 1), ("constant", 1), ("constant", 4))
]


class _Driver:
    """A driver that can only compile: it answers what Triton asks before a compilation."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def measure(case: Case, backward: bool = True, **options: Any) -> list[dict]:
    """Return a row for each kernel of a call with these options, in the order of launches."""
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise Missing("TRITON_INTERPRET is set: kernels that are interpreted are not compiled")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # silences a warning of Triton 3.9
    try:
        from triton.runtime.driver import driver
    except ImportError as error:
        raise Missing("Triton is not there: make extras brings it") from error
    from wavepe.ops._attention_gpu import launches

    compiled_kernels: dict[str, dict] = {}

    def compile_only(kernel: Any, grid: tuple[int, ...], *arguments: Any, **how: Any) -> None:
        if kernel.__name__ not in compiled_kernels:
            kernel.device_caches.clear()  # its key does not name the architecture
            compiled = kernel.warmup(*arguments, grid=grid, **how)
            keys = [int(x.KEYS) for x in arguments if hasattr(x, "KEYS")]
            tile = {"rows": how.get("ROWS"), "keys": keys[0] if keys else None}
            compiled_kernels[kernel.__name__] = properties(compiled) | tile

    driver.set_active(_Driver(case.arch))
    kept = launches.launch, launches.capability, launches.multiprocessors
    launches.launch = compile_only
    launches.capability = lambda device: {8: 8, 9: 9, 10: 10}.get(case.arch // 10, 8)
    launches.multiprocessors = lambda device: 132
    try:
        _run(case, backward and case.queries == LENGTH, options)
    finally:
        launches.launch, launches.capability, launches.multiprocessors = kept
    about = {"arch": case.arch, "head_size": case.head_size, "table": case.table}
    about |= {"dtype": str(case.dtype).removeprefix("torch."), "queries": case.queries}
    return [{"kernel": name, **about, **row} for name, row in compiled_kernels.items()]


def _run(case: Case, backward: bool, options: dict[str, Any]) -> None:
    """Make the launches of one call; `measure` has replaced them, so nothing is computed."""
    from wavepe.ops._attention_checks import Arguments
    from wavepe.ops._attention_gpu import call

    shapes = (4, case.queries), (2, LENGTH)
    q, k = (torch.zeros(1, *shape, case.head_size, dtype=case.dtype) for shape in shapes)
    tensors: dict[str, Any] = {"q": q, "k": k, "v": k}
    if case.table == "constant":
        table = ops.relative_table(*wavepe.encoding("wavelet").table(LENGTH, case.head_size))
        p, first, zones = table.build_tensors(case.dtype, torch.device("cpu"), gpu=True)
        tensors |= {"p": p, "first": first, "zones": list(zones)}
    elif case.table == "learned":
        tensors["p"] = torch.zeros(300, case.head_size, dtype=case.dtype)
    arguments = Arguments(**{**tensors, **options})
    out, lse = call.forward(*arguments)
    if backward:
        wanted = (case.table == "learned", arguments.bias is not None)
        call.backward(out, lse, out, lse, *arguments, *wanted)


def properties(compiled: Any) -> dict:
    """Read a kernel's properties from its machine code."""
    usage, code = _dumped("-res-usage", compiled), sass(compiled)
    loops = _loops(code)
    used = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if used is None:
        raise RuntimeError(f"cuobjdump said something else:\n{usage}")
    return {
        "registers": int(used[1]),
        "spilled": int(used[2]),
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "tensor_core": len(TENSOR_CORE.findall(code)),
        "loops": sorted(map(len, loops)),
        "spills_in_loops": sum(len(SPILL.findall(text)) for loop in loops for text in loop),
    }


def sass(compiled: Any) -> str:
    """Return a kernel's machine code as text."""
    return _dumped("-sass", compiled)


def _dumped(option: str, compiled: Any) -> str:
    """Return the output of cuobjdump, which Triton brings, for a kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        words = [tool, option, str(path)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def _loops(code: str) -> list[list[str]]:
    """Return the instructions of each innermost loop that uses tensor cores."""
    lines = [(int(at, 16), text) for at, text in INSTRUCTION.findall(code)]
    branches = [(at, BRANCH.search(text)) for at, text in lines]
    ranges = [(int(to[1], 16), at) for at, to in branches if to and int(to[1], 16) < at]
    bodies = [[(at, text) for at, text in lines if a <= at <= b] for a, b in ranges]
    bodies = [body for body in bodies if any(TENSOR_CORE.search(text) for _, text in body)]
    inner = [x for x in bodies if not any(len(y) < len(x) and set(y) < set(x) for y in bodies)]
    return [[text for _, text in body] for body in inner]


def measure_all() -> dict:
    """Return the rows of every kernel of every case, ready for JSON."""
    rows = [row for case in (*CASES, *FEW) for row in measure(case)]
    import triton

    return {"triton": triton.__version__, "rows": rows}


def table(results: dict) -> str:
    """Return the table as Markdown, with a column for each architecture."""
    archs = list(dict.fromkeys(row["arch"] for row in results["rows"]))
    by_kernel: dict[tuple[str, str, int], dict[int, str]] = {}
    for row in results["rows"]:
        few = row.get("queries", LENGTH) < LENGTH
        kind = f"{row['table']}, queries: {row['queries']}" if few else row["table"]
        place = row["kernel"], kind, row["head_size"]
        by_kernel.setdefault(place, {})[row["arch"]] = _cell(row)
    rows = [
        (f"`{kernel}`", kind, str(size), *(cells.get(arch, "") for arch in archs))
        for (kernel, kind, size), cells in sorted(by_kernel.items())
    ]
    return markdown(("kernel", "table", "head size", *(f"sm_{a}" for a in archs)), rows, "llrl")


def _cell(row: dict) -> str:
    star = "*" if row["spills_in_loops"] else ""
    spilled = f", {row['spilled']} B spilled{star}" if row["spilled"] else ""
    return f"{row['registers']}{spilled}, {-(-row['shared'] // 1024)} KB, {row['warps']}"
