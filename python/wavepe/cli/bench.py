"""``wavepe bench``: the benchmarks, which are the folder benchmarks of the repository."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``wavepe bench``."""
    _runner().add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Time the operators; 1 if an error is over its bound."""
    return _runner().run(args)


def _runner() -> ModuleType:
    return importlib.import_module("wavepe.benchmarks.bench")  # no import statement: see setup.py
