"""``wavepe heatmap``: attention weights of models side by side, and how far back heads look."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np

from ..analysis import attention_map, attention_window, plots
from ..common.errors import UsageError
from ..common.labels import fold
from ..experiments.model import Model, opened
from ..experiments.tables import print_table
from . import measuring
from .options import Number, Reals

_LENGTH = 256
_TITLE_WIDTH = 34


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measuring.add_arguments(parser, several=True)
    measuring.add_length(parser, _LENGTH)
    add = parser.add_argument
    for part in ("layer", "head"):
        add(f"--{part}", action=Number, least=0,
            help=f"show this {part} only, counted from 0 (default: the mean of all {part}s)",
        )  # fmt: skip
    add("--threshold", action=Reals, default=1e-3,
        help="smallest mean weight that counts: the window of a head is 1 + the largest distance "
        "with at least this weight (default: %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    measuring.check(args)
    records, titles, environment = [], [], {}
    for path in args.models:
        with opened(path, args.imports, args.device, args.threads) as loaded:
            record = _measured(loaded, args)
        environment = record.pop("environment")
        records.append(record)
        name = fold(loaded.name, _TITLE_WIDTH)
        titles.append(
            "\n".join([*name, record["shown"], f"window of this map: {record['window']}"])
        )
    figures = {"threshold": args.threshold, "models": records, "environment": environment}
    maps = [record["map"] for record in records]
    measuring.write(args, figures, partial(plots.attention_maps, maps, titles=titles))
    return 0


def _measured(loaded: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Print the windows of a model's heads; return its record for JSON."""
    text = measuring.one_text(loaded, args, _LENGTH)
    with loaded.running():
        weights = attention_map(loaded.model, text.ids)
    layers = _chosen("layer", args.layer, weights.shape[0], loaded)
    heads = _chosen("head", args.head, weights.shape[1], loaded)
    windows = attention_window(weights, args.threshold)
    panel = weights[np.ix_(layers, heads)].mean(axis=(0, 1))
    window = int(attention_window(panel, args.threshold))
    parts = zip(("layer", "head"), (args.layer, args.head), weights.shape[:2], strict=True)
    shown = ", ".join(f"mean of {n} {x}s" if i is None else f"{x} {i}" for x, i, n in parts)
    print_table(
        f"Attention windows of {loaded.name}: how many tokens a head looks back (mean weight of "
        f"its queries at least {args.threshold:g}), in one text, {text.description}",
        "layer", [f"head {head}" for head in heads],
        [(str(layer), [str(windows[layer, head]) for head in heads]) for layer in layers],
    )  # fmt: skip
    if len(layers) * len(heads) > 1:
        print(f"Window of the map that is drawn, {shown}: {window}\n")
    return {
        **loaded.facts(text.description), "length": len(text.ids), "shown": shown,
        "windows": windows, "window": window, "map": panel,
    }  # fmt: skip


def _chosen(option: str, value: int | None, count: int, loaded: Model) -> list[int]:
    """Return the indices of the layers or heads that the user asks for."""
    if value is not None and value >= count:
        raise UsageError(f"--{option} {value}: {loaded.path} has {count}, numbered from 0")
    return list(range(count)) if value is None else [value]
