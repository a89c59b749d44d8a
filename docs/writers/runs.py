"""The kept comparisons, and how they were made, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.compare_kept import KEPT

from .pages import kept, wrapped

STANDARD = "the Python standard library's sources"


def comparison(root: Path, name: str) -> dict[str, Any]:
    """Return the kept results of a comparison."""
    return kept(root, KEPT / f"{name}.json")


def made_with(*parts: Mapping[str, Any]) -> str:
    """Return how a comparison of one or more parts was made, in sentences."""
    about = parts[0]["environment"]
    settings, data = about["settings"], about["data"]
    trainings = sum(part["trainings"] for part in parts)
    minutes = sum(part["seconds"] for part in parts) / 60
    each = [part["environment"]["settings"] for part in parts]
    batches = " or ".join(
        f"{one['batch']} sequences of {one['train_length']} bytes" for one in each
    )
    steps = f"{settings['steps']} steps"
    if settings.get("finetune"):
        steps += f", or of {settings['finetune_steps']} that continue one,"
    text = (
        f"{settings['seeds']} seed{'s' * (settings['seeds'] > 1)}. "
        f"{trainings} trainings of {steps} took "
        f"{minutes:.0f} minutes of one thread. Model: {settings['layers']} layers, "
        f"{settings['heads']} head{'s' * (settings['heads'] > 1)} of {settings['head_dim']}. "
        f"Step: {batches}. "
        f"Evaluated: {data['evaluated_bytes']} bytes of the {settings['split']} text"
        f"{'' if STANDARD in data['text'] else ': ' + data['text']}. {_where(about)}"
    )
    newer: dict[str, list[Mapping[str, Any]]] = {}  # by machine and date
    for one in (one for part in parts for one in part.get("added", ())):
        newer.setdefault(_where(one), []).append(one)
    for where, ones in newer.items():
        names = ", ".join(f"`{row}`" for one in ones for row in one["rows"])
        minutes = sum(one["seconds"] for one in ones) / 60
        text += (
            f" Newer rows: {names}. Their {sum(one['trainings'] for one in ones)} trainings took "
            f"{minutes:.0f} minutes. {where}"
        )
    return wrapped(text)


def _where(about: Mapping[str, Any]) -> str:
    return f"{about['machine']}, {about['variant']}, torch {about['torch']}, {about['date']}."
