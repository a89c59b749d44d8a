"""The progress of a comparison: a bar in a terminal, else a few lines (needs rich)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

# Progress lines for each model if there is no terminal.
_LINES = 4
# A terminal with this many columns also has room for the bar, the loss and the time taken.
_WIDE = 76


class Report:
    """Shows the progress of models on stderr, one after the other or several at a time.

    `steps` holds the training steps of each model. `part` is the name of the comparison, if there
    are several.
    """

    def __init__(self, steps: Sequence[int], *, quiet: bool, part: str = "") -> None:
        # With emoji, rich would turn ":x:" in a spec or a path into a picture.
        self._console = Console(stderr=True, quiet=quiet, highlight=False, emoji=False)
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self.bar = terminal and not quiet
        self.steps, self.part = steps, part
        self.pace = _Pace(steps)
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
            disable=not self.bar,
            refresh_per_second=4,
            transient=True,
        )
        self._task = self._progress.add_task("", total=sum(steps), loss="", left="", visible=False)

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

    def model(self, number: int, title: str) -> ModelReport:
        """Begin the model `number` (from 0); return the object that receives its progress."""
        report = ModelReport(self, number, title)
        report.describe(title)
        return report

    def note(self, text: str) -> None:
        """Print a line that stays. A closed stderr does not end the training."""
        with suppress(OSError):
            self._console.print(text, markup=False, soft_wrap=True)

    def describe(self, place: str, text: str, short: str) -> None:
        """Show the current work, cut to leave room for the numbers; `short` if it is narrow."""
        text, width = f"{place} {text if self._wide else short}", self._console.width
        most = max(16, width // 3 if self._wide else width // 2)
        text = text if len(text) <= most else text[: most - 3] + "..."
        self._progress.update(self._task, description=text, visible=True)

    def advance(self, loss: str, left: str) -> None:
        """Move the bar to the number of finished steps."""
        if self.bar:
            self._progress.update(self._task, completed=self.pace.done, loss=loss, left=left)


class ModelReport:
    """Receives the progress of one model."""

    def __init__(self, report: Report, number: int, title: str) -> None:
        self._report, self._number, self._title = report, number, title
        self._before = 0  # steps of the stages before this one

    def stage(self, after: int) -> None:
        """Begin a training that comes after `after` steps of the same model."""
        self._before = after

    def starts_at(self, step: int) -> None:
        """Say that an earlier call has done `step` steps of the training."""
        self._report.pace.skip_to(self._number, self._before + step)
        self._report.advance("", "")

    def evaluating(self, spec: str) -> None:
        """Say that the row `spec` is being evaluated."""
        self._report.describe(self._place(), f"evaluating {spec}", spec)

    def step(self, step: int, loss: float) -> None:
        """Say that `step` steps of the training are done."""
        pace, steps = self._report.pace, self._report.steps[self._number]
        before = pace.of[self._number]
        done = self._before + step
        pace.advance_to(self._number, done)
        left = f"{_clock(pace.left())} left"
        self._report.advance(f"loss {loss:.3f}", left)
        # After the last step, the row prints a line of its own.
        if not self._report.bar and done < steps and _passes_mark(before, done, steps):
            self.note(f"{self._title}: step {done} of {steps}, loss {loss:.3f}, {left}")

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._report.note(f"{self._place()} {text}")

    def describe(self, text: str) -> None:
        """Show the current work."""
        self._report.describe(self._place(), text, text)

    def _place(self) -> str:
        part = f"{self._report.part} " if self._report.part else ""
        return f"[{part}{self._number + 1}/{len(self._report.steps)}]"


class _Pace:
    """The number of finished steps, and the time left, estimated from this session alone."""

    def __init__(self, totals: Sequence[int]) -> None:
        self.total = sum(totals)
        self.of = [0] * len(totals)
        self._skipped = 0
        self._began: float | None = None

    @property
    def done(self) -> int:
        return sum(self.of)

    def advance_to(self, number: int, done: int) -> None:
        """Count the steps of the model `number` up to `done`.

        The first ones warm up, and do not count in the estimate.
        """
        if self._began is None:
            self._began = time.monotonic()
            self._skipped += done - self.of[number]
        self.of[number] = done

    def skip_to(self, number: int, done: int) -> None:
        """Count the steps of the model `number` up to `done` as done in an earlier session."""
        self._skipped += done - self.of[number]
        self.of[number] = done

    def left(self) -> float | None:
        own = self.done - self._skipped
        if own <= 0 or self._began is None:
            return None
        return (time.monotonic() - self._began) / own * (self.total - self.done)


def _passes_mark(before: int, step: int, steps: int) -> bool:
    """Return whether one of the _LINES marks is passed between the steps `before` and `step`."""
    return step * _LINES // steps > before * _LINES // steps


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
