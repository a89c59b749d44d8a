"""The environment of a result: versions and machine."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import wavepe


def version_of(distribution: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Return the name of the processor; its architecture if the system does not tell."""
    cpus = ""
    with suppress(OSError):
        cpus = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    name = re.search(r"^(?:model name|Model)\s*:\s*(\S.*?)\s*$", cpus, re.M)
    return name[1] if name else platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Return versions, machine and kernel variant, ready for JSON."""
    packages = {name: version_of(name) for name in ("torch", "transformers", "numpy")}
    return {
        "wavepe": wavepe.__version__, "variant": wavepe.variant(),
        "python": platform.python_version(), **packages, "machine": cpu_name(),
        "system": f"{platform.system()} {platform.machine()}",
    }  # fmt: skip
