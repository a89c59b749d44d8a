"""``wavepe perplexity``: perplexity of a model by sequence length, by one of three protocols."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from ..analysis import plots
from ..common.errors import UsageError
from ..experiments.model import Model
from ..experiments.report import headings
from ..experiments.settings import Protocol
from ..experiments.tables import print_table
from ..experiments.text import tokens_for
from . import measuring


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measuring.add_arguments(parser)
    measuring.add_lengths(parser)
    parser.add_argument("--protocol", default="whole", metavar="PROTOCOL",
        help="how a piece of text is evaluated. whole: in one pass. blocks:WINDOW: in passes of "
        "WINDOW tokens that do not overlap. sliding:WINDOW/STRIDE: in passes of WINDOW tokens that "
        "start every STRIDE tokens, where each token is scored once. The default WINDOW is the "
        "trained length, and the default STRIDE half of it (default: %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    _protocol(args, sys.maxsize)  # raises before the model is loaded
    return measuring.run(args, _measured)


def _measured(loaded: Model, args: argparse.Namespace) -> measuring.Measured:
    lengths = args.lengths or loaded.default_lengths()
    trained = loaded.trained_length
    protocol = _protocol(args, trained)
    text = tokens_for(loaded, args.data, lengths, args.tokens)
    values = measuring.perplexities(loaded, args, text.ids, lengths, **protocol.options)
    how = f"protocol {protocol.protocol} ({protocol.text})"
    title = f"Perplexity per {loaded.unit} of {loaded.name}, {how}"
    heads = headings(lengths, trained) if trained else lengths
    row = (loaded.name, [f"{value:.2f}" for value in values.values()])
    print_table(f"{title}, on {text.description}", "model", heads, [row])
    figures = {**loaded.facts(text.description), **protocol.options, "perplexity": values}
    return figures, partial(
        plots.perplexity_by_length, [{"encoding": loaded.name, "seed": 0, "perplexity": values}],
        train_length=trained or min(lengths), title=title, unit=loaded.unit,
    )  # fmt: skip


def _protocol(args: argparse.Namespace, trained_length: int | None) -> Protocol:
    protocol = Protocol.parse(args.protocol, trained_length or 0, "protocol")
    if protocol.window == 0:  # the configuration names no trained length
        needs = f"needs a window, such as {protocol.protocol}:512"
        raise UsageError(f"--protocol {args.protocol}: {needs}")
    return protocol
