"""fairseq's commands with the plug-in loaded.

Importing this module loads the plug-in. Processes that fairseq starts import the module of the
command, and no other module of wavepe.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from functools import partial

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


def run(command: str) -> None:
    """Run a command of fairseq; ``eval-lm`` raises if it would skip tokens."""
    if _missing is not None:
        sys.exit(f"wavepe-fairseq: {_missing}")
    if command == "eval_lm":
        from .evaluation import refuse_skipped_tokens

        refuse_skipped_tokens()
    importlib.import_module(f"fairseq_cli.{command}").cli_main()


# The scripts that an installation gets.
train = partial(run, "train")
eval_lm = partial(run, "eval_lm")
preprocess = partial(run, "preprocess")
generate = partial(run, "generate")
