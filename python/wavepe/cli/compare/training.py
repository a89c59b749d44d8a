"""Training and evaluation of one small byte-level Llama (needs torch and transformers)."""

from __future__ import annotations

import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import wavepe.hf

from ..._files import TERMINATION_SIGNALS, leading_names, new_file, raise_interrupt
from ..device import CPU, Device
from ..errors import CommandError, UsageError
from .comparison import Listener
from .data import batch_at
from .plan import Plan
from .settings import Settings
from .tasks import TASKS

VOCABULARY = 256
# Small models train faster from more than transformers' 0.02; with less than this, the token
# embeddings are long drowned by what an absolute encoding adds to them.
INITIAL_SPREAD = 0.06
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0
WARM_UP_SHARE = 0.1
LAST_RATE_SHARE = 0.05
# In a task's loss, of the text between its statements.
TEXT_WEIGHT = 1.0
# Weight of the newest step in the loss that is shown.
LOSS_MEMORY = 0.02


_PLAIN = ("spec", "seed", "run", "step", "seconds", "loss", "variants", "devices")
_WITH_STATE = ("model", "optimizer")


@dataclass
class State:
    """A training under way; `loss` is a running mean in nats per byte.

    `variants` are those of the kernels it ran on, and `devices` what it ran on: others round
    differently.
    """

    model: Any  # a Hugging Face model
    optimizer: torch.optim.Optimizer
    spec: str = ""
    seed: int = 0
    run: str = ""  # names the settings of the comparison
    step: int = 0
    seconds: float = 0.0
    loss: float = math.log(VOCABULARY)
    variants: list[str] = field(default_factory=lambda: [wavepe.variant()])
    devices: list[str] = field(default_factory=lambda: [CPU.label])

    def save(self, path: Path) -> None:
        content = {name: getattr(self, name) for name in _PLAIN}
        content |= {name: getattr(self, name).state_dict() for name in _WITH_STATE}
        # Into an open file: with a path, torch's errors do not tell the system's.
        with new_file(path) as part, part.open("wb") as file:
            torch.save(content, file)

    def load(self, path: Path) -> None:
        # To the CPU, whatever it was saved on: load_state_dict copies from there.
        content = torch.load(path, map_location="cpu", weights_only=True)
        if (content.get("spec"), content.get("seed")) != (self.spec, self.seed):
            raise ValueError(f"it is of {content.get('spec')} with seed {content.get('seed')}")
        if content.get("run") != self.run:
            raise ValueError("it is of another comparison")
        for name in _WITH_STATE:
            getattr(self, name).load_state_dict(content[name])
        content.setdefault("devices", [CPU.label])  # of a state from before there were others
        for name in _PLAIN:
            setattr(self, name, content[name])


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


def check_rows(settings: Settings) -> None:
    """UsageError where a Llama of these settings cannot have the encoding of a row."""
    for row in settings.rows:
        try:
            with torch.device("meta"):
                for spec in dict.fromkeys((str(row.trained), str(row.read))):
                    new_model(spec, 0, settings)
        except ValueError as error:
            raise UsageError(f"--encodings {row.name}: {error}") from None


def train(
    plan: Plan,
    settings: Settings,
    text: np.ndarray,
    saved: Path,
    run: str,
    save_every: int,
    report: Listener,
    device: Device = CPU,
    keep: Callable[[Any, int], None] | None = None,
) -> State:
    """Train from the beginning, or from `saved` where that exists, to the last step.

    `run` names the comparison's settings: a state of another one is refused. `keep` is given the
    model at the plan's kept steps.

    The state is saved every `save_every` steps. Ctrl-C, SIGTERM and SIGHUP save after the step
    under way and raise KeyboardInterrupt. Nothing is saved before the losses up to it are read and
    found finite.
    """
    # the same weights on every device
    model = (_continued(plan) if plan.begun else new_model(plan.spec, plan.seed, settings)).to(
        device.place
    )
    state = State(
        model, _optimizer(model, settings), plan.name, plan.seed, run, devices=[device.label]
    )
    if saved.exists():
        try:
            state.load(saved)
        except Exception as error:
            raise CommandError(f"cannot resume from {saved} ({error}): delete it") from error
    report.starts_at(state.step)
    if state.step:
        report.note(f"{plan.name}: resumes at step {state.step}")
    _note_changes(state, report, device)
    model.train()
    unread: list[torch.Tensor] = []
    with _interrupt_noted() as noted:
        while state.step < plan.steps:
            began = time.perf_counter()
            batch = _batch(plan, settings, text, state.step)
            rate = settings.learning_rate * _schedule(state.step, plan.steps)
            unread.append(_train_step(state, batch, rate, device))
            state.step += 1
            last = state.step == plan.steps
            kept = state.step in plan.kept_steps
            due = state.step % save_every == 0 and not last
            if last or due or kept or state.step % device.read_every == 0:
                _read(state, unread, report)
            if kept and keep is not None:
                keep(state.model, state.step)
            state.seconds += time.perf_counter() - began
            if noted or due:
                _read(state, unread, report)
                state.save(saved)
            if noted:
                noted[0]()
    return state


