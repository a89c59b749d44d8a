"""The training of a small model on batches that follow from the step (needs torch)."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

import wavepe

from ..common.errors import CommandError
from ..common.files import TERMINATION_SIGNALS, new_file, raise_interrupt
from .device import CPU, Device
from .plan import Plan

CLIP = 1.0
LOSS_MEMORY = 0.02  # the weight of the newest step in the running mean

# tell(event, *values): "doing", "note", "skip", "step" or "result"; true after a step: end there
Tell = Callable[..., Any]


class Stopped(Exception):
    """The one who asked for the work has ended."""


class Batch(NamedTuple):
    tokens: torch.Tensor  # (batch, length + 1)
    asked: torch.Tensor | None  # for a task, which are answers, bool (batch, length)


_PLAIN = ("spec", "seed", "run", "step", "seconds", "loss", "variants", "devices")
_WITH_STATE = ("model", "optimizer")


@dataclass
class State:
    """The state of a training, with all kernels and devices, whose results differ by rounding."""

    model: Any  # a Hugging Face model
    optimizer: torch.optim.Optimizer
    spec: str = ""
    seed: int = 0
    run: str = ""  # the digest of the comparison's settings
    step: int = 0
    seconds: float = 0.0
    loss: float = 0.0  # a running mean, in nats per token
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
        for name in _PLAIN:
            setattr(self, name, content[name])


def train(
    plan: Plan, model: Any, batch_at: Callable[[int], Batch], saved: Path, run: str,
    save_every: int, tell: Tell, device: Device = CPU,
    keep: Callable[[Any, int], None] | None = None,
) -> State:  # fmt: skip
    """Train to the last step, from the beginning or from the state `saved` if it exists.

    `keep(model, step)` is called at the kept steps of the plan. After Ctrl-C, SIGTERM or SIGHUP,
    the function finishes the step, saves the state and raises KeyboardInterrupt. No state is saved
    after a loss that is not finite.
    """
    model = model.to(device.place)
    # At first the loss is that of a guess among all tokens.
    state = State(
        model, plan.optimizer(model, fused=True), plan.name, plan.seed, run,
        loss=math.log(model.config.vocab_size), devices=[device.label],
    )  # fmt: skip
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
    for used, now in ((state.variants, wavepe.variant()), (state.devices, device.label)):
        if now not in used:
            before = " and ".join(used)
            tell("note", f"{plan.name}: began on {before}, continues on {now}: figures may differ")
            used.append(now)
    model.train()
    if device.compiles:
        model.compile()
    unread: list[torch.Tensor] = []
    with _interrupt_noted() as noted:
        while state.step < plan.steps and not noted:
            began = time.perf_counter()
            rate = plan.rate * plan.factor(state.step)
            unread.append(_train_step(state, batch_at(state.step), rate, device))
            state.step += 1
            last = state.step == plan.steps
            kept = state.step in plan.kept_steps
            due = state.step % save_every == 0 and not last
            reads = last or due or kept or state.step % device.read_every == 0
            stopped = reads and _read_losses(state, unread, tell)
            if kept and keep is not None:
                keep(state.model, state.step)
            state.seconds += time.perf_counter() - began
            if noted or stopped or due:
                _read_losses(state, unread, tell)
                state.save(saved)
            if stopped:
                raise Stopped
    return state


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
        loss = each[asked].mean() + each.mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), CLIP)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    return torch.stack((loss.detach(), norm))


def _read_losses(state: State, unread: list[torch.Tensor], tell: Tell) -> bool:
    """Add the results of `_train_step` since the last call to the running mean.

    Return whether the training should end. CommandError if one is not finite, because the weights
    are not finite either.
    """
    if not unread:
        return False
    for step, (loss, norm) in enumerate(torch.stack(unread).tolist(), state.step - len(unread)):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise CommandError(
                f"{state.spec}: the loss is {loss} and the norm of its gradient {norm} at step "
                f"{step}: try a smaller `lr`"
            )
        state.loss += (loss - state.loss) * max(LOSS_MEMORY, 1 / (step + 1))
    unread.clear()
    return bool(tell("step", state.step, state.loss))


@contextmanager
def _interrupt_noted() -> Iterator[list[int]]:
    """Yield a list that receives the first Ctrl-C, SIGTERM or SIGHUP; at the end, raise it."""
    noted: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()  # others get no signals
    numbers = (signal.SIGINT, *TERMINATION_SIGNALS) if is_main else ()
    raising = (signal.default_int_handler, raise_interrupt)  # others are ignored, or another code's
    handlers: dict[int, Any] = {n: x for n in numbers if (x := signal.getsignal(n)) in raising}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        restore()

    for number in handlers:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        restore()
    if noted:
        signal.raise_signal(noted[0])
