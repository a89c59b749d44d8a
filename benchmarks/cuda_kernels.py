"""Print the registers, instructions and access widths that nvcc gives each CUDA kernel.

`python -m benchmarks.cuda_kernels` compiles the kernels and prints a table. It needs nvcc, and
nvdisasm from `make extras`, but no GPU. `--json FILE` keeps the figures for
docs/internals/cuda.md.
"""

from __future__ import annotations

import collections
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import wavepe

from .command import ROOT, Missing, measuring_command
from .command import table as markdown

ARCHS = tuple(int(arch.removeprefix("sm_")) for arch in wavepe.build_info()["cuda_archs"])
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?!NOP)")  # NOPs only fill
ACCESS = re.compile(r"\b(LDG|STG)((?:\.[A-Z0-9_]+)*)")
# Bytes of an access, by a part of its name; an access without such a part has 4.
BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


def tools() -> tuple[str, str] | None:
    """Return the paths of nvcc and nvdisasm, or None."""
    wheels = Path(sysconfig.get_path("purelib"), "nvidia")
    programs = []
    for name in ("nvcc", "nvdisasm"):
        paths = [shutil.which(name), *sorted(wheels.glob(f"cu*/bin/{name}"))]
        programs.append(next((str(p) for p in paths if p and os.access(p, os.X_OK)), None))
    return (programs[0], programs[1]) if all(programs) else None


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words[0]} failed:\n{done.stderr}")
    return done.stdout + done.stderr


def _instructions(sass: str) -> tuple[dict[str, dict[str, list[int]]], dict[str, int]]:
    """Return the bytes of each global read (LDG) and write (STG), all instructions, by kernel."""
    widths: dict[str, dict[str, list[int]]] = collections.defaultdict(
        lambda: {"LDG": [], "STG": []}
    )
    counts: dict[str, int] = collections.Counter()
    kernel = ""
    for line in sass.splitlines():
        label = re.match(r"\s*\.text\.(\w+):", line)
        if label:
            kernel = label[1]
        counts[kernel] += INSTRUCTION.search(line) is not None
        access = ACCESS.search(line)
        if access:
            sizes = [BYTES[word] for word in access[2].split(".") if word in BYTES]
            widths[kernel][access[1]].append(sizes[0] if sizes else 4)
    return widths, counts


@functools.cache
def measure(arch: int) -> tuple[dict, ...]:
    """Return a row for each kernel, compiled for one architecture."""
    programs = tools()
    if not programs:
        raise Missing("nvcc or nvdisasm is not there: make extras brings the latter")
    with tempfile.TemporaryDirectory() as folder:
        cubin = str(Path(folder, "kernels.cubin"))
        source = ("-I", str(ROOT / "csrc"), str(ROOT / "csrc/cuda/kernels.cu"), "-o", cubin)
        options = ("-O3", "-std=c++17", f"-arch=sm_{arch}", "-cubin", "-Xptxas=-v")
        output = _run(programs[0], *options, *source)
        widths, counts = _instructions(_run(programs[1], cubin))
    rows = []
    for part in re.split(r"Compiling entry function", output)[1:]:
        name, stores, loads, registers = _properties(part)
        rows.append(
            {
                "kernel": name,
                "arch": arch,
                "registers": registers,
                "spilled": stores + loads,
                "instructions": counts[name],
                "reads": sorted(set(widths[name]["LDG"])),
                "writes": sorted(set(widths[name]["STG"])),
            }
        )
    return tuple(sorted(rows, key=lambda row: row["kernel"]))


def _properties(output: str) -> tuple[str, int, int, int]:
    """Read the properties of a kernel, and not of the functions that it calls."""
    name = re.search(r"'(\w+)'", output)
    used = re.search(r"Used (\d+) registers", output)
    spills = name and re.search(
        rf"properties for {name[1]}\s+\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes",
        output,
    )
    if not (name and used and spills):
        raise RuntimeError(f"ptxas said something else:\n{output}")
    return name[1], int(spills[1]), int(spills[2]), int(used[1])


def table(results: dict) -> str:
    """Return the table as Markdown, with a column for each architecture."""
    archs = list(dict.fromkeys(row["arch"] for row in results["rows"]))
    by_kernel: dict[str, list[dict]] = {}
    for row in results["rows"]:
        by_kernel.setdefault(row["kernel"], []).append(row)
    lines = []
    for kernel, rows in by_kernel.items():
        cells = [
            f"{row['registers']}" + (f" ({row['spilled']} B spilled)" if row["spilled"] else "")
            for row in rows
        ]
        cells.append(str(max(row["instructions"] for row in rows)))
        for what in ("reads", "writes"):
            sizes = sorted({size for row in rows for size in row[what]})
            cells.append(", ".join(map(str, sizes)))
        lines.append((f"`{kernel}`", *cells))
    heads = ("kernel", *(f"sm_{arch}" for arch in archs), "instructions", "reads", "writes")
    return markdown(heads, lines, f"l{'r' * len(archs)}rl")


def measure_all() -> dict:
    """Return the rows of every architecture that this build of wavepe has kernels for."""
    if not ARCHS:
        raise Missing("this build of wavepe holds no CUDA kernels")
    rows = [row for arch in ARCHS for row in measure(arch)]
    nvcc, _ = tools() or ("", "")
    version = re.search(r"release [\d.]+", _run(nvcc, "--version"))
    return {"nvcc": f"nvcc {version[0] if version else ''}", "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if a tool is missing."""
    return measuring_command(__doc__, measure_all, table, argv)


if __name__ == "__main__":
    sys.exit(main())
