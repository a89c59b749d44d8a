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

from ..common.errors import CommandError, UsageError
from ..common.files import TERMINATION_SIGNALS, new_file, raise_interrupt
from ..training.device import CPU, Device
from .data import batch_at
from .model import load_model
from .settings import Settings
from .tasks import TASKS

VOCABULARY = 256
# Small models train faster with more than transformers' 0.02. With less than this, the vectors of
# an absolute encoding would be much larger than the token embeddings for a long time.
INITIAL_SPREAD = 0.06
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0
WARM_UP_SHARE = 0.1
LAST_RATE_SHARE = 0.05
# Weight of the text between the statements in the loss of a task.
TEXT_WEIGHT = 1.0
# Weight of the newest step in the running mean of the loss.
LOSS_MEMORY = 0.02


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


_PLAIN = ("spec", "seed", "run", "step", "seconds", "loss", "variants", "devices")
_WITH_STATE = ("model", "optimizer")


@dataclass
class State:
    """The state of a training; `loss` is a running mean in nats per byte.

    `variants` (of kernels) and `devices` list all that the training ran on, because results of
    others differ by rounding.
    """

    model: Any  # a Hugging Face model
    optimizer: torch.optim.Optimizer
    spec: str = ""
    seed: int = 0
    run: str = ""  # the digest of the comparison's settings
    step: int = 0
    seconds: float = 0.0
    loss: float = math.log(VOCABULARY)
    variants: list[str] = field(default_factory=lambda: [wavepe.variant()])
    devices: list[str] = field(default_factory=lambda: [CPU.label])

    def save(self, path: Path) -> None:
        content = {name: getattr(self, name) for name in _PLAIN}
        content |= {name: getattr(self, name).state_dict() for name in _WITH_STATE}
        # An open file, because torch hides the system's errors if it is given a path.
        with new_file(path) as part, part.open("wb") as file:
            torch.save(content, file)

    def load(self, path: Path) -> None:
        # load_state_dict copies from the CPU to the device.
        content = torch.load(path, map_location="cpu", weights_only=True)
        if (content.get("spec"), content.get("seed")) != (self.spec, self.seed):
            raise ValueError(f"it is of {content.get('spec')} with seed {content.get('seed')}")
        if content.get("run") != self.run:
            raise ValueError("it belongs to another comparison")
        for name in _WITH_STATE:
            getattr(self, name).load_state_dict(content[name])
        content.setdefault("devices", [CPU.label])  # old states do not have this key
        for name in _PLAIN:
            setattr(self, name, content[name])


def new_model(spec: str, seed: int, settings: Settings) -> torch.nn.Module:
    """Return an untrained Llama with the encoding `spec`; its weights depend on `seed` alone."""
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
    """Raise UsageError if a Llama with these settings cannot have the encoding of a row."""
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
    tell: Callable[..., None],
    device: Device = CPU,
    keep: Callable[[Any, int], None] | None = None,
) -> State:
    """Train to the last step, from the beginning or from the state `saved` if it exists.

    `run` is the digest of the comparison's settings; a state of another comparison is refused.
    `tell` gets the progress, as that of `comparison.Work.run`.
    `keep(model, step)` is called at the kept steps of the plan.

    The state is saved every `save_every` steps. After Ctrl-C, SIGTERM or SIGHUP, the function
    finishes the step, saves the state and raises KeyboardInterrupt. Before each save, it checks
    that all losses up to this step are finite.
    """
    # Created on the CPU, so that the weights are the same on every device.
    model = (_continued(plan) if plan.base else new_model(plan.spec, plan.seed, settings)).to(
        device.place
    )
    state = State(
        model, _optimizer(model, settings), plan.name, plan.seed, run, devices=[device.label]
    )
    if saved.exists():
        try:
            state.load(saved)
        except Exception as error:
            raise CommandError(
                f"cannot resume from {saved} ({error}): delete this file to train from the start"
            ) from error
    tell("skip", state.step)
    if state.step:
        tell("note", f"{plan.name}: resumes at step {state.step}")
    _note_changes(state, tell, device)
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
                _read_losses(state, unread, tell)
            if kept and keep is not None:
                keep(state.model, state.step)
            state.seconds += time.perf_counter() - began
            if noted or due:
                _read_losses(state, unread, tell)
                state.save(saved)
            if noted:
                noted[0]()
    return state


def _continued(plan: Plan) -> torch.nn.Module:
    """Return the model of the checkpoint that the plan continues, with the plan's encoding."""
    assert plan.base is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)  # for new parameters of a learned encoding
        return load_model(plan.base, plan.spec)


def _note_changes(state: State, tell: Callable[..., None], device: Device) -> None:
    """Report and record if a training continues with another variant or on another device."""
    if wavepe.variant() not in state.variants:
        tell(
            "note",
            f"{state.spec}: began with variant {' and '.join(state.variants)}, continues with "
            f"{wavepe.variant()}: figures may differ in their last digits",
        )
        state.variants.append(wavepe.variant())
    if device.label not in state.devices:
        tell(
            "note",
            f"{state.spec}: began on {' and '.join(state.devices)}, continues on {device.label}: "
            "figures may differ",
        )
        state.devices.append(device.label)


class Batch(NamedTuple):
    """Tokens (batch, length + 1), and for a task, which of them are answers, bool (batch, length).

    The model predicts each token from those before it.
    """

    tokens: torch.Tensor
    asked: torch.Tensor | None


def _batch(plan: Plan, settings: Settings, text: np.ndarray, step: int) -> Batch:
    """Return the batch of a step; it depends on the seed and the step alone."""
    if not settings.task:
        step += plan.batches_before
        return Batch(
            torch.from_numpy(batch_at(text, step, plan.seed, plan.batch, plan.length)), None
        )
    drawn = TASKS[settings.task].examples(text, [plan.seed, step], plan.batch, plan.length)
    return Batch(torch.from_numpy(drawn.tokens), torch.from_numpy(drawn.questions[:, 1:] > 0))


def _train_step(state: State, batch: Batch, rate: float, device: Device) -> torch.Tensor:
    """Do one step; return its loss and the norm of its gradient, on the device."""
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


def _read_losses(state: State, unread: list[torch.Tensor], tell: Callable[..., None]) -> None:
    """Add the results of `_train_step` since the last call to the running mean.

    CommandError if one is not finite, because the weights are not finite either.
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
    tell("step", state.step, state.loss)


def _schedule(step: int, steps: int) -> float:
    """Return the learning rate as a fraction: linear warm-up, then a cosine to LAST_RATE_SHARE."""
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return LAST_RATE_SHARE + (1 - LAST_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * done))


def _optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return AdamW; only the model's matrices decay, and nothing that an encoding learns."""
    groups = wavepe.hf.parameter_groups(model, WEIGHT_DECAY)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=BETAS, fused=True)


def _intermediate(hidden: int) -> int:
    """Return 8/3 of the hidden size, as in Llama, rounded up to a multiple of 32."""
    return -(-8 * hidden // 96) * 32


@contextmanager
def _interrupt_noted() -> Iterator[list[Callable[[], Any]]]:
    """Give a list that receives the action of the first Ctrl-C, SIGTERM or SIGHUP.

    The signal does nothing else. A second one acts at once.
    """
    noted: list[Callable[[], Any]] = []
    before: dict[int, Any] = {n: signal.getsignal(n) for n in (signal.SIGINT, *TERMINATION_SIGNALS)}
    ours = {  # not signals that are ignored, or that other code handles
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
    if noted:  # it came after the last step
        noted[0]()
