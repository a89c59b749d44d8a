"""``wavepe perplexity``: perplexity of a model by sequence length, by one of three protocols."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..analysis._perplexity import PROTOCOLS
from ..experiments.errors import UsageError
from ..experiments.model import Model
from ..experiments.protocols import Protocol
from ..experiments.tables import print_rows, wrapped
from ..experiments.text import tokens_for
from . import outputs
from .options import LENGTHS_HELP, Number, add_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``wavepe perplexity``."""
    add_model(parser)
    add = parser.add_argument
    add("--lengths", "--length", nargs="+", action=Number, least=2, help=LENGTHS_HELP)
    add("--protocol", choices=PROTOCOLS, default="whole",
        help="how a piece of text is evaluated. whole: in one pass. blocks: in passes of --window "
        "tokens that do not overlap. sliding: in passes of --window tokens that start every "
        "--stride tokens, where each token is scored once (default: %(default)s)")  # fmt: skip
    add("--window", action=Number, least=2,
        help="tokens of a pass, for blocks and sliding (default: the trained length)")  # fmt: skip
    add("--stride", action=Number,
        help="tokens between the starts of two passes, for sliding (default: half the window)",
    )  # fmt: skip
    add("--tokens", action=Number,
        help="approximate number of tokens to evaluate (default: 65536)")  # fmt: skip
    outputs.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate the model, print the table and write the files."""
    _check_protocol(args)
    with outputs.measuring(args, "perplexity") as loaded:
        lengths = args.lengths or loaded.default_lengths()
        protocol = _protocol(args, loaded.trained_length)
        text = tokens_for(loaded, args.data, lengths, args.tokens)

        from ..analysis import perplexity
        from ..experiments.progress import Report

        found = {}
        with loaded.running(), Report(quiet=args.quiet, lines=False) as report:
            for length in lengths:
                found[length] = perplexity(
                    loaded.model, text.ids, length, progress=report.begin(f"length {length}"),
                    **protocol.options,
                )  # fmt: skip
        words = f"{protocol.name} ({protocol.text})"
        title = f"Perplexity per {loaded.unit} of {loaded.name}, protocol {words}"
        _print(title, text.description, found, loaded)
        facts = loaded.facts(text.description)
        train_length, unit = loaded.trained_length or min(lengths), loaded.unit
    figures = {**facts, **protocol.used, "perplexity": found}

    def draw(path: Path) -> None:
        from ..analysis.plots import perplexity_by_length

        runs = [{"encoding": loaded.name, "seed": 0, "perplexity": found}]
        perplexity_by_length(runs, path, train_length=train_length, title=title, unit=unit)

    outputs.write(args, figures, draw)
    return 0


def _check_protocol(args: argparse.Namespace) -> None:
    """Raise UsageError for sizes that the protocol does not use."""
    if args.protocol == "whole" and args.window is not None:
        raise UsageError("--window: needs --protocol blocks or sliding, got whole")
    if args.protocol != "sliding" and args.stride is not None:
        raise UsageError(f"--stride: needs --protocol sliding, got {args.protocol}")
    if None not in (args.window, args.stride) and args.stride > args.window:
        raise UsageError(f"--stride {args.stride}: needs at most the --window, {args.window}")


def _protocol(args: argparse.Namespace, trained_length: int | None) -> Protocol:
    """Return the protocol with its sizes."""
    if args.protocol != "whole" and args.window is None and trained_length is None:
        raise UsageError(
            f"--protocol {args.protocol}: needs --window N, because the configuration of this "
            "model names no trained length"
        )
    found = Protocol.of(args.protocol, args.window, args.stride, trained_length or 0)
    if not found.fits:
        raise UsageError(f"--stride {found.stride}: needs at most the window, {found.window}")
    return found


def _print(title: str, text: str, found: dict[int, float], loaded: Model) -> None:
    from ..experiments.report import headings

    print(wrapped(f"{title}, on {text}"))
    heads = headings(list(found), loaded.trained_length) if loaded.trained_length else found
    print_rows(
        "model", list(map(str, heads)), [(loaded.name, [f"{x:.2f}" for x in found.values()])]
    )
