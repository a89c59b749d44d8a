"""``wavepe info``: what is installed, and the commands that install the rest."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from pathlib import Path
from typing import Any

import numpy

import wavepe

from ..common.runtime import command_for
from ..experiments.environment import cpu_name, version_of

# Optional package -> the extra of wavepe that installs it.
_OPTIONAL = {
    "torch": "torch", "transformers": "hf", "fairseq": "fairseq", "accelerate": "hf",
    "matplotlib": "plot", "rich": "cli", "PyWavelets": "pywt", "ml_dtypes": "bfloat16",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(args: argparse.Namespace) -> int:
    facts = _collect()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(map(len, facts)) + 2
    missing = facts.pop("missing")
    for key, value in facts.items():
        print(f"{key:{width}}{_plain(value)}")
    for name, command in missing.items():
        lines = f"missing: {command}".splitlines()
        print(f"{name:{width}}" + f"\n{'':{width}}".join(lines))
    return 0


def _collect() -> dict[str, Any]:
    """Return facts by name, ready for JSON; "missing" maps packages to install commands."""
    versions = {name: version_of(name) for name in _OPTIONAL}
    missing = {k: command_for(extra) for k, extra in _OPTIONAL.items() if versions[k] is None}
    facts: dict[str, Any] = {
        "wavepe": wavepe.__version__, "installed in": str(Path(wavepe.__file__).parent),
        "Python": platform.python_version(), "NumPy": numpy.__version__,
        "variants here": list(wavepe.variants()), "variant in use": wavepe.variant(),
        **{f"built: {k}": value for k, value in wavepe.build_info().items() if k != "version"},
        "machine": cpu_name(),
        **{name: version for name, version in versions.items() if version is not None},
        "missing": missing,
    }  # fmt: skip
    if versions["torch"]:
        facts["CUDA"] = _cuda()
        try:
            importlib.import_module("wavepe.ops")
            facts["wavepe.ops"] = True
        except (ImportError, OSError) as error:
            facts["missing"]["wavepe.ops"] = str(error)
    return facts


def _cuda() -> str:
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"torch does not load: {error}"
    if torch.version.cuda is None:
        return "none: this torch is built for the CPU"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no device"
    return f"{torch.version.cuda}, {device}"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)
