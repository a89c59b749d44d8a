"""How far a comparison is: a bar in a terminal, a few lines anywhere else (needs rich)."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

# Lines per model where there is no terminal.
_LINES = 4
# Columns of a terminal that has room for the bar, the loss and the time taken as well.
_WIDE = 76


class Report:
    """Shows the training steps of several models, `steps` each, on stderr."""

    def __init__(self, models: int, steps: int, *, quiet: bool) -> None:
        # emoji would turn the ":x:" of a spec or a path into a picture
        self._console = Console(stderr=True, quiet=quiet, highlight=False, emoji=False)
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._bar = terminal and not quiet
        self._models, self._steps = models, steps
        self._title, self._model = "", 0
        self._session = _Pace(models * steps)
        self._wide = wide = self._console.width >= _WIDE
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None) if wide else None,
            TaskProgressColumn(),
            TextColumn("{task.fields[loss]}") if wide else None,
            TimeElapsedColumn() if wide else None,
            TextColumn("{task.fields[left]}"),
        )
        self._progress = Progress(
            *(column for column in columns if column),
            console=self._console,
            disable=not self._bar,
            refresh_per_second=4,
            transient=True,
        )
        self._task = self._progress.add_task(
            "", total=models * steps, loss="", left="", visible=False
        )

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def model(self, number: int, title: str) -> None:
        """Model `number` (from 0) is next."""
        self._model, self._title = number, title
        self._describe(title)

    def starts_at(self, step: int) -> None:
        """`step` steps of the model were taken by an earlier call."""
        self._session.skip_to(self._model * self._steps + step)
        self._advance("", "")
        if 0 < step < self._steps:
            self.note(f"{self._title}: resumes at step {step}")

    def evaluating(self, spec: str) -> None:
        """The row `spec` is being evaluated."""
        self._describe(f"evaluating {spec}" if self._wide else spec)

    def step(self, step: int, loss: float) -> None:
        """`step` steps of the model are done, the last of them just now."""
        before = self._session.done - self._model * self._steps
        self._session.advance_to(self._model * self._steps + step)
        left = f"{_clock(self._session.left())} left"
        self._advance(f"loss {loss:.3f}", left)
        # the last step's line is the row's own
        if not self._bar and step < self._steps and _passes_mark(before, step, self._steps):
            self.note(f"{self._title}: step {step} of {self._steps}, loss {loss:.3f}, {left}")

    def note(self, text: str) -> None:
        """A line that stays. No reader of stderr is no reason to end a training."""
        with suppress(OSError):
            self._console.print(f"{self._place()} {text}", markup=False, soft_wrap=True)

    def _describe(self, text: str) -> None:
        """What is being done, cut so that the numbers have room."""
        text, width = f"{self._place()} {text}", self._console.width
        most = max(16, width // 3 if self._wide else width // 2)
        text = text if len(text) <= most else text[: most - 3] + "..."
        self._progress.update(self._task, description=text, visible=True)

    def _place(self) -> str:
        return f"[{self._model + 1}/{self._models}]"

    def _advance(self, loss: str, left: str) -> None:
        if self._bar:
            self._progress.update(self._task, completed=self._session.done, loss=loss, left=left)


class _Pace:
    """Steps done, and the time left judged by those of this session alone."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._skipped = 0
        self._began: float | None = None

    def advance_to(self, done: int) -> None:
        """The steps up to `done` were taken now; the first ones warm up and are not judged by."""
        if self._began is None:
            self._began = time.monotonic()
            self._skipped += done - self.done
        self.done = done

    def skip_to(self, done: int) -> None:
        """The steps up to `done` took no time of this session."""
        self._skipped += done - self.done
        self.done = done

    def left(self) -> float | None:
        own = self.done - self._skipped
        if own <= 0 or self._began is None:
            return None
        return (time.monotonic() - self._began) / own * (self.total - self.done)


def _passes_mark(before: int, step: int, steps: int) -> bool:
    """Whether one of the _LINES marks lies in the steps after `before` up to `step`."""
    return step * _LINES // steps > before * _LINES // steps


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
