"""``wavepe heatmap``: attention weights of models side by side, and how far back heads look."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np

from ..analysis import attention_map, attention_window, plots
from ..common.errors import UsageError
from ..common.labels import fold
from ..experiments.model import Model
from ..experiments.tables import print_table
from ..experiments.text import tokens_for
from . import measuring
from .options import Number, Reals

_LENGTH = 256
_TITLE_WIDTH = 34


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``wavepe heatmap``."""
    measuring.add_arguments(parser, several=True)
    add = parser.add_argument
    add("--length", action=Number,
        help=f"tokens to run (default: the trained length, at most {_LENGTH})")  # fmt: skip
    add("--layer", action=Number, least=0,
        help="show this layer only, counted from 0 (default: the mean of all layers)")  # fmt: skip
    add("--head", action=Number, least=0,
        help="show this head only, counted from 0 (default: the mean of all heads)")  # fmt: skip
    add("--threshold", action=Reals, default=1e-3,
        help="smallest mean weight that counts: the window of a head is 1 + the largest distance "
        "with at least this weight (default: %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run each model, print the windows of its heads and write the files."""
    measuring.check(args)
    found, titles, environment = [], [], {}
    for given in args.models:
        with measuring.opened(args, given) as loaded:
            one = _measured(loaded, args)
        environment = one.pop("environment")
        found.append(one)
        name = fold(loaded.name, _TITLE_WIDTH)
        titles.append("\n".join([*name, one["shown"], f"window {one['window']}"]))
    figures = {"threshold": args.threshold, "models": found, "environment": environment}
    maps = [one["map"] for one in found]
    measuring.write(args, figures, partial(plots.attention_maps, maps, titles=titles))
    return 0


def _measured(loaded: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Print the windows of a model's heads; return its record for JSON."""
    length = args.length or min(loaded.trained_length or _LENGTH, _LENGTH)
    text = tokens_for(loaded, args.data, [length], length)
    with loaded.running():
        found = attention_map(loaded.model, text.ids)
    layers = _chosen("layer", args.layer, found.shape[0], loaded)
    heads = _chosen("head", args.head, found.shape[1], loaded)
    windows = attention_window(found, args.threshold)
    panel = found[np.ix_(layers, heads)].mean(axis=(0, 1))
    window = int(attention_window(panel, args.threshold))
    shown = _shown(args, *found.shape[:2])
    print_table(
        f"Attention windows of {loaded.name}: how many tokens a head looks back (mean weight at "
        f"least {args.threshold:g}), on {text.description}",
        "layer",
        [f"head {head}" for head in heads],
        [(str(layer), [str(windows[layer, head]) for head in heads]) for layer in layers],
    )
    if len(layers) * len(heads) > 1:
        print(f"{shown}: {window}\n")
    return {
        **loaded.facts(text.description), "length": length, "shown": shown, "windows": windows,
        "window": window, "map": panel,
    }  # fmt: skip


def _shown(args: argparse.Namespace, layers: int, heads: int) -> str:
    """Return a text that says which layers and heads a map shows."""
    if args.layer is None and args.head is None:
        return f"mean of {layers} layers and {heads} heads"
    layer = f"mean of {layers} layers" if args.layer is None else f"layer {args.layer}"
    return f"{layer}, " + (f"mean of {heads} heads" if args.head is None else f"head {args.head}")


def _chosen(option: str, value: int | None, count: int, loaded: Model) -> list[int]:
    """Return the indices of the layers or heads that the user asks for."""
    if value is None:
        return list(range(count))
    if value >= count:
        raise UsageError(f"--{option} {value}: {loaded.path} has {count}, numbered from 0")
    return [value]
