"""A progress bar in the terminal (needs rich)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(*, quiet: bool) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Give a function begin(title) that starts a bar on stderr.

    begin returns the bar's progress(done, total). The bar is shown in terminals only.
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

            def step(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            return step

        yield begin
