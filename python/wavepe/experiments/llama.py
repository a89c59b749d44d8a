"""The small Llama of bytes that a comparison trains (needs torch and transformers)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wavepe.hf

from ..common.errors import UsageError
from ..training.loop import Batch
from ..training.plan import Plan
from .data import batch_at
from .model import load_model
from .settings import Settings
from .tasks import TASKS

VOCABULARY = 256
# Small models train faster with more than transformers' 0.02. With less than this, the vectors of
# an absolute encoding would be much larger than the token embeddings for a long time.
INITIAL_SPREAD = 0.06


def new_model(spec: str, seed: int, settings: Settings, base: Path | None = None) -> Any:
    """Return an untrained Llama with the encoding `spec`, or the checkpoint `base` with it.

    New weights, on the CPU, depend on `seed` alone.
    """
    config = wavepe.hf.WavePELlamaConfig(
        position_encoding=spec,
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden,
        intermediate_size=-(-8 * settings.hidden // 96) * 32,  # 8/3, in multiples of 32
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.train_length,
        tie_word_embeddings=True,
        initializer_range=INITIAL_SPREAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return load_model(base, spec) if base else wavepe.hf.WavePELlamaForCausalLM(config)


def check_rows(settings: Settings) -> None:
    """Raise UsageError if a Llama with these settings cannot have the encoding of a row."""
    for row in settings.rows:
        try:
            with torch.device("meta"):
                for spec in (str(row.trained), str(row.evaluated)):
                    new_model(spec, 0, settings)
        except ValueError as error:
            raise UsageError(f"`encodings` {row.name}: {error}") from None


def plan_of(settings: Settings, name: str, seed: int, *, continued: bool = False) -> Plan:
    """Return the plan of the training `name`.

    A training that continues another one sees as many tokens in a step as the first one.
    """
    rate = settings.learning_rate
    if not continued:
        parts, steps = settings.keep + 1, settings.steps
        kept = tuple(sorted({steps * part // parts for part in range(1, parts)} - {0, steps}))
        size = (steps, settings.batch, settings.train_length)
        return Plan(name, seed, *size, rate, kept_steps=kept)
    batch = max(1, settings.batch * settings.train_length // settings.finetune)
    return Plan(name, seed, settings.finetune_steps, batch, settings.finetune, rate)


def batches(
    plan: Plan, settings: Settings, text: np.ndarray, before: int = 0
) -> Callable[[int], Batch]:
    """Return a function that gives the batch of a step, which depends on seed and step alone.

    A text gives its batches after `before` others.
    """
    size = (plan.batch, plan.length)

    def batch(step: int) -> Batch:
        if not settings.task:
            return Batch(torch.from_numpy(batch_at(text, before + step, plan.seed, *size)), None)
        drawn = TASKS[settings.task].examples(text, [plan.seed, step], *size)
        return Batch(torch.from_numpy(drawn.tokens), torch.from_numpy(drawn.questions[:, 1:] > 0))

    return batch
