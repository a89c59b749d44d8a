"""``wavepe sweep``: perplexity of a trained model with a changed rotary embedding."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ..analysis import plots
from ..common.errors import UsageError
from ..experiments.model import Model, load_model
from ..experiments.tables import print_table
from ..experiments.text import tokens_for
from . import measuring
from .options import Reals

_FRACTIONS = ("1", ".9", ".75", ".5", ".25", "0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measuring.add_arguments(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--fraction", nargs="*", action=Reals, most=1.0, const=_FRACTIONS,
        metavar="P", help="fractions to run the model with: p-RoPE rotates this fraction of the "
        "pairs, the fastest ones (default: " + " ".join(_FRACTIONS) + ")")  # fmt: skip
    which.add_argument(
        "--theta", nargs="+", action=Reals, help="bases (theta) to run the model with"
    )
    measuring.add_lengths(parser)


def run(args: argparse.Namespace) -> int:
    return measuring.run(args, _measured)


def _measured(loaded: Model, args: argparse.Namespace) -> measuring.Measured:
    option = "fraction" if args.theta is None else "theta"
    values = args.theta or args.fraction or list(map(float, _FRACTIONS))
    lengths = args.lengths or loaded.default_lengths()
    text = tokens_for(loaded, args.data, lengths, args.tokens)
    facts = loaded.facts(text.description)
    rows = {}
    for value in values:
        with _changed(loaded, option, value) as changed:
            what = f"{option} {value:g}, "
            rows[value] = measuring.perplexities(changed, args, text.ids, lengths, what)
    print_table(
        f"Perplexity per {loaded.unit} of {loaded.name} by {option} of its rotary embedding, "
        f"protocol whole, on {text.description}",
        option, lengths,
        [(f"{value:g}", [f"{x:.2f}" for x in row.values()]) for value, row in rows.items()],
    )  # fmt: skip
    by_length = {length: [row[length] for row in rows.values()] for length in lengths}
    figures = {**facts, "protocol": "whole", option: values, "perplexity": by_length}
    runs = [{"encoding": f"{option} {x:g}", "perplexity": row} for x, row in rows.items()]
    return figures, partial(
        plots.perplexity_by_length, runs, train_length=loaded.trained_length or min(lengths),
        unit=loaded.unit, title=f"{loaded.name}: {option} changed without training",
    )  # fmt: skip


@contextmanager
def _changed(loaded: Model, option: str, value: float) -> Iterator[Model]:
    """Give the model with another base, or with p-RoPE."""
    import wavepe.hf

    spec = wavepe.hf.encoding_of(loaded.model)
    with loaded.running():
        if option == "theta":
            wavepe.hf.set_theta(loaded.model, value)
            yield loaded
        elif spec is None:
            with wavepe.hf.patched(loaded.model, "rope", fraction=value):
                yield loaded
        else:
            encoding = wavepe.encoding(spec) if isinstance(spec, str) else None
            if not isinstance(encoding, wavepe.encodings.RoPE):
                needs = "a model with RoPE in all layers"
                raise UsageError(f"--fraction needs {needs}, but this one has {spec!r}")
            model = load_model(loaded.path, str(dataclasses.replace(encoding, fraction=value)))
            yield dataclasses.replace(loaded, model=model.to(loaded.device.place))
