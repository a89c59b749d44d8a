"""The trainings of a comparison, one after the other, or several at a time by an executor.

Each training with its evaluations is one task. It writes what it has to tell to a file in the
folder of the comparison, so every executor whose processes see that folder shows its progress.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO
from unittest import mock

from ..common.errors import CommandError
from ..common.files import interrupt_on_signals
from .imports import import_all

if TYPE_CHECKING:
    from .comparison import Comparison, Work
    from .progress import Report

_POLL = 0.1  # seconds between two looks at the files


def run_all(
    comparison: Comparison, jobs: int, executor: Executor | None, imports: Sequence[str],
    report: Report,
) -> None:  # fmt: skip
    """Train and evaluate every model of the comparison, in this process or by an executor."""
    work, models = comparison.work, list(enumerate(comparison.models))
    if executor is None and jobs == 1:
        for number, model in models:
            work.run(model, comparison.missing(model), partial(comparison.tell, report, number))
        return
    events = work.folder.path / ".events"
    shutil.rmtree(events, ignore_errors=True)  # of a killed command
    events.mkdir()
    futures: list[Any] = []
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, events, ignore_errors=True)
        executor = executor or stack.enter_context(_pool(min(jobs, len(models)), work.folder.lock))
        stack.callback(lambda: [future.cancel() for future in futures])
        streams = []
        for number, model in models:
            file = events / str(number)
            file.touch()
            streams.append(stack.enter_context(file.open("rb")))
            task = number, comparison.missing(model), list(imports), file
            futures.append(executor.submit(_run_task, work, *task))
        try:
            while futures:
                ended = [future for future in futures if future.done()]
                for number, stream in enumerate(streams):
                    for event in _events(stream):
                        comparison.tell(report, number, *event)
                for future in ended:
                    futures.remove(future)
                    future.result()  # or its exception
                time.sleep(_POLL)
        except BrokenExecutor as error:
            raise CommandError(
                "the process of a training was killed, or its memory was not enough; finished work "
                "is kept: to continue, give the same command again"
            ) from error


def _events(stream: BinaryIO) -> Iterator[list[Any]]:
    """Yield the events that a task has written since the last call."""
    for line in stream:
        if not line.endswith(b"\n"):  # the task is writing the rest
            stream.seek(-len(line), os.SEEK_CUR)
            return
        yield json.loads(line)


def _run_task(
    work: Work, number: int, rows: Sequence[str], imports: Sequence[str], events: Path
) -> None:
    """Train and evaluate the model of a number in a process of an executor."""
    from ..training.device import torch_threads

    import_all(imports)  # before a spec is read
    model = work.settings.models[number]
    with interrupt_on_signals(), torch_threads(work.threads), events.open("a", 1) as file:

        def tell(*event: Any) -> None:
            print(json.dumps(event), file=file)

        tell("doing", model.spec)
        work.run(model, rows, tell)


@contextmanager
def _pool(count: int, lock: int) -> Iterator[Executor]:
    """Start processes, which Ctrl-C does not reach; after an error, let each save its state."""
    others = set(active_children())
    holder = Connection(os.dup(lock), writable=False)  # in this form, a new process can get it
    with ProcessPoolExecutor(count, get_context("spawn"), _begin, (holder,)) as pool:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # new processes inherit it
        try:
            # Each of them would import the script that calls `compare`, and so run it once more.
            with mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):
                for _ in range(count):
                    pool.submit(os.getpid)
        finally:
            holder.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            yield pool
        except BaseException:
            for worker in set(active_children()) - others:
                worker.terminate()
            raise


def _begin(lock: Connection) -> None:
    """Let a process of the pool hold the lock of the folder, and end with its parent."""
    os.dup(lock.fileno())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent: Any = parent_process()
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # a training saves its state first
