"""Training and evaluation of one small byte-level Llama (needs torch and transformers)."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wavepe.hf
from wavepe.analysis import perplexity

from .data import batch_at
from .errors import CommandError
from .folder import write_at_once
from .progress import Report
from .settings import Settings

VOCABULARY = 256
# Small models train faster from more than transformers' 0.02; with less than this, the token
# embeddings are long drowned by what an absolute encoding adds to them.
INITIAL_SPREAD = 0.06
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0
WARM_UP_SHARE = 0.1
LAST_RATE_SHARE = 0.05
# Weight of the newest step in the loss that is shown.
LOSS_MEMORY = 0.02


@dataclass
class State:
    """A training under way; `loss` is a running mean in nats per byte."""

    model: Any  # a Hugging Face model
    optimizer: torch.optim.Optimizer
    step: int = 0
    seconds: float = 0.0
    loss: float = math.log(VOCABULARY)

    def save(self, path: Path) -> None:
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "loss": self.loss,
        }
        write_at_once(path, lambda part: torch.save(content, part))

    def load(self, path: Path) -> None:
        content = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.step, self.seconds = content["step"], content["seconds"]
        self.loss = content["loss"]


def new_model(spec: str, seed: int, settings: Settings) -> torch.nn.Module:
    """An untrained Llama whose position encoding is `spec`; weights follow from `seed` alone."""
    config = wavepe.hf.WavePELlamaConfig(
        position_encoding=spec,
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden,
        intermediate_size=_intermediate(settings.hidden),
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
        return wavepe.hf.WavePELlamaForCausalLM(config)


def train(
    spec: str,
    seed: int,
    settings: Settings,
    tokens: np.ndarray,
    saved: Path,
    save_every: int,
    report: Report,
) -> State:
    """Train from the beginning, or from `saved` where that exists, to the last step.

    The state is saved every `save_every` steps. Ctrl-C saves after the step under way and raises
    KeyboardInterrupt.
    """
    model = new_model(spec, seed, settings)
    state = State(model, _optimizer(model, settings))
    if saved.exists():
        try:
            state.load(saved)
        except Exception as error:
            raise CommandError(f"cannot resume from {saved} ({error}): delete it") from error
    report.starts_at(state.step)
    model.train()
    with _interrupt_noted() as noted:
        while state.step < settings.steps:
            began = time.perf_counter()
            batch = batch_at(tokens, state.step, seed, settings.batch, settings.train_length)
            loss = _train_step(state, torch.from_numpy(batch), settings)
            if not math.isfinite(loss):
                raise CommandError(
                    f"{spec}: the loss is {loss} at step {state.step}: try a smaller --lr"
                )
            state.step += 1
            state.loss += (loss - state.loss) * max(LOSS_MEMORY, 1 / state.step)
            state.seconds += time.perf_counter() - began
            report.step(state.step, state.loss)
            if noted or (state.step % save_every == 0 and state.step < settings.steps):
                state.save(saved)
            if noted:
                raise KeyboardInterrupt
    return state


def evaluate(
    folder: Path, spec: str, tokens: np.ndarray, lengths: tuple[int, ...]
) -> dict[str, float]:
    """Whole-sequence perplexity per byte of the saved model read with the encoding `spec`."""
    model = wavepe.hf.WavePELlamaForCausalLM.from_pretrained(folder, position_encoding=spec)
    held_out = torch.from_numpy(tokens.astype(np.int64))
    return {str(length): perplexity(model, held_out, length) for length in lengths}


def _train_step(state: State, batch: torch.Tensor, settings: Settings) -> float:
    rate = settings.learning_rate * _schedule(state.step, settings.steps)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    logits = state.model(input_ids=batch[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), CLIP)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    return loss.item()


def _schedule(step: int, steps: int) -> float:
    """Share of the full learning rate: linear warm-up, then a cosine to LAST_RATE_SHARE."""
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return LAST_RATE_SHARE + (1 - LAST_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * done))


def _optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW; decays matrices only."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=BETAS,
        fused=True,
    )


def _intermediate(hidden: int) -> int:
    """Llama's 8/3 of the hidden size, rounded up to a multiple of 32."""
    return -(-8 * hidden // 96) * 32


@contextmanager
def _interrupt_noted() -> Iterator[list[int]]:
    """Within, the first Ctrl-C only fills the list; the second one interrupts at once."""
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread()
    if not ours or before is not signal.default_int_handler:
        yield noted  # ignored, or another's affair
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
