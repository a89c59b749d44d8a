"""How one model is trained: its steps, the schedule of the learning rate, and the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..hf.learned import learned_ids, parameter_groups

BETAS = (0.9, 0.95)
TRANSFER_RATE = 3  # of a transfer step, relative to other steps


@dataclass(frozen=True)
class Plan:
    """The plan of a training.

    The rate warms up in the share `warm_up` of the steps. A cosine lowers it to the share
    `last_rate`: after the warm-up, or from the first step on if it ends at 0. The first `transfer`
    steps have a warm-up of their own. Nothing that an encoding learns decays. If no weight does,
    the parameters of encodings have `learned_rate` times the rate.
    """

    name: str
    seed: int
    steps: int
    batch: int
    length: int
    rate: float
    warm_up: float = 0.1
    last_rate: float = 0.05
    decay: float = 0.1
    learned_rate: float = 1.0
    transfer: int = 0
    kept_steps: tuple[int, ...] = ()

    def factor(self, step: int) -> float:
        """Return the factor on the rates at a step."""
        steps, transfers = self.transfer, step < self.transfer
        if not transfers:
            step, steps = step - self.transfer, self.steps - self.transfer
        warm = max(1, round(self.warm_up * steps))
        rise = min(1.0, (step + 1) / warm)
        if transfers:
            return TRANSFER_RATE * rise
        begin = warm if self.last_rate else 0  # of the cosine
        done = max(0, step - begin) / max(1, steps - begin)
        return rise * (self.last_rate + (1 - self.last_rate) * 0.5 * (1 + math.cos(math.pi * done)))

    def optimizer(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        """Return AdamW for the parameters that are trained."""
        if self.decay:
            groups = parameter_groups(model, self.decay)
        else:
            learned, groups = learned_ids(model), [{"params": []}, {"params": []}]
            for weight in filter(lambda x: x.requires_grad, model.parameters()):
                groups[id(weight) in learned]["params"].append(weight)
            groups[1]["lr"] = self.rate * self.learned_rate
            options["weight_decay"] = 0.0
        return torch.optim.AdamW(groups, lr=self.rate, betas=BETAS, **options)
