"""What one training is to do, from the settings of its comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .settings import Settings


@dataclass(frozen=True)
class Plan:
    """`steps` steps on `batch` sequences of `length` each.

    `name` is the training's, SPEC or TRAINED/SPEC; `spec` the encoding. It begins with fresh
    weights or, with `begun`, goes on from that checkpoint. `drawn` batches were drawn before.
    """

    name: str
    spec: str
    seed: int
    length: int
    batch: int
    steps: int
    begun: Path | None = None
    drawn: int = 0
    kept_steps: tuple[int, ...] = ()


def plan_of(settings: Settings, name: str, seed: int, begun: Path | None = None) -> Plan:
    """The plan of the training `name`; that which goes on sees as many tokens a step."""
    spec = name.rpartition("/")[2]
    if begun is None:
        parts, steps = settings.keep + 1, settings.steps
        kept = tuple(sorted({steps * part // parts for part in range(1, parts)} - {0, steps}))
        size = (settings.train_length, settings.batch)
        return Plan(name, spec, seed, *size, steps, kept_steps=kept)
    batch = max(1, settings.batch * settings.train_length // settings.finetune)
    more = settings.finetune_steps
    return Plan(name, spec, seed, settings.finetune, batch, more, begun, settings.steps)
