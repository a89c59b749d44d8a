"""The progress of long work on stderr: a bar in a terminal, else a line at each quarter."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Column

# A terminal with this many columns also has room for the bar and the loss.
_WIDE = 76


class Report:
    """Shows the progress of tasks, one after the other or several at a time (needs rich).

    `sizes` holds the steps of each task; with `begin` they need not be known. `lines` asks for
    lines where there is no bar.
    """

    def __init__(
        self, sizes: Sequence[int] = (), *, quiet: bool = False, lines: bool = True
    ) -> None:  # fmt: skip
        # With emoji, rich would turn ":x:" in a spec or a path into a picture.
        self._console = Console(stderr=True, quiet=quiet, highlight=False, emoji=False)
        has_bar = self._console.is_terminal and not self._console.is_dumb_terminal and not quiet
        self._lines = lines and not has_bar
        self._wide = self._console.width >= _WIDE
        title = Column(ratio=1, no_wrap=True, overflow="crop")
        self._progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=title),
            *([BarColumn(20)] if self._wide else []),
            TaskProgressColumn(),
            TextColumn("{task.fields[after]}", markup=False),
            console=self._console, disable=not has_bar, refresh_per_second=4, transient=True,
            expand=True, speed_estimate_period=math.inf,
        )  # fmt: skip
        self._titles: dict[int, str] = {}
        self._start(sizes)

    def _start(self, sizes: Sequence[int], title: str = "") -> None:
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._sizes, self._done = list(sizes), [0] * len(sizes)
        total, shown = sum(sizes) or None, title != ""
        self._task = self._progress.add_task(title, total=total, after="", visible=shown)

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, title: str) -> Callable[[int, int], None]:
        """Begin a task after all others; return its progress(done, total)."""
        self._start([], title)

        def progress(done: int, total: int) -> None:
            if not self._sizes:
                self._start([total], title)
            due = self._advance(0, done)
            self._show(title, self._left)
            if due:
                self.say(f"{title}: {done} of {total}, {self._left}")

        return progress

    def doing(self, number: int, title: str) -> None:
        """Show the present work of a task."""
        self._titles[number] = f"{self._place(number)} {title}"
        self._show(self._titles[number])

    def note(self, number: int, text: str) -> None:
        """Print a line of the task that stays."""
        self.say(f"{self._place(number)} {text}")

    def skip(self, number: int, done: int) -> None:
        """Count the steps of the task up to `done` as done in an earlier session."""
        if done > self._done[number]:
            self._done[number] = done
            self._progress.reset(self._task, completed=sum(self._done))

    def step(self, number: int, done: int, loss: float) -> None:
        """Show that `done` steps of a training are done, and its loss."""
        due, title = self._advance(number, done), self._titles[number]
        after = f"loss {loss:.3f}, {self._left}"
        self._show(title, after if self._wide else self._left)
        # After the last step, the row prints a line of its own.
        if due and done < self._sizes[number]:
            self.say(f"{title}: step {done} of {self._sizes[number]}, {after}")

    def say(self, text: str) -> None:
        """Print a line that stays. A closed stderr does not end the work."""
        with suppress(OSError):
            self._console.print(text, markup=False, soft_wrap=True)

    def _advance(self, number: int, done: int) -> bool:
        """Count the steps of the task up to `done`; return whether a line is due."""
        before, size = self._done[number], max(1, self._sizes[number])
        self._done[number] = done
        self._progress.update(self._task, completed=sum(self._done))
        return self._lines and 4 * done // size > 4 * before // size

    @property
    def _left(self) -> str:
        """Return the time left, estimated from the steps of this session."""
        seconds = self._progress.tasks[0].time_remaining
        return "-:--:-- left" if seconds is None else f"{datetime.timedelta(0, seconds)} left"

    def _place(self, number: int) -> str:
        return f"[{number + 1}/{len(self._sizes)}]"

    def _show(self, title: str, after: str = "") -> None:
        self._progress.update(self._task, description=title, visible=True, after=after)
