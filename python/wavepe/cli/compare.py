"""``wavepe compare``: train one small Llama per encoding, and evaluate it on longer text."""

from __future__ import annotations

import argparse

from ..encodings import known_encodings
from ..experiments import compare
from ..experiments.data import SPLITS
from ..experiments.presets import MODELS, PRESETS
from ..experiments.tables import print_table
from ..experiments.tasks import TASKS
from .options import add_documented, add_imports, given

_BEST = " (* best of its column)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    presets = "\n".join(f"  {name:14}{preset.text}" for name, preset in PRESETS.items())
    parser.epilog = f"encodings:\n  {' '.join(known_encodings())}\npresets:\n{presets}"
    add_documented(
        parser, compare, encodings={"metavar": "SPEC"},
        preset={"choices": PRESETS}, task={"choices": TASKS}, split={"choices": SPLITS},
        model={"choices": MODELS}, finetune={"metavar": "LENGTH"}, out={"metavar": "DIR"},
        device={"default": "cpu"},
    )  # fmt: skip
    add_imports(parser)


def run(args: argparse.Namespace) -> int:
    results = compare(**given(args, compare), progress=not args.quiet)
    for section in results.sections:
        starred = any(cell.endswith("*") for _, cells in section.rows for cell in cells)
        title = section.title + _BEST * starred
        print_table(title, "encoding", section.headings, section.rows)
    if not args.quiet:
        print(f"report: {results.folder / 'report.md'}")
        print(f"results: {results.folder / 'results.json'}")
        for section in results.sections:
            if section.draw:
                print(f"picture: {results.folder / section.picture}")
    return 0
