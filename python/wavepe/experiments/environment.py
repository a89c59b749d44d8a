"""The environment of a result: versions and machine."""

from __future__ import annotations

import importlib.metadata
import platform
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
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Return versions, machine and kernel variant, ready for JSON."""
    packages = {name: version_of(name) for name in ("torch", "transformers", "numpy")}
    return {
        "wavepe": wavepe.__version__,
        "variant": wavepe.variant(),
        "python": platform.python_version(),
        **packages,
        "machine": cpu_name(),
        "system": f"{platform.system()} {platform.machine()}",
    }
