"""``wavepe adapt``: swap the encoding of a trained model, and fine-tune it."""

from __future__ import annotations

import argparse

from ..experiments import adapt
from ..experiments.tables import print_table
from ..training import adapting
from .options import add_documented, add_imports, given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s SOURCE TARGET ENCODING --data PATH [options]"
    add_documented(parser, adapt)
    add_documented(
        parser, adapting.adapt, ("model", "encoding", "data", "folder", "tokenizer"),
        batch_size={"flag": "--batch"}, lora={"metavar": "RANK"},
        learning_rate={"flag": "--lr", "metavar": "RATE"},
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true", help="continue what TARGET holds; this is the default"
    )
    add_imports(parser)


def run(args: argparse.Namespace) -> int:
    done = adapt(**given(args, adapt, adapting.adapt), progress=not args.quiet)
    title = "" if args.quiet else done.title
    print_table(title, "model", done.adapted.settings["lengths"], done.rows)
    for line in done.facts * (not args.quiet):
        print(line)
    return 0
