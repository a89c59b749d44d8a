"""fairseq's commands with the plug-in loaded.

Importing this module loads the plug-in. Processes that fairseq starts import the module of the
command, and no other module of wavepe.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable

from . import register

# The format of fairseq's commands. It must be set before fairseq is imported.
logging.basicConfig(
    format="%(asctime)s | %(levelname)s | %(name)s | %(message)s",
    datefmt="%Y-%m-%d %H:%M:%S",
    level=os.environ.get("LOGLEVEL", "INFO").upper(),
    stream=sys.stdout,
)

_missing: ImportError | None = None
try:
    register()
except ImportError as error:
    _missing = error


def train() -> None:
    """Run ``wavepe-fairseq-train``: ``fairseq-train`` with ``--pos-enc``."""
    _run("train")


def eval_lm() -> None:
    """Run ``wavepe-fairseq-eval-lm``: ``fairseq-eval-lm`` that raises if it would skip tokens."""
    _run("eval_lm")


def preprocess() -> None:
    """Run ``wavepe-fairseq-preprocess``: ``fairseq-preprocess``."""
    _run("preprocess")


def generate() -> None:
    """Run ``wavepe-fairseq-generate``: ``fairseq-generate``."""
    _run("generate")


def _run(command: str) -> None:
    if _missing is not None:
        sys.exit(f"wavepe-fairseq: {_missing}")
    if command == "eval_lm":
        from .evaluation import refuse_skipped_tokens

        refuse_skipped_tokens()
    main: Callable[[], None] = importlib.import_module(f"fairseq_cli.{command}").cli_main
    main()
