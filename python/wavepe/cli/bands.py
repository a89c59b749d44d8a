"""``wavepe bands``: the largest rotary pair of each head, measured and predicted [F]."""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any

import numpy as np

from ..analysis import measured_band, plots, predicted_band
from ..arrays.rope_frequencies import DEFAULT_THETA
from ..experiments.model import Model
from ..experiments.tables import print_table
from . import measuring
from .options import Number

_LONGEST = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measuring.add_arguments(parser)
    add = parser.add_argument
    add("--of", choices=("key", "query"), default="key",
        help="measure keys or queries (default: %(default)s)")  # fmt: skip
    measuring.add_length(parser, _LONGEST)
    add("--train-length", action=Number,
        help="trained length to predict with (default: that of config.json)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    return measuring.run(args, _measured)


def _measured(loaded: Model, args: argparse.Namespace) -> measuring.Measured:
    text = measuring.one_text(loaded, args, _LONGEST)
    train_length = args.train_length or loaded.trained_length
    with loaded.running():
        bands = measured_band(loaded.model, text.ids, of=args.of)
    rows = _predictions(loaded, bands, train_length)
    title = f"Bands of {loaded.name}: the pair of each {args.of} that is largest"
    heads = [f"head {number}" for number in range(bands["band"].shape[1])]
    cells = [[str(j) if j >= 0 else "-" for j in row] for row in bands["band"]]
    layers = list(zip(map(str, range(len(cells))), cells, strict=True))
    print_table(f"{title}, on {text.description}", "layer", heads, layers)
    keys = ("theta", "mean", "relative", "predicted")
    trained = f"trained length {train_length}" if train_length else "an unknown trained length"
    values = [[*(row[key] for key in keys), 1.1 * row["predicted"]] for row in rows]
    kinds = [
        (row["layers"], ["-" if math.isnan(x) else f"{x:{'.2f' if x < 1000 else 'g'}}" for x in xs])
        for row, xs in zip(rows, values, strict=True)
    ]
    print_table(
        f"Mean i_band over layers and heads, of {rows[0]['pairs']} pairs (d/2), beside the "
        f"prediction j* = (d/2) log_theta(L/3.657) for {trained}",
        "layers", ("theta", "i_band", "i_band/(d/2)", "j*", "1.1 j*"), kinds,
    )  # fmt: skip
    figures = {
        **loaded.facts(text.description), "of": args.of, "length": len(text.ids),
        "train_length": train_length, "band": bands["band"], "mean": bands["mean"],
        "predictions": rows,
    }  # fmt: skip
    predicted = rows[0]["predicted"] if len(rows) == 1 else math.nan
    return figures, partial(
        plots.band_heatmap, bands["heatmap"], measured=bands["mean"],
        predicted=predicted if math.isfinite(predicted) else None,
        title=f"{loaded.name}: norms of the pairs of {args.of}s",
    )  # fmt: skip


def _predictions(
    loaded: Model, bands: dict[str, Any], train_length: int | None
) -> list[dict[str, Any]]:
    """Return the measured and predicted band for each base; unknown numbers are NaN."""
    pairs = bands["heatmap"].shape[1]
    kinds = np.array(getattr(loaded.config, "layer_types", None) or ())
    rows = []
    for kind, theta in (_bases(loaded) or {"": math.nan}).items():
        band = bands["band"][kinds == kind] if kind in kinds else bands["band"]
        band = band[band >= 0]
        mean = float(band.mean()) if band.size else math.nan
        known = train_length is not None and theta > 1
        predicted = predicted_band(2 * pairs, theta, train_length or 1) if known else math.nan
        rows.append({
            "layers": kind or "all", "theta": theta, "pairs": pairs, "mean": mean,
            "relative": mean / pairs, "predicted": predicted,
        })  # fmt: skip
    return rows


def _bases(loaded: Model) -> dict[str, float]:
    """Return the base of each layer type ("" for all layers); empty if it is unknown."""
    from ..hf import rope_config
    from ..hf.rotary import RopeRotation

    rotations = [part for part in loaded.model.modules() if isinstance(part, RopeRotation)]
    bases = {}
    for rotation in rotations:
        rope = rotation.encoding
        theta = rope.inference_theta if isinstance(rope.inference_theta, float) else rope.theta
        kind = rotation.slot.layer_type or ("" if len(rotations) == 1 else str(rope))
        bases[kind] = theta or DEFAULT_THETA
    try:
        return bases or rope_config.bases(loaded.config)
    except (AttributeError, KeyError, TypeError):
        return {}
