"""The plan of one training, from the settings of its comparison, and who hears of its progress."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .settings import Settings


class Listener(Protocol):
    """Receives the progress of a model: a `progress.ModelReport`, or a worker's pipe to one."""

    def stage(self, after: int) -> None: ...
    def starts_at(self, step: int) -> None: ...
    def step(self, step: int, loss: float) -> None: ...
    def evaluating(self, spec: str) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class Plan:
    """The plan of a training: `steps` steps with `batch` sequences of `length`.

    `name` is SPEC or TRAINED/SPEC, and `spec` is the encoding. The training starts with new
    weights, or continues from the checkpoint `base`, after `batches_before` batches. The model is
    kept after each of `kept_steps`.
    """

    name: str
    spec: str
    seed: int
    length: int
    batch: int
    steps: int
    base: Path | None = None
    batches_before: int = 0
    kept_steps: tuple[int, ...] = ()


def plan_of(settings: Settings, name: str, seed: int, base: Path | None = None) -> Plan:
    """Return the plan of the training `name`.

    A training that continues from `base` sees as many tokens in a step as the first one.
    """
    spec = name.rpartition("/")[2]
    if base is None:
        parts, steps = settings.keep + 1, settings.steps
        kept = tuple(sorted({steps * part // parts for part in range(1, parts)} - {0, steps}))
        size = (settings.train_length, settings.batch)
        return Plan(name, spec, seed, *size, steps, kept_steps=kept)
    batch = max(1, settings.batch * settings.train_length // settings.finetune)
    more = settings.finetune_steps
    return Plan(name, spec, seed, settings.finetune, batch, more, base, settings.steps)
