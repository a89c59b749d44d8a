"""``wavepe heatmap``: attention weights of models side by side, and how far back heads look."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from .._labels import fold
from ..experiments.errors import UsageError
from ..experiments.tables import print_rows, wrapped
from ..experiments.text import tokens_for
from . import outputs
from .options import Number, Reals, add_model

_LENGTH = 256
_TITLE_WIDTH = 34


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``wavepe heatmap``."""
    add_model(parser, several=True)
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
    outputs.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run each model, print the windows of its heads and write the files."""
    threshold = args.threshold
    outputs.begin(args, "heatmap", args.models)
    panels: list[np.ndarray] = []
    titles: list[str] = []
    figures: dict[str, Any] = {"threshold": threshold, "models": []}
    for given in args.models:
        name, facts, panel, window = _measured(args, given, threshold)
        figures["environment"] = facts.pop("environment")
        figures["models"].append({**facts, "map": panel})
        panels.append(panel)
        titles.append("\n".join([*fold(name, _TITLE_WIDTH), facts["shown"], f"window {window}"]))

    def draw(path: Path) -> None:
        from ..analysis.plots import attention_maps

        attention_maps(panels, path, titles=titles)

    outputs.write(args, figures, draw)
    return 0


def _measured(
    args: argparse.Namespace, given: str, threshold: float
) -> tuple[str, dict[str, Any], np.ndarray, int]:
    """Return the name of a model, its record for JSON, its map (n, n) and the map's window."""
    with outputs.opened(args, given) as loaded:
        length = args.length or min(loaded.trained_length or _LENGTH, _LENGTH)
        text = tokens_for(loaded, args.data, [length], length)

        from ..analysis import attention_map, attention_window

        with loaded.running():
            found = attention_map(loaded.model, text.ids)
        layers = _chosen("layer", args.layer, found.shape[0], given)
        heads = _chosen("head", args.head, found.shape[1], given)
        windows = attention_window(found, threshold)
        shown = _shown(args, *found.shape[:2])
        panel = found[np.ix_(layers, heads)].mean(axis=(0, 1))
        window = int(attention_window(panel, threshold))
        _print(loaded.name, text.description, threshold, windows, layers, heads, shown, window)
        facts = loaded.facts(text.description)
    facts |= {"length": length, "shown": shown, "windows": windows, "window": window}
    return loaded.name, facts, panel, window


def _shown(args: argparse.Namespace, layers: int, heads: int) -> str:
    """Return a text that says which layers and heads a map shows."""
    if args.layer is None and args.head is None:
        return f"mean of {layers} layers and {heads} heads"
    layer = f"mean of {layers} layers" if args.layer is None else f"layer {args.layer}"
    return f"{layer}, " + (f"mean of {heads} heads" if args.head is None else f"head {args.head}")


def _chosen(option: str, value: int | None, count: int, given: str) -> list[int]:
    """Return the indices of the layers or heads that the user asks for."""
    if value is None:
        return list(range(count))
    if value >= count:
        raise UsageError(f"--{option} {value}: {given} has {count}, numbered from 0")
    return [value]


def _print(
    name: str, text: str, threshold: float, windows: np.ndarray, layers: list[int],
    heads: list[int], shown: str, window: int,
) -> None:  # fmt: skip
    print(wrapped(
        f"Attention windows of {name}: how many tokens a head looks back (mean weight at least "
        f"{threshold:g}), on {text}",
    ))  # fmt: skip
    print_rows(
        "layer",
        [f"head {head}" for head in heads],
        [(str(layer), [str(windows[layer, head]) for head in heads]) for layer in layers],
    )
    if len(layers) * len(heads) > 1:
        print(f"{shown}: {window}\n")
