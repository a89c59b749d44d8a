"""``wavepe bench``: the benchmarks in the folder benchmarks of the repository."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``wavepe bench``."""
    _runner().add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Time the operators; return 1 if a result has a larger error than allowed."""
    return _runner().run(args)


def _runner() -> ModuleType:
    return importlib.import_module("wavepe.benchmarks.bench")  # no import statement: see setup.py
