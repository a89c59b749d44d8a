"""``wavepe perplexity``: perplexity of a model by sequence length, by one of three protocols."""

from __future__ import annotations

import argparse
from functools import partial

from ..analysis import plots
from ..analysis._perplexity import PROTOCOLS
from ..experiments.errors import UsageError
from ..experiments.model import Model
from ..experiments.protocols import Protocol
from ..experiments.report import headings
from ..experiments.tables import print_table
from ..experiments.text import tokens_for
from . import measuring
from .options import Number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``wavepe perplexity``."""
    measuring.add_arguments(parser)
    measuring.add_lengths(parser)
    add = parser.add_argument
    add("--protocol", choices=PROTOCOLS, default="whole",
        help="how a piece of text is evaluated. whole: in one pass. blocks: in passes of --window "
        "tokens that do not overlap. sliding: in passes of --window tokens that start every "
        "--stride tokens, where each token is scored once (default: %(default)s)")  # fmt: skip
    add("--window", action=Number, least=2,
        help="tokens of a pass, for blocks and sliding (default: the trained length)")  # fmt: skip
    add("--stride", action=Number,
        help="tokens between the starts of two passes, for sliding (default: half the window)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Evaluate the model, print the table and write the files."""
    if args.protocol == "whole" and args.window is not None:
        raise UsageError("--window: needs --protocol blocks or sliding, got whole")
    if args.protocol != "sliding" and args.stride is not None:
        raise UsageError(f"--stride: needs --protocol sliding, got {args.protocol}")
    return measuring.run(args, _measured)


def _measured(loaded: Model, args: argparse.Namespace) -> measuring.Measured:
    lengths = args.lengths or loaded.default_lengths()
    trained = loaded.trained_length
    protocol = _protocol(args, trained)
    text = tokens_for(loaded, args.data, lengths, args.tokens)
    found = measuring.perplexities(loaded, args, text.ids, lengths, **protocol.options)
    title = (
        f"Perplexity per {loaded.unit} of {loaded.name}, protocol {protocol.name} ({protocol.text})"
    )
    heads = headings(lengths, trained) if trained else list(map(str, lengths))
    row = (loaded.name, [f"{value:.2f}" for value in found.values()])
    print_table(f"{title}, on {text.description}", "model", heads, [row])
    figures = {**loaded.facts(text.description), **protocol.used, "perplexity": found}
    return figures, partial(
        plots.perplexity_by_length, [{"encoding": loaded.name, "seed": 0, "perplexity": found}],
        train_length=trained or min(lengths), title=title, unit=loaded.unit,
    )  # fmt: skip


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