def _continued(plan: Plan) -> torch.nn.Module:
    """The model of the checkpoint from which the plan goes on, with the plan's encoding."""
    assert plan.begun is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)  # for what a learned encoding adds
        return load_model(plan.begun, plan.spec)


def load_model(folder: Path, spec: str) -> torch.nn.Module:
    """The saved model, read with the encoding `spec`; CommandError where it is damaged."""
    try:
        model, found = wavepe.hf.WavePELlamaForCausalLM.from_pretrained(
            folder, position_encoding=spec, output_loading_info=True
        )
        if lost := [key for key in found["missing_keys"] if ".position_encoding." not in key]:
            raise ValueError(f"its files lack {leading_names(sorted(lost))}")
        return model
    except Exception as error:  # of transformers, safetensors, torch: they know what is damaged
        raise CommandError(
            f"cannot load {folder} ({error}): remove that folder, and it is trained again"
        ) from error


def _note_changes(state: State, report: Listener, device: Device) -> None:
    """Say, and keep, on what a training goes on that began on something else."""
    if wavepe.variant() not in state.variants:
        report.note(
            f"{state.spec}: began with variant {' and '.join(state.variants)}, goes on with "
            f"{wavepe.variant()}: figures may differ in their last digits"
        )
        state.variants.append(wavepe.variant())
    if device.label not in state.devices:
        report.note(
            f"{state.spec}: began on {' and '.join(state.devices)}, goes on with {device.label}: "
            "figures may differ"
        )
        state.devices.append(device.label)


class Batch(NamedTuple):
    """Tokens (batch, length + 1), each to be predicted by those before it; of a task, with a mark
    on those that are asked for, bool (batch, length)."""

    tokens: torch.Tensor
    asked: torch.Tensor | None


def _batch(plan: Plan, settings: Settings, text: np.ndarray, step: int) -> Batch:
    """The batch of a step: it follows from the seed and the step alone."""
    if not settings.task:
        step += plan.drawn
        return Batch(
            torch.from_numpy(batch_at(text, step, plan.seed, plan.batch, plan.length)), None
        )
    drawn = TASKS[settings.task].examples(text, [plan.seed, step], plan.batch, plan.length)
    return Batch(torch.from_numpy(drawn.tokens), torch.from_numpy(drawn.questions[:, 1:] > 0))


def _train_step(state: State, batch: Batch, rate: float, device: Device) -> torch.Tensor:
    """Take a step; returns its loss and the norm of its gradient, on the device."""
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    tokens = device.put(batch.tokens)
    with device.autocasting():
        logits = state.model(input_ids=tokens[:, :-1], use_cache=False).logits
    logits, targets = logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
    if batch.asked is None:
        loss = torch.nn.functional.cross_entropy(logits, targets)
    else:
        asked = device.put(batch.asked).flatten()
        each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        loss = each[asked].mean() + each.mean() * TEXT_WEIGHT
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), CLIP)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    return torch.stack((loss.detach(), norm))


def _read(state: State, unread: list[torch.Tensor], report: Listener) -> None:
    """Take what `_train_step` returned since the last call into the running mean.

    CommandError where it is not finite: then the weights are not, either.
    """
    if not unread:
        return
    for step, (loss, norm) in enumerate(torch.stack(unread).tolist(), state.step - len(unread)):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise CommandError(
                f"{state.spec}: the loss is {loss} and the norm of its gradient {norm} at step "
                f"{step}: try a smaller --lr"
            )
        state.loss += (loss - state.loss) * max(LOSS_MEMORY, 1 / (step + 1))
    unread.clear()
    report.step(state.step, state.loss)


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
def _interrupt_noted() -> Iterator[list[Callable[[], Any]]]:
    """Within, the first Ctrl-C, SIGTERM or SIGHUP only fills the list, with what it would have
    done; a second one does it at once."""
    noted: list[Callable[[], Any]] = []
    before: dict[int, Any] = {n: signal.getsignal(n) for n in (signal.SIGINT, *TERMINATION_SIGNALS)}
    ours = {  # others are ignored, or not our affair
        number: handler
        for number, handler in before.items()
        if handler in (signal.default_int_handler, raise_interrupt)
    }

    def note(number: int, frame: Any) -> None:
        noted.append(functools.partial(ours[number], number, frame))
        restore()

    def restore() -> None:
        for number, handler in ours.items():
            signal.signal(number, handler)

    if not ours or threading.current_thread() is not threading.main_thread():
        yield noted
        return
    for number in ours:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        restore()
