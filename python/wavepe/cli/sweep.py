"""``wavepe sweep``: perplexity of a trained model with a changed rotary embedding."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..experiments import model as models
from ..experiments.errors import CommandError, UsageError
from ..experiments.tables import print_rows, wrapped
from ..experiments.text import tokens_for
from . import outputs
from .options import LENGTHS_HELP, Number, Reals, add_model

FRACTIONS = ("1", ".9", ".75", ".5", ".25", "0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``wavepe sweep``."""
    add_model(parser)
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--fraction", nargs="*", action=Reals, most=1.0, const=FRACTIONS,
        metavar="P",
        help="fractions to run the model with: p-RoPE rotates this fraction of the pairs, the "
        "fastest ones (default: " + " ".join(FRACTIONS) + ")")  # fmt: skip
    which.add_argument("--theta", nargs="+", action=Reals,
        help="bases (theta) to run the model with")  # fmt: skip
    add("--lengths", "--length", nargs="+", action=Number, least=2, help=LENGTHS_HELP)
    add("--tokens", action=Number,
        help="approximate number of tokens to evaluate (default: 65536)")  # fmt: skip
    outputs.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate the model at each value, print the table and write the files."""
    option = "fraction" if args.theta is None else "theta"
    values = args.theta or args.fraction or list(map(float, FRACTIONS))
    with outputs.measuring(args, "sweep") as loaded:
        lengths = args.lengths or loaded.default_lengths()
        text = tokens_for(loaded, args.data, lengths, args.tokens)

        from ..analysis import perplexity
        from ..experiments.progress import Report

        found: dict[int, list[float]] = {length: [] for length in lengths}
        facts = loaded.facts(text.description)
        with Report(quiet=args.quiet, lines=False) as report:
            for value in values:
                with _changed(loaded, option, value) as changed, changed.running():
                    for length in lengths:
                        step = report.begin(f"{option} {value:g}, length {length}")
                        found[length].append(
                            perplexity(changed.model, text.ids, length, progress=step)
                        )
    title = f"Perplexity per {loaded.unit} of {loaded.name} by {option} of its rotary embedding"
    _print(f"{title}, protocol whole, on {text.description}", option, values, found)
    figures = {**facts, "protocol": "whole", option: values, "perplexity": found}

    def draw(path: Path) -> None:
        from ..analysis.plots import sweep_curve

        name = {"fraction": "fraction of the pairs that turn (p)", "theta": "theta"}[option]
        sweep_curve(
            values, found, path, name=name, logarithmic=option == "theta", unit=loaded.unit,
            title=f"{loaded.name}: {option} changed without training",
        )  # fmt: skip

    outputs.write(args, figures, draw)
    return 0


def _print(
    title: str, option: str, values: list[float], found: dict[int, list[float]]
) -> None:  # fmt: skip
    print(wrapped(title))
    rows = [
        (f"{value:g}", [f"{line[row]:.2f}" for line in found.values()])
        for row, value in enumerate(values)
    ]
    print_rows(option, [str(length) for length in found], rows)


@contextmanager
def _changed(loaded: models.Model, option: str, value: float) -> Iterator[models.Model]:
    """Give the model with another base, or with p-RoPE."""
    if option == "theta":
        loaded.set_theta(value)
        yield loaded
        return
    import wavepe.hf

    spec = wavepe.hf.encoding_of(loaded.model)
    wanted = "" if spec is None else _with_fraction(spec, value)
    try:
        if spec is None:
            wavepe.hf.patch(loaded.model, "rope", fraction=value)
        else:
            other = loaded.read_with(wanted)
    except (ValueError, TypeError) as error:
        raise CommandError(f"--fraction {value:g}: {models.one_line(error)}") from error
    if spec is not None:
        yield other
        return
    try:
        yield loaded
    finally:
        wavepe.hf.unpatch(loaded.model)


def _with_fraction(spec: object, value: float) -> str:
    """Return the spec of a rotary encoding, with another fraction."""
    import wavepe

    encoding = wavepe.encoding(spec) if isinstance(spec, str) else None
    if not isinstance(encoding, wavepe.encodings.RoPE):
        raise UsageError(
            f"--fraction needs one with RoPE in all layers, but this model has the position "
            f"encoding {spec!r}"
        )
    return str(dataclasses.replace(encoding, fraction=value))
