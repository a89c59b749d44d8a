"""``wavepe needle``: does a model find a fact in a long context?"""

from __future__ import annotations

import argparse
from functools import partial

from .. import analysis
from ..analysis import plots
from ..experiments.model import Model
from ..experiments.tables import print_table
from ..experiments.text import text_of
from . import measuring
from .options import Number, Reals

_DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]
_FORMS = {
    "pairs": "lines key=value, and a question for one key",
    "sentence": "a sentence with a secret number, in prose",
    "statement": "$n=7kq3; in prose, as in compare --task needle",
}
_HAYSTACK = 1 << 24  # bytes of --data, at most; no context holds so many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measuring.add_arguments(parser, data="a text file, or a folder of text files, to hide the fact "
        "in (default: other pairs, or a few sentences, repeated)")  # fmt: skip
    add = parser.add_argument
    add("--lengths", "--length", nargs="+", action=Number,
        help="lengths of the whole context (default: those of wavepe perplexity)")  # fmt: skip
    add("--depths", nargs="+", action=Reals, most=1.0, default=_DEPTHS,
        help="positions of the fact in the context, from 0 (beginning) to 1 (end) "
        "(default: 0 .25 .5 .75 1)")  # fmt: skip
    add("--theta", action=Reals,
        help="run the model with this base (theta) of its rotary embedding")  # fmt: skip
    add("--form", choices=tuple(_FORMS), help="form of the fact. "
        + "; ".join(f"{name}: {text}" for name, text in _FORMS.items())
        + " (default: statement for a model of compare --task needle, pairs for other models of "
        "bytes, else sentence)")  # fmt: skip
    add("--trials", action=Number, default=10,
        help="number of facts for each length and depth (default: %(default)s)")  # fmt: skip
    add("--seed", action=Number, least=0, default=0,
        help="seed of the generator that draws the facts (default: %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    return measuring.run(args, _measured)


def _measured(loaded: Model, args: argparse.Namespace) -> measuring.Measured:
    lengths = args.lengths or loaded.default_lengths()
    form = args.form or ("pairs" if loaded.tokenizer is None else "sentence")
    if args.form is None and (loaded.comparison or {}).get("task") == "needle":
        form = "statement"  # that of the training
    from ..hf import set_theta  # takes seconds

    haystack = None if args.data is None else text_of(args.data, _HAYSTACK)
    with measuring.running(loaded, args) as begin:
        if args.theta is not None:
            set_theta(loaded.model, args.theta)
        grid = analysis.needle(
            loaded.model, loaded.tokenizer, lengths, args.depths, form=form, haystack=haystack,
            trials=args.trials, seed=args.seed, progress=begin("needle"),
        )  # fmt: skip
    around = args.data or ("other pairs" if form == "pairs" else "a few sentences, repeated")
    theta = "" if args.theta is None else f" with theta={args.theta:g}"
    title = f"Facts that {loaded.name}{theta} finds"
    print_table(
        f"{title} ({form}: {_FORMS[form]}; greedy decoding, exact match, {args.trials} trials "
        f"each, in {around}), by depth and length in {loaded.unit}s",
        "depth", lengths,
        [(f"{depth:g}", [f"{rate:.0%}" for rate in column])
         for depth, column in zip(args.depths, grid.T, strict=True)],
    )  # fmt: skip
    if not (grid.any() or args.quiet):
        print("A model that never learned to find facts finds none, whatever its encoding.\n")
    where = {"lengths": lengths, "depths": args.depths}
    figures = {
        **loaded.facts(f"{form} in {around}"), "form": form, "theta": args.theta,
        "trials": args.trials, "seed": args.seed, **where, "success": grid,
    }  # fmt: skip
    return figures, partial(plots.needle_grid, grid, title=title, **where)
