"""Measurements on a trained model (needs torch and transformers)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wavepe
from wavepe.analysis import measured_band, perplexity, perplexity_of, predicted_band
from wavepe.arrays.rope_frequencies import DEFAULT_THETA

from ..training.device import Device
from .model import load_model
from .settings import Protocol, Settings
from .tasks import TASKS

_EXAMPLES, _TOKENS = 128, 1 << 13  # of a task at each length, at least; of one pass
_PIECES = 8  # of the trained length, that measure a band
_EVALUATION = 1 << 40  # begins the seeds of evaluation; a model's seed begins those of training


def evaluate(
    folder: Path, spec: str, tokens: np.ndarray, settings: Settings, device: Device,
    kept: Mapping[int, Path],
) -> dict[str, Any]:  # fmt: skip
    """Measure the saved model with the encoding `spec` on the held-out bytes `tokens`.

    `kept` has the checkpoints of the training, for "bands": step -> folder.

    The dict has "perplexity" by length, per byte of the text or of a task's answers, by the first
    protocol; for several, also "protocols"; for a task, "accuracy"; and "bands" if asked for.
    """
    model = load_model(folder, spec).to(device.place)
    with device.autocasting():
        if settings.task:
            return _answers(model, tokens, settings, device)
        held_out = torch.from_numpy(tokens.astype(np.int64))
        protocols = {x: Protocol.parse(x, settings.train_length) for x in settings.protocols}
        by_protocol = {
            name: {str(n): perplexity(model, held_out, n, **x.options) for n in settings.lengths}
            for name, x in protocols.items()
        }
        result: dict[str, Any] = {"perplexity": by_protocol[settings.protocols[0]]}
        if len(by_protocol) > 1:
            result["protocols"] = by_protocol
        if settings.bands and wavepe.encoding(spec).rotates:
            result["bands"] = _bands(model, spec, held_out, settings, device, kept)
    return result


def _answers(
    model: torch.nn.Module, text: np.ndarray, settings: Settings, device: Device
) -> dict[str, Any]:
    """Return the perplexity of the bytes of the answers, and the share of right answers.

    An answer is right if greedy decoding gives it: each of its bytes is the most probable one.
    """
    result: dict[str, dict[str, float]] = {"perplexity": {}, "accuracy": {}}
    model.eval()
    for length in settings.lengths:
        count = max(_EXAMPLES, settings.eval_bytes // length)
        drawn = TASKS[settings.task].examples(text, [_EVALUATION, length], count, length)
        losses, right = [], []
        rows = max(1, _TOKENS // length)
        for first in range(0, count, rows):
            batch = device.put(torch.from_numpy(drawn.tokens[first : first + rows]))
            asked = drawn.questions[first : first + rows, 1:]
            with torch.no_grad():
                logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            where = torch.from_numpy(asked > 0).to(logits.device)
            logits, targets = logits[where].float(), batch[:, 1:][where]
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            losses.append(loss.double().cpu().numpy())
            hits = np.ones(asked.shape, bool)
            hits[asked > 0] = (logits.argmax(-1) == targets).cpu().numpy()
            for row, hit in zip(asked, hits, strict=True):
                right += [hit[row == number].all() for number in range(1, row.max() + 1)]
        result["perplexity"][str(length)] = perplexity_of(np.concatenate(losses).mean())
        result["accuracy"][str(length)] = float(np.mean(right))
    return result


def _bands(
    model: torch.nn.Module, spec: str, tokens: torch.Tensor, settings: Settings, device: Device,
    kept: Mapping[int, Path],
) -> dict[str, Any]:  # fmt: skip
    """Return the predicted band, and the measured band of keys at the end and at kept steps [F]."""
    length = settings.train_length
    theta = getattr(wavepe.encoding(spec).rotary, "theta", None) or DEFAULT_THETA
    pieces = tokens[: len(tokens) // length * length].view(-1, length)[:_PIECES]

    def band(model: torch.nn.Module) -> float:
        return float(np.mean([measured_band(model, piece)["mean"] for piece in pieces]))

    return {
        "predicted": predicted_band(settings.head_dim, theta, length),
        "key": band(model),
        "steps": {str(k): band(load_model(x, spec).to(device.place)) for k, x in kept.items()},
    }
