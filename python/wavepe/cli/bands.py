"""``wavepe bands``: the largest rotary pair of each head, measured and predicted [F]."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .._rope_frequencies import DEFAULT_THETA
from ..experiments import model as models
from ..experiments.tables import print_rows, wrapped
from ..experiments.text import tokens_for
from . import outputs
from .options import Number, add_model

_LONGEST = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``wavepe bands``."""
    add_model(parser)
    add = parser.add_argument
    add(
        "--of",
        choices=("key", "query"),
        default="key",
        help="measure keys or queries (default: %(default)s)",
    )
    add("--length", action=Number,
        help=f"tokens to run (default: the trained length, at most {_LONGEST})")  # fmt: skip
    add("--train-length", action=Number,
        help="trained length to predict with (default: that of config.json)")  # fmt: skip
    outputs.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables and write the files."""
    with outputs.measuring(args, "bands") as loaded:
        length = args.length or min(loaded.trained_length or _LONGEST, _LONGEST)
        train_length = args.train_length or loaded.trained_length
        text = tokens_for(loaded, args.data, [length], length)

        from ..analysis import measured_band

        with loaded.running():
            found = measured_band(loaded.model, text.ids, of=args.of)
        rows = _predictions(loaded, found, train_length)
        title = f"Bands of {loaded.name}: the pair of each {args.of} that is largest"
        _print(title, text.description, found, rows, train_length)
        facts = loaded.facts(text.description)
    figures = {
        **facts, "of": args.of, "length": length, "train_length": train_length,
        "band": found["band"], "mean": found["mean"], "predictions": rows,
    }  # fmt: skip

    def draw(path: Path) -> None:
        from ..analysis.plots import band_heatmap

        predicted = rows[0]["predicted"] if len(rows) == 1 else None
        band_heatmap(
            found["heatmap"], path, measured=found["mean"], predicted=predicted,
            title=f"{loaded.name}: norms of the pairs of {args.of}s",
        )  # fmt: skip

    outputs.write(args, figures, draw)
    return 0


def _predictions(
    loaded: models.Model, found: dict[str, Any], train_length: int | None
) -> list[dict[str, Any]]:
    """Return the measured and predicted band for each base of the model."""
    from ..analysis import predicted_band

    pairs = found["heatmap"].shape[1]
    kinds = list(getattr(loaded.config, "layer_types", None) or ())
    rows = []
    bases: dict[str, float | None] = {**_bases(loaded)} or {"": None}
    for kind, theta in bases.items():
        band = found["band"]
        if kind in kinds:
            band = band[[index for index in range(len(band)) if kinds[index] == kind]]
        band = band[band >= 0]
        mean = float(band.mean()) if band.size else None
        predicted = None
        if train_length is not None and theta is not None and theta > 1:
            predicted = predicted_band(2 * pairs, theta, train_length)
        rows.append({
            "layers": kind or "all", "theta": theta, "pairs": pairs, "mean": mean,
            "relative": None if mean is None else mean / pairs, "predicted": predicted,
        })  # fmt: skip
    return rows


def _bases(loaded: models.Model) -> dict[str, float]:
    """Return the base of each layer type ("" for all layers); empty if it is unknown."""
    from ..hf import rope_config
    from ..hf.rotary import RopeRotation

    own = [module for module in loaded.model.modules() if isinstance(module, RopeRotation)]
    if own:
        bases = {}
        for rotation in own:
            encoding = rotation.encoding
            other = encoding.inference_theta
            theta = other if isinstance(other, float) else encoding.theta
            kind = rotation.slot.layer_type or ""
            bases[kind if len(own) == 1 or kind else str(encoding)] = theta or DEFAULT_THETA
        return bases
    try:
        return rope_config.bases(loaded.config)
    except (AttributeError, KeyError, TypeError):
        return {}


def _print(
    title: str, text: str, found: dict[str, Any], rows: list[dict[str, Any]], length: int | None
) -> None:
    band = found["band"]
    print(wrapped(f"{title}, on {text}"))
    heads = [f"head {number}" for number in range(band.shape[1])]
    print_rows("layer", heads, [
        (str(layer), [str(index) if index >= 0 else "-" for index in line])
        for layer, line in enumerate(band)
    ])  # fmt: skip
    trained = "an unknown trained length" if length is None else f"trained length {length}"
    print(wrapped(
        f"Mean i_band over layers and heads, of {rows[0]['pairs']} pairs (d/2), beside the "
        f"prediction j* = (d/2) log_theta(L/3.657) for {trained}",
    ))  # fmt: skip
    headings = ("theta", "i_band", "i_band/(d/2)", "j*", "1.1 j*")
    print_rows("layers", headings, [
        (
            row["layers"],
            [_text(value) for value in (
                row["theta"], row["mean"], row["relative"], row["predicted"],
                None if row["predicted"] is None else 1.1 * row["predicted"],
            )],
        )
        for row in rows
    ])  # fmt: skip


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 1000 else f"{value:g}"
