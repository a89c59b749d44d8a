"""A progress bar in the terminal (needs rich)."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(
    *, quiet: bool, lines: bool = False
) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Give a function begin(title) that starts a bar on stderr.

    begin returns the bar's progress(done, total). The bar is shown in terminals only. With `lines`
    other outputs get a line at each quarter.
    """
    console = Console(stderr=True, quiet=quiet, highlight=False, emoji=False)
    shown = console.is_terminal and not console.is_dumb_terminal and not quiet
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not shown, transient=True) as progress:
        task = progress.add_task("", total=None, visible=False)

        def begin(title: str) -> Callable[[int, int], None]:
            progress.reset(task, description=title, visible=True)
            begun: tuple[int, float] | None = None
            quarter = 0

            def step(done: int, total: int) -> None:
                nonlocal begun, quarter
                progress.update(task, completed=done, total=total)
                if begun is None:  # what is resumed begins in the middle
                    begun, quarter = (done, time.monotonic()), 4 * done // total
                if shown or not lines or 4 * done // total == quarter:
                    return
                quarter = 4 * done // total
                each = (time.monotonic() - begun[1]) / (done - begun[0])
                left = datetime.timedelta(seconds=round((total - done) * each))
                console.print(f"{title}: {done} of {total}, {left} left", markup=False)

            return step

        yield begin
